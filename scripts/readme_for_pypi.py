"""The README as PyPI shows it: its links lead to the repository, since files beside it aren't there.

A metadata hook of Hatchling; see ``[tool.hatch.metadata.hooks.custom]`` in ``pyproject.toml``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def absolute(text: str, repository: str) -> str:
    """Every relative link of a Markdown text, led to ``repository``. Pictures are linked as files."""

    def lead(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({repository}/{kind}/main/{link[3]})"

    return _LINK.sub(lead, text)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text()
        repository = metadata["urls"]["Repository"]
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(readme, repository)}
