"""What the documentation's site does beyond MkDocs: see ``mkdocs.yml``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
"""A link from a page to a file of the repository that isn't one: ``](../examples/demo.py)``."""
_DRAWN = re.compile(r"^```mermaid\n.*?^```\n", re.MULTILINE | re.DOTALL)
"""A diagram that GitHub draws. Here it would need a script of another host; the table below it has it all."""
_CODE_IN_CELL = re.compile(r"(?<=<code>)[^<\s]{25,}(?=</code>)")
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
)
_NOT_FETCHED = re.compile(r"""<link\b[^>]*\brel=["']?(?:canonical|prev|next)\b""")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links to files beside ``docs/`` lead to the repository; they must exist."""

    def to_repository(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_path} links to ../{path}, which doesn't exist")
        return f"]({config.extra['repository']}/blob/main/{path}{anchor})"

    return _OUTSIDE.sub(to_repository, _DRAWN.sub("", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Long names in tables may be broken, but only between their parts."""

    def breakable(name: re.Match[str]) -> str:
        return re.sub(r"(?<=[_./:-])(?=\w)", "<wbr>", name[0])

    return re.sub(r"<td.*?</td>", lambda cell: _CODE_IN_CELL.sub(breakable, cell[0]), html, flags=re.DOTALL)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Nothing is fetched from another host when a page is looked at."""
    for tag in re.findall(r"<[^>]+>", output):
        fetched = _FETCHED.match(tag)
        if fetched and not _NOT_FETCHED.match(tag):
            raise PluginError(f"{page.file.src_path} fetches {fetched[1]} when it is shown")
    return output
