"""The word for something that must hold and does not."""

from __future__ import annotations


class Violation(Exception):
    """An invariant does not hold."""
