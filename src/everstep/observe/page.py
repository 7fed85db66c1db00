"""The page as one file: no asset comes from elsewhere, and nothing in a journal can become part of it but as
text.

The data is JSON in an element that isn't run. The policy names the hashes of the one script and the one
style sheet: a browser runs nothing else, whatever the data has in it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from importlib import resources
from typing import Any

_SELF, _NOBODY = "'self'", "'none'"
_SCRIPTS = ("basics.js", "timeline.js", "incidents.js", "metrics.js", "run.js", "live.js", "main.js")


def static_page(run: dict[str, Any]) -> str:
    """One run, as a file that needs nothing else."""
    return _page(run, str(run["name"]))


def live_page() -> str:
    """A page that loads all that it shows from its server."""
    return _page(None, "Everstep")


def policy(connect: bool) -> str:
    """What the page may do, as a header or in itself."""
    script, style = _script(), _style()
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"connect-src {_SELF if connect else _NOBODY}; base-uri 'none'; form-action 'none'"
    )


def as_json(data: Any) -> str:
    """JSON that ends no element: ``<`` never stands in it as itself."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page(data: dict[str, Any] | None, title: str) -> str:
    parts = {
        "policy": policy(connect=data is None),
        "title": html.escape(f"{title} · Everstep"),
        "style": _style(),
        "data": as_json(data),
        "script": _script(),
    }
    page = _asset("page.html")
    # One after the other from the left: what was put in is not looked at again.
    done = ""
    for name in ("policy", "title", "style", "data", "script"):
        before, _, page = page.partition(f"{{{name}}}")
        done += before + parts[name]
    return done + page


@functools.cache
def _script() -> str:
    return '"use strict";\n(() => {\n' + "".join(map(_asset, _SCRIPTS)) + "start();\n})();\n"


@functools.cache
def _style() -> str:
    return _asset("page.css")


def _asset(name: str) -> str:
    return resources.files("everstep.observe").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
