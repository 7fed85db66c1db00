"""What ranks note in files of their own, ``rank-N.jsonl``, a line for everything that happens to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_read: dict[Path, tuple[int, list[dict[str, Any]]]] = {}
"""What was read of a file, and how many bytes that is: tests look all the time, and files grow."""


def notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """All notes, by rank."""
    found = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        size, rows = _read.get(path, (0, []))
        with path.open("rb") as file:
            file.seek(size)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        if whole:
            rows = [*rows, *map(json.loads, whole.splitlines())]
            _read[path] = (size + len(whole), rows)
        found[int(path.stem.split("-")[1])] = rows
    return found
