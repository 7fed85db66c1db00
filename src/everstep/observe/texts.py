"""Long texts of a page, each once: ten thousand incidents mostly have a few tracebacks."""

from __future__ import annotations

MOST = 32_000
"""Characters of one text. Of a longer one, the beginning and the end are kept."""
MOST_OF_ALL = 12_000_000
"""Characters of all texts of a page."""


class Texts:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}
        self._all = 0

    def number(self, text: str) -> int:
        """Where the page finds it; 0 is the empty text."""
        if len(text) > MOST:
            left_out = len(text) - MOST
            text = f"{text[: MOST // 2]}\n[… {left_out:,} characters left out …]\n{text[-MOST // 2 :]}"
        known = self._numbers.get(text)
        if known is not None:
            return known
        if self._all + len(text) > MOST_OF_ALL:
            text = "[left out: the page would be too large. `everstep events RUN --json` has it]"
        self._all += len(text)
        return self._numbers.setdefault(text, len(self._numbers))

    def as_plain(self) -> list[str]:
        return list(self._numbers)
