"""Names in a run's folder that more than its journal needs to know."""

from __future__ import annotations

JOURNAL = "journal"
"""The folder of the journal."""
_DIGITS = 10


def key_of(number: int) -> str:
    """The name of one of the journal's numbered objects."""
    return f"{number:0{_DIGITS}d}"


def is_numbered(name: str) -> bool:
    """Whether it can be one of them."""
    return len(name) >= _DIGITS and name.isascii() and name.isdigit()
