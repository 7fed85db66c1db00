"""A picture of a run: what is known of it, and how that looks on a terminal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everstep.control import commands as c
from everstep.failures import Kind
from everstep.journal import records
from everstep.journal.ledger import RunLedger
from everstep.observe.decoding import decoded
from everstep.observe.display import cause_of, in_short, seconds_of, step_of, steps_lost
from everstep.observe.observer import NewReports
from everstep.observe.registry import LiveRun, LiveWorker
from everstep.wording import count

_RATE_OVER_S = 4.0
_SPELLS_KEPT = 2_000
_BESIDE = 2
"""Columns that stay free on the right. A terminal echoes Ctrl+C as ^C where the cursor is, at the end of the
last line: without room for it there, it would move the cursor to a line that we don't count."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint exists."""

    address: str


@dataclass(frozen=True)
class RunEnding:
    """The run has, and how."""

    how: str


News = c.Record | LiveRun | Saved | RunEnding | str


@dataclass(frozen=True)
class _Seat:
    """A worker, as the picture shows it."""

    worker: LiveWorker
    state: str = "alive"
    """``alive``, ``replaced`` (alive on another host than before), ``slow``, ``failed`` or ``stopped``."""
    note: str = ""


@dataclass(frozen=True)
class _Spell:
    """A phase, from when."""

    phase: str
    since: float


@dataclass(frozen=True)
class _Signs:
    """What the picture is drawn with: the terminal may know ASCII only."""

    alive: str = "●"
    replaced: str = "◆"
    slow: str = "◐"
    failed: str = "✗"
    stopped: str = "○"
    running: str = "━"
    lost: str = "╌"
    dot: str = "·"
    dash: str = "–"


_ASCII = _Signs("*", "+", "~", "x", "o", "=", ".", "-", "-")

_SEAT_STYLES = {
    "alive": "green",
    "replaced": "cyan",
    "slow": "yellow",
    "failed": "bold red",
    "stopped": "dim",
}
_HANGING = "hanging"
"""No phase of the controller's: its workers run, and make no progress."""
_PHASE_STYLES = {
    "running": "green",
    "settling": "red",
    "stopping": "red",
    "waiting": "magenta",
    "backoff": "magenta",
    "ending": "blue",
    "ended": "blue",
    _HANGING: "red",
    # How a run has ended takes the place of its phase.
    "finished": "green",
    "failed": "red",
    "stopped": "blue",
    "taken over": "magenta",
}


class _Reports:
    """Of the furthest rank: how many there were, how fast they come, and the newest metrics."""

    def __init__(self) -> None:
        self.newest: msgspec.Raw | None = None
        self._before = 0
        """In earlier attempts."""
        self._now = 0
        self._epoch = 0
        self._earlier = 0
        """Of all of them, how many were made before this driver ran."""
        self._samples: deque[tuple[float, int]] = deque()
        self.moved_at = 0.0
        """When there was last seen to be one more."""

    def resume(self, recorded: Mapping[int, int]) -> None:
        """How many were recorded by earlier drivers, by attempt. The last one may go on."""
        if recorded:
            self._epoch = max(recorded)
            self._now = recorded[self._epoch]
            self._before = sum(recorded.values()) - self._now
            self._earlier = self.total

    def add(self, epoch: int, index: int, news: NewReports) -> None:
        """Thousands of times a second: keep it small."""
        if epoch != self._epoch:
            self._before += self._now
            self._epoch, self._now = epoch, 0
        if news.earlier:  # before they are counted: they must not look fast
            self._earlier = max(self._earlier, self._before + news.earlier)
        if index > self._now:
            self._now = index
        if news.metrics is not None:
            self.newest = news.metrics

    @property
    def total(self) -> int:
        return self._before + self._now

    def rate(self, now: float) -> float:
        """A second, over the last few seconds in which this driver ran. For the thread that draws."""
        samples = self._samples
        made = max(0, self.total - self._earlier)
        if samples and made != samples[-1][1]:
            self.moved_at = now
        samples.append((now, made))
        while len(samples) > 2 and samples[0][0] < now - _RATE_OVER_S:
            samples.popleft()
        seconds = now - samples[0][0]
        return (samples[-1][1] - samples[0][1]) / seconds if seconds > 0 else 0.0


class Picture:
    """What is known of a run. The driver calls ``reports.add``, the thread that draws calls the rest."""

    def __init__(self) -> None:
        self.name = ""
        self.epoch = 0
        self.ledger = RunLedger()
        self._spells: list[_Spell] = []
        self._began: float | None = None
        self._ended: float | None = None
        self._how_ended = ""
        self._seats: list[_Seat] = []
        self._leaving: dict[str, float] = {}
        """When slices that are being preempted go."""
        self._waiting_for = ""
        self._checkpoint: tuple[str, float] | None = None
        self._recoveries: deque[c.Recovered] = deque(maxlen=3)
        self._restarts = 0
        self.reports = _Reports()

    # ------------------------------------------------------------------ taking things in

    def take(self, news: News, at: float) -> None:
        match news:
            case Saved():
                self._checkpoint = (Path(news.address).name, at)
            case RunEnding():
                self._how_ended, self._ended = news.how, at if self._ended is None else self._ended
            case LiveRun():
                before = {seat.worker.rank: seat.worker for seat in self._seats}
                self.name, self.epoch = news.name, news.epoch
                self._seats = [_seat(worker, before.get(worker.rank)) for worker in news.workers]
            case c.Record():
                self._began = news.at if self._began is None else self._began
                self._record(news)
            case str():
                pass

    def _record(self, record: c.Record) -> None:
        match record:
            case c.PhaseChanged():
                self._enter(record)
            case c.FailureSeen():
                if record.failure.kind is Kind.HANG:
                    self._hang(record.failure.at)
                self._fail(record)
            case c.HangSeen() if record.action == "warn":
                self._hang(self.reports.moved_at)
            case c.GroupStarted():
                self._restarts += record.rung is not c.Rung.FIRST_START
            case c.Recovered():
                self._recoveries.append(record)
            case records.StragglerSeen():
                self._slow(record)
            case c.Waiting():
                self._waiting_for = record.message
            case c.PreemptionSeen():
                self._leaving.pop(record.slice, None)
                if record.deadline is not None:
                    self._leaving[record.slice] = record.deadline
            case _:
                pass

    def _enter(self, record: c.PhaseChanged) -> None:
        self._spells = [*self._spells[-_SPELLS_KEPT:], _Spell(record.phase, record.at)]
        if record.phase != "waiting":
            self._waiting_for = ""
        if record.phase == "starting":  # the processes of the last start are gone, those of this one unknown
            nobody = [msgspec.structs.replace(seat.worker, pid=0) for seat in self._seats]
            self._seats = [_Seat(worker, "stopped") for worker in nobody]
        if record.phase in ("stopping", "ending"):
            self._seats = [
                seat if seat.state == "failed" else _Seat(seat.worker, "stopped") for seat in self._seats
            ]
        if record.phase == "ended":
            self._ended = record.at

    def _hang(self, since: float) -> None:
        """Since then the workers have not trained, although it looked so, unless a rank has reported."""
        last = max((i for i, spell in enumerate(self._spells) if spell.phase == "running"), default=None)
        if last is not None:
            since = max(since, self._spells[last].since, self.reports.moved_at)
            self._spells = [*self._spells[: last + 1], _Spell(_HANGING, since), *self._spells[last + 1 :]]

    def _look_for_progress(self) -> None:
        """A hang that was only warned about may end by itself."""
        if self.phase == _HANGING and self.reports.moved_at > self._spells[-1].since:
            self._spells = [*self._spells, _Spell("running", self.reports.moved_at)]

    def _fail(self, record: c.FailureSeen) -> None:
        failure = record.failure
        if failure.echo:
            return
        message = failure.message if failure.rank is not None else f"{failure.kind.value}: {failure.message}"
        for i, seat in enumerate(self._seats):
            on_host = failure.rank is None and seat.worker.host == failure.host
            if on_host or seat.worker.rank == failure.rank:
                self._seats[i] = _Seat(seat.worker, "failed", message)

    def _slow(self, record: records.StragglerSeen) -> None:
        """It still trains. One that has failed or ended stays shown as that."""
        for i, seat in enumerate(self._seats):
            if seat.worker.rank not in record.ranks or seat.state in ("failed", "stopped"):
                continue
            slow = _Seat(seat.worker, "slow", in_short(record.slower, record.kind))
            self._seats[i] = _Seat(seat.worker) if record.over else slow

    # ------------------------------------------------------------------ figures

    @property
    def phase(self) -> str:
        return self._spells[-1].phase if self._spells else "opening"

    def goodput(self, now: float) -> float:
        """Of the whole run, by its ledger."""
        return self.ledger.until(now).goodput

    # ------------------------------------------------------------------ drawing

    def render(self, console: Console, now: float) -> RenderableType:
        signs = _Signs() if console.encoding.lower().startswith("utf") else _ASCII
        now = self._ended or now
        facts = self._facts(now, signs)
        # Besides facts and workers: frame, state, timeline, two blank lines, and some of what scrolls.
        room = max(1, console.height - len(facts) - 9)
        body: list[RenderableType] = [
            self._state(now, signs),
            self._timeline(now, max(10, console.width - _BESIDE - 4), signs),
        ]
        if self._seats:
            body += [Text(), self._workers(now, room, signs), Text()]
        return Panel(
            Group(*body, *([_pairs(facts)] if facts else [])),
            title=Text.assemble(("everstep", "bold"), f" {signs.dot} {self.name}" if self.name else ""),
            title_align="left",
            box=ROUNDED,
            border_style="dim",
            width=console.width - _BESIDE,
        )

    def _state(self, now: float, signs: _Signs) -> Table:
        reports = self.reports.total
        rate = 0.0 if self._ended is not None else self.reports.rate(now)
        self._look_for_progress()
        state = self._how_ended or self.phase
        left = Text.assemble(
            (f"{signs.alive} {state}", f"bold {_PHASE_STYLES.get(state, 'yellow')}"),
            (f"  attempt {self.epoch}" if self.epoch else "", ""),
        )
        if self._waiting_for:
            left.append(f"  {self._waiting_for}", "magenta")
        middle = Text.assemble((_short(rate), "bold"), f" reports/s {signs.dot} {reports:,} in all")
        goodput = self.goodput(now)
        good = "green" if goodput >= 0.9 else "yellow" if goodput >= 0.5 else "red"
        right = Text.assemble(
            "goodput ", (f"{100 * goodput:.1f} %", f"bold {good}"), f"  {_clock(now - (self._began or now))}"
        )
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(left, middle, right)
        return grid

    def _timeline(self, now: float, width: int, signs: _Signs) -> Text:
        """The run so far, from left to right: green where it trained."""
        text = Text(no_wrap=True)
        if self._began is None or not self._spells:
            return text
        spells = self._spells
        began = self._began if len(spells) <= _SPELLS_KEPT else spells[0].since
        cell = max(now - began, 1e-9) / width
        at = 0
        for column in range(width):
            # A cell shows what kept the run from training, if anything did within it.
            end = began + (column + 1) * cell
            worst = spells[at].phase
            while at + 1 < len(spells) and spells[at + 1].since < end:
                at += 1
                if spells[at].phase != "running":
                    worst = spells[at].phase
            style = _PHASE_STYLES.get(worst, "yellow")
            text.append(signs.running if worst == "running" else signs.lost, style)
        return text

    def _workers(self, now: float, room: int, signs: _Signs) -> Table:
        slices: dict[str, dict[str, list[_Seat]]] = {}
        for seat in self._seats:
            slices.setdefault(seat.worker.slice, {}).setdefault(seat.worker.host, []).append(seat)
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        if sum(len(hosts) for hosts in slices.values()) <= room:
            for name, hosts in slices.items():
                for i, (host, seats) in enumerate(hosts.items()):
                    grid.add_row(
                        self._slice_name(name) if i == 0 else "", host, self._host(name, seats, now, signs)
                    )
            return grid
        shown = list(slices.items())[: room if len(slices) <= room else room - 1]
        for name, hosts in shown:
            everyone = [seat for seats in hosts.values() for seat in seats]
            grid.add_row(
                self._slice_name(name), count(len(hosts), "host"), self._slice(name, everyone, now, signs)
            )
        if len(shown) < len(slices):
            grid.add_row("", "", f"and {len(slices) - len(shown)} slices more")
        return grid

    def _slice_name(self, name: str) -> Text:
        return Text(name, "bold magenta" if name in self._leaving else "bold")

    def _host(self, name: str, seats: Sequence[_Seat], now: float, signs: _Signs) -> Text:
        """Each rank with its pid, and what there is to say about them."""
        text = Text()
        for seat in seats:
            text.append(f"{getattr(signs, seat.state)} ", _SEAT_STYLES[seat.state])
            text.append(f"rank {seat.worker.rank}", "bold")
            text.append(f" pid {seat.worker.pid}  " if seat.worker.pid else "  ", "dim")
        return text + self._note(name, seats, now)

    def _slice(self, name: str, seats: Sequence[_Seat], now: float, signs: _Signs) -> Text:
        """All ranks of a slice in a few words."""
        text = Text()
        for state, style in _SEAT_STYLES.items():
            ranks = [seat.worker.rank for seat in seats if seat.state == state]
            if ranks:
                text.append(f"{getattr(signs, state)} ", style)
                text.append(f"ranks {_ranges(ranks, signs.dash)}  ", "bold")
        return text + self._note(name, seats, now)

    def _note(self, name: str, seats: Iterable[_Seat], now: float) -> Text:
        text = Text()
        if name in self._leaving:
            text.append(f"goes in {max(0.0, self._leaving[name] - now):.1f} s  ", "magenta")
        for note, style in dict.fromkeys((s.note, _SEAT_STYLES[s.state]) for s in seats if s.note):
            text.append(f"{note}  ", style)
        return text

    def _facts(self, now: float, signs: _Signs) -> list[tuple[str, Text]]:
        facts = []
        if self._checkpoint is not None:
            folder, at = self._checkpoint
            facts.append(("checkpoint", Text.assemble(folder, (f"  {_ago(now - at)}", "dim"))))
        metrics = _metrics(self.reports.newest)
        if metrics:
            parts = [part for key, value in metrics for part in ((f"{key} ", "dim"), (value, "bold"), "  ")]
            facts.append(("metrics", Text.assemble(*parts)))
        if self._restarts:
            none = Text("none of them got back to training")
            if self._ended is None:
                none = Text("training, no report yet" if self.phase == "running" else "under way")
            shown = [_recovery(record) for record in reversed(self._recoveries)] or [none]
            labels = [f"restarts {self._restarts}", *[""] * (len(shown) - 1)]
            facts += list(zip(labels, shown, strict=True))
        return facts


def _seat(worker: LiveWorker, before: LiveWorker | None) -> _Seat:
    if before is None or before.host == worker.host:
        return _Seat(worker)
    return _Seat(worker, "replaced", f"in place of {before.host}")


def _pairs(facts: Sequence[tuple[str, Text]]) -> Table:
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for name, value in facts:
        grid.add_row(name, value)
    return grid


def _metrics(raw: msgspec.Raw | None) -> list[tuple[str, str]]:
    if raw is None:
        return []
    return [(str(key), _value(value)) for key, value in list(decoded(raw).items())[:8]]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 24 else text[:23] + "…"


def _recovery(record: c.Recovered) -> Text:
    lost = steps_lost(record)
    steps = f"{count(lost, 'step'):>9} lost" if lost is not None else "nothing reported"
    cost = f"{seconds_of(record):7.2f} s  {steps}  "
    return Text.assemble((cost, "bold"), (f"{step_of(record):22}  ", "cyan"), cause_of(record))


def _ranges(numbers: Iterable[int], dash: str) -> str:
    """``0–3, 6``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}{dash}{b}" for a, b in spans)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _clock(seconds: float) -> str:
    whole = math.floor(max(0.0, seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def _ago(seconds: float) -> str:
    return f"{max(0.0, seconds):.1f} s ago" if seconds < 60 else f"{_clock(seconds)} ago"
