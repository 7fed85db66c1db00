"""What a benchmark found: samples, their spread, the ratio between the two sides, and how that is shown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Unit = Literal["s", "ms", "/s"]
_SCALE = {"s": 1.0, "ms": 1000.0, "/s": 1.0}

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Sample:
    """One figure, measured in several rounds: seconds, or counts a second."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.values)
        place = q * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Row:
    """One thing measured, for both sides, or for one where there is nothing to compare."""

    what: str
    unit: Unit
    everstep: Sample | None = None
    peer: Sample | None = None
    side: str = "Everstep"
    """Whose the first sample is, where it isn't Everstep's."""
    against: str = "Ray Train"
    """Whose the second is."""
    paired: bool = False
    """Whether round i of both sides was measured one right after the other."""

    @property
    def ratio(self) -> float | None:
        """How many times better Everstep is: less time, or more a second. By the medians; of paired rounds
        the median of their ratios, which a machine that is slower for a while doesn't move.
        """
        if self.everstep is None or self.peer is None:
            return None
        if self.ratios is not None:
            return self.ratios.median
        return self._ratio(self.everstep.median, self.peer.median)

    @property
    def ratios(self) -> Sample | None:
        """Of each pair of rounds."""
        if not self.paired or self.everstep is None or self.peer is None:
            return None
        pairs = zip(self.everstep.values, self.peer.values, strict=True)
        return Sample(tuple(self._ratio(ours, theirs) for ours, theirs in pairs))

    def _ratio(self, ours: float, theirs: float) -> float:
        return ours / theirs if self.unit == "/s" else theirs / ours

    def sides(self) -> list[tuple[str, Sample]]:
        return [(n, s) for n, s in ((self.side, self.everstep), (self.against, self.peer)) if s is not None]


@dataclass(frozen=True)
class Outcome:
    """What one benchmark found."""

    name: str
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Where, when and with what it was measured."""

    cores: int
    processor: str
    system: str
    versions: dict[str, str]
    load_average: tuple[float, float, float]
    at: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))

    def lines(self) -> list[str]:
        load = " ".join(f"{value:.2f}" for value in self.load_average)
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            f"{self.at}; {self.cores} cores ({self.processor}), {self.system}; load average at start {load}",
            versions,
        ]


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    versions = {"Python": platform.python_version()}
    for package in ("everstep", "torch", "ray"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    if versions["everstep"] == "not installed":
        import everstep

        versions["everstep"] = everstep.__version__
    return Machine(cores, _processor(), platform.system(), versions, os.getloadavg())


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def number(value: float, unit: Unit) -> str:
    value *= _SCALE[unit]
    if unit == "/s" and value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value < 10 else f"{value:,.1f}"


def cells(sample: Sample, unit: Unit) -> list[str]:
    """Median, p10..p90, min..max, rounds."""
    return [
        f"{number(sample.median, unit)} {unit}",
        f"{number(sample.quantile(0.1), unit)} .. {number(sample.quantile(0.9), unit)}",
        f"{number(min(sample.values), unit)} .. {number(max(sample.values), unit)}",
        str(len(sample.values)),
    ]


_COLUMNS = ("median", "p10 .. p90", "min .. max", "rounds", "ratio")


def show(outcome: Outcome, console: Console) -> None:
    table = Table(title=f"{outcome.name}: {outcome.title}", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("side")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in outcome.rows:
        for at, (side, sample) in enumerate(row.sides()):
            table.add_row(row.what if at == 0 else "", side, *cells(sample, row.unit), _ratio(row, at))
        table.add_section()
    console.print(table)
    for note in outcome.notes:
        console.print(f"  {note}", highlight=False, soft_wrap=True)
    console.print()


def _ratio(row: Row, at: int) -> str:
    if row.ratio is None or at > 0:
        return ""
    shown = f"{row.ratio:,.0f}×" if row.ratio >= 100 else f"{row.ratio:#.3g}×"
    if row.ratios is None:
        return shown
    return f"{shown} ({row.ratios.quantile(0.1):#.3g} .. {row.ratios.quantile(0.9):#.3g})"


def as_json(machine: Machine, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    def sample(found: Sample | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            "rounds": len(found.values),
            "median": found.median,
            "p10": found.quantile(0.1),
            "p90": found.quantile(0.9),
            "min": min(found.values),
            "max": max(found.values),
            "values": list(found.values),
        }

    return {
        "machine": {**vars(machine), "load_average": list(machine.load_average)},
        "benchmarks": [
            {
                "name": outcome.name,
                "title": outcome.title,
                "rows": [
                    {
                        "what": row.what,
                        "side": row.side,
                        "against": row.against,
                        "unit": "/s" if row.unit == "/s" else "s",
                        "everstep": sample(row.everstep),
                        "peer": sample(row.peer),
                        "ratio": row.ratio,
                        "ratios": sample(row.ratios),
                    }
                    for row in outcome.rows
                ],
                "notes": list(outcome.notes),
            }
            for outcome in outcomes
        ],
    }


def as_markdown(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    lines = ["", *(f"{line}  " for line in machine.lines()), ""]
    lines += ["| what | side | " + " | ".join(_COLUMNS) + " |", "| --- | --- |" + " ---: |" * len(_COLUMNS)]
    for outcome in outcomes:
        for row in outcome.rows:
            for at, (side, sample) in enumerate(row.sides()):
                what = f"{outcome.name}: {row.what}" if at == 0 else ""
                lines.append(
                    "| " + " | ".join([what, side, *cells(sample, row.unit), _ratio(row, at)]) + " |"
                )
    notes = [f"- {outcome.name}: {note}" for outcome in outcomes for note in outcome.notes]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def write_into(page: Path, figures: str) -> None:
    """Put the figures between the two marks of a page, in place of the ones that were there."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"bench: {page} has no lines {BEGIN!r} and {END!r} to put the figures between")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}")
