"""What training functions here have noted: ``notes/RANK-ATTEMPT``, a line for each step."""

from __future__ import annotations

from pathlib import Path

Row = tuple[str, tuple[int, ...]]
"""The loss, and the numbers of the samples."""


def trained_on(folder: Path) -> dict[tuple[int, int], Row]:
    """By rank and step. What was redone counts as it was done last."""
    rows = {}
    for file in sorted((folder / "notes").iterdir(), key=lambda file: file.name.split("-")[1]):
        rank = int(file.name.split("-")[0])
        for line in file.read_text().splitlines():
            step, loss, *numbers = line.split()
            rows[rank, int(step)] = (loss, tuple(map(int, numbers)))
    return rows


def first_step(folder: Path, attempt: int) -> int:
    """Of rank 0 in this attempt."""
    return int((folder / "notes" / f"0-{attempt}").read_text().split()[0])
