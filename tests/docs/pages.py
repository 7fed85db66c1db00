"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {str(p.relative_to(ROOT)): p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
"""By their path in the repository."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def after(self) -> str:
        """Of a diff: what it makes of a script."""
        return self._side("-", "+")

    @property
    def before(self) -> str:
        return self._side("+", "-")

    def _side(self, gone: str, kept: str) -> str:
        lines = [line for line in self.code.splitlines() if not line.startswith(gone)]
        return "\n".join(line[1:] if line[:1] in (kept, " ") else line for line in lines) + "\n"


def blocks(page: str) -> list[Block]:
    text = PAGES[page].read_text()
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def blocks_in(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]
