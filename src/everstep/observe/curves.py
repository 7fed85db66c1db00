"""A run's metrics as curves: where each report stands in training, and which of them were done again.

A restart goes back to a checkpoint, or to a snapshot in memory. What was reported after that is reported a
second time; a curve that doesn't tell the two apart runs back and forth.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.identity import Incarnation
from everstep.journal import records
from everstep.journal.positions import Positions
from everstep.observe.decoding import decoded_numbers

MOST_POINTS = 2_000
"""Of one curve: more can't be told apart on a screen."""
MOST_CURVES = 60
MOST_PIECES = 200
"""Of one curve: where there are more, restarts can't be told apart, and only what was done again is."""


@dataclass
class _Stretch:
    """Reports of one incarnation of a replica group, one after the other."""

    attempt: int
    first: int
    """The index of the first within the attempt."""
    base: int | None
    """Reports before this incarnation; ``None``: as many as before its attempt."""
    rows: list[dict[str, Any]] = field(default_factory=list)


class MetricCurves:
    """``take`` takes one record in."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._open: dict[Incarnation, _Stretch] = {}
        self._positions = Positions()
        self.count = 0

    def take(self, record: records.AnyRecord) -> None:
        number = self._positions.take(record)
        if isinstance(record, records.Metrics):
            self._reported(record, number)

    def _reported(self, record: records.Metrics, number: int) -> None:
        key = Incarnation(record.epoch, record.group, record.generation)
        stretch = self._open.get(key)
        if stretch is None or stretch.first + len(stretch.rows) != record.first:
            base = number - record.first if record.generation else None
            stretch = self._open[key] = _Stretch(record.epoch, record.first, base)
            self._stretches.append(stretch)
        stretch.rows += [decoded_numbers(row) for row in record.rows]
        self.count += len(record.rows)

    def _position(self, stretch: _Stretch, at: int) -> int:
        base = stretch.base if stretch.base is not None else self._positions.base(stretch.attempt)
        return base + stretch.first + at

    def _with_fate(self) -> Iterator[tuple[_Stretch, int, int]]:
        """Each stretch, the position of its first row, and after how many of its rows a restart went back."""
        stays = math.inf
        attempts = sorted({stretch.attempt for stretch in self._stretches}, reverse=True)
        upto: dict[int, float] = {}
        for attempt in attempts:
            upto[attempt] = stays
            stays = min(stays, self._positions.base(attempt))
        for stretch in self._stretches:
            first = self._position(stretch, 0)
            kept = min(len(stretch.rows), max(0, upto[stretch.attempt] - first + 1))
            yield stretch, first, int(kept)

    def as_plain(self) -> dict[str, Any]:
        curves: dict[str, list[dict[str, Any]]] = {}
        left_out: set[str] = set()
        redone = 0
        for stretch, first, kept in self._with_fate():
            redone += len(stretch.rows) - kept
            for lost, begin, end in ((False, 0, kept), (True, kept, len(stretch.rows))):
                for name, x, y in _columns(stretch.rows[begin:end], first + begin):
                    if name not in curves and len(curves) >= MOST_CURVES:
                        left_out.add(name)
                        continue
                    piece = {"attempt": stretch.attempt, "redone": lost, "x": x, "y": y}
                    curves.setdefault(name, []).append(piece)
        return {
            "rows": self.count,
            "redone": redone,
            "left_out": len(left_out),
            "curves": [{"name": name, "pieces": _thinned(pieces)} for name, pieces in curves.items()],
        }


def _columns(rows: Sequence[Mapping[str, float]], first: int) -> list[tuple[str, list[int], list[float]]]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for at, row in enumerate(rows, first):
        for name, value in row.items():
            x, y = found.setdefault(name, ([], []))
            x.append(at)
            y.append(value)
    return [(name, x, y) for name, (x, y) in found.items()]


def _thinned(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each part of the curve the lowest and the highest, so that no spike gets lost; all that is no
    number stays, up to a limit.
    """
    if len(pieces) > MOST_PIECES:
        pieces = _joined(pieces)
    total = sum(len(piece["x"]) for piece in pieces)
    if total <= MOST_POINTS:
        return pieces
    span = max(piece["x"][-1] for piece in pieces) - min(piece["x"][0] for piece in pieces) + 1
    width = max(1, math.ceil(2 * span / MOST_POINTS))
    return [{**piece, **_thin(piece["x"], piece["y"], width)} for piece in pieces]


def _joined(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One curve of what stayed, and the longest of what was done again."""
    stayed = [piece for piece in pieces if not piece["redone"]]
    redone = sorted((piece for piece in pieces if piece["redone"]), key=lambda piece: -len(piece["x"]))
    points = sorted(
        (point for piece in stayed for point in zip(piece["x"], piece["y"], strict=True)), key=_place
    )
    whole = {"attempt": 1, "redone": False, "x": [x for x, _ in points], "y": [y for _, y in points]}
    return [*([whole] if points else []), *redone[:MOST_PIECES]]


def _place(point: tuple[int, float]) -> int:
    return point[0]


def _thin(x: list[int], y: list[float], width: int) -> dict[str, list[Any]]:
    kept: list[int] = []
    begin = 0
    while begin < len(x):
        end = bisect_left(x, x[begin] + width, begin)
        part = range(begin, end)
        chosen = {
            min(part, key=lambda i: (y[i] != y[i], y[i])),
            max(part, key=lambda i: (y[i] == y[i], y[i])),
        }
        strange = next((i for i in part if not math.isfinite(y[i])), None)
        kept += sorted(chosen if strange is None else {*chosen, strange})
        begin = end
    return {"x": [x[i] for i in kept], "y": [y[i] for i in kept]}
