"""What the user sees while a run goes on: plain lines, one for each thing that happened.

On a terminal there is a live picture below them: see ``live`` and ``picture``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import msgspec

from everstep.control import commands as c
from everstep.failures import Failure, Kind
from everstep.health.stragglers import Slowness
from everstep.identity import Incarnation
from everstep.journal import records
from everstep.journal.ledger import RunLedger
from everstep.journal.records import RECOVERED
from everstep.observe.observer import Display, NewReports
from everstep.observe.registry import LiveRun
from everstep.wording import count, named, verb


def make_display(stream: TextIO | None = None) -> Display:
    """The live picture where the stream is a terminal that can show one, else plain lines."""
    stream = stream or sys.stderr
    if is_terminal(stream):
        from everstep.observe.live import live_display

        display = live_display(stream)
        if display is not None:
            return display
    return PlainDisplay(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether it can do more than print lines."""
    try:
        asked = stream is not None and stream.isatty()
    except (AttributeError, OSError, ValueError):  # closed, or something that only looks like a file
        return False
    return asked and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class PlainDisplay:
    """Lines on a stream that is no terminal, or where a live picture isn't wanted."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._printed = Printed()

    def say(self, line: str) -> None:
        self.line(stamped(line, time.monotonic() - self._began))

    def line(self, line: str) -> None:
        try:
            try:
                self._stream.write(line + "\n")
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # a terminal that is closed, or not there at all, must not end a run

    def opened(self, ledger: RunLedger) -> None:
        pass

    def resumed(self, reports: Mapping[int, int]) -> None:
        pass

    def ended(self, how: str) -> None:
        pass

    def record(self, record: c.Record) -> None:
        line = describe(record)
        if line:
            self.say(line)

    def output(self, rank: int, text: str) -> None:
        for line in self._printed.lines(rank, text):
            self.line(line)

    def started(self, run: LiveRun) -> None:
        for line in describe_start(run):
            self.say(line)

    def progress(self, rank: int, epoch: int, index: int, newest: NewReports) -> None:
        pass

    def reported(self, of: Incarnation, rank: int, index: int, metrics: msgspec.Raw, saves: bool) -> None:
        pass

    def unsaved(self, of: Incarnation, index: int) -> None:
        pass

    def committed(self, of: Incarnation, index: int, address: str) -> None:
        pass

    def close(self) -> None:
        for line in self._printed.rest():
            self.line(line)


class Printed:
    """Workers' output in whole lines. Of one that rewrites itself (a progress bar) the last state stays."""

    def __init__(self) -> None:
        self._partial: dict[int, str] = {}

    def lines(self, rank: int, text: str) -> list[str]:
        *whole, partial = (self._partial.get(rank, "") + text).replace("\r\n", "\n").split("\n")
        # A carriage return at the very end may be half a line ending.
        kept = partial.rstrip("\r").rpartition("\r")[2]
        self._partial[rank] = kept + "\r" if partial.endswith("\r") else kept
        return [_from_rank(rank, line) for line in whole]

    def rest(self) -> list[str]:
        partial, self._partial = self._partial, {}
        return [_from_rank(rank, line) for rank, line in partial.items() if line.strip()]


def _from_rank(rank: int, line: str) -> str:
    return f"[rank {rank}] " + line.rstrip("\r").rpartition("\r")[2]


def stamped(line: str, seconds: float) -> str:
    """As every line of ours looks, ``seconds`` after the run began."""
    return f"everstep {seconds:7.2f}s  {line}"


# ---------------------------------------------------------------------- in words


def describe_start(run: LiveRun) -> list[str]:
    """One line for each slice: name, hosts, ranks, pids."""
    lines = []
    for name in dict.fromkeys(worker.slice for worker in run.workers):
        here = [worker for worker in run.workers if worker.slice == name]
        hosts = list(dict.fromkeys(worker.host for worker in here))
        ranks = named("rank", [worker.rank for worker in here])
        pids = named("pid", [worker.pid for worker in here])
        lines.append(f"{name}: {named('host', hosts)}; {ranks}; {pids}")
    return lines


def describe(record: c.Record) -> str:
    """A record as one line, or nothing where it needs none."""
    match record:
        case c.Waiting():
            return f"waiting: {record.message}"
        case c.FailureSeen():
            failure = record.failure
            # An echo adds nothing to the cause; without a cause, the decision names the echo.
            who = f"{who_failed(failure)} failed: " if who_failed(failure) else ""
            return "" if failure.echo else f"{who}{failure.kind.value}: {failure.message}"
        case c.RecoveryDecided():
            left = "no limit" if record.limit < 0 else f"{record.spent} of {record.limit}"
            pause = f", after {record.pause_s:g} s" if record.pause_s else ""
            line = f"recovering from {cause_of(record)} ({record.budget}: {left}){pause}"
            return f"{line}; {_unsaved(record.unsaved)}" if record.unsaved else line
        case c.GroupStarted():
            source = f"from {record.checkpoint}" if record.checkpoint else "from the beginning"
            source = "from memory" if record.from_memory else source
            slices = f" in {record.num_slices} slices" if record.num_slices > 1 else ""
            workers = count(record.world_size, "worker")
            return f"attempt {record.epoch}: {workers}{slices}, {source} ({record.reason})"
        case c.Recovered():
            return describe_recovery(record)
        case c.HangSeen():
            hangs = f"{named('rank', record.ranks)} {verb(record.ranks, 'hangs', 'hang')}"
            # Otherwise the failure that follows says the rest.
            return f"{hangs}: {record.message}" if record.action == "warn" else ""
        case records.StragglerSeen():
            return describe_straggler(record)
        case c.HostSetAside():
            return f"host {record.host} keeps failing: set aside, if there is other capacity"
        case c.PreemptionSeen():
            if record.deadline is None:
                return f"slice {record.slice}: the preemption was cancelled"
            return f"slice {record.slice} will be taken away in {record.deadline - record.at:.1f} s"
        case _:
            return ""


def in_short(slower: float, kind: str) -> str:
    return f"{100 * slower:.0f} % slower than its peers: {kind}"


def describe_straggler(record: records.StragglerSeen) -> str:
    """Nothing where a restart says it."""
    who, are = named("rank", record.ranks), verb(record.ranks, "is", "are")
    on = f" on {record.host}" if record.host else ""
    if record.over:
        return f"{who}{on} {are} as fast as the others again" if record.over == RECOVERED else ""
    if record.kind is Slowness.BUSY_HOST:
        return f"host {record.host} is busy: {who} {are} {100 * record.slower:.0f} % slower than the others"
    return f"{who}{on} {are} {in_short(record.slower, record.kind)}"


def describe_recovery(record: c.Recovered) -> str:
    seconds = ", ".join(f"{name} {value:.3f}" for name, value in phases_of(record) if value >= 0.0005)
    lost, seconds_all = steps_lost(record), f"{seconds_of(record):.3f} s"
    what, cost = ("recovered", f"{count(lost, 'step')} lost") if lost is not None else ("restarted", _UNKNOWN)
    began = f"{what} in {seconds_all} by «{step_of(record)}»: {cause_of(record)}"
    if record.cause is None:
        began = f"{step_of(record)} in {seconds_all}"
    return f"{began}; kept {record.kept}; {_state_from(record)}{cost}; seconds: {seconds}"


_UNKNOWN = "steps lost and time to the first step unknown, as nothing was reported"


def steps_lost(record: c.Recovered) -> int | None:
    """None: nobody knows."""
    return None if isinstance(record, records.RecoveredWithoutReport) else record.steps_lost


def seconds_of(record: c.Recovered) -> float:
    """What it took, as far as that is known."""
    return sum(seconds for _, seconds in phases_of(record))


def _state_from(record: c.Recovered) -> str:
    return f"state from {record.state_from}; " if record.state_from else ""


def _unsaved(steps: int) -> str:
    return (
        f"there is no checkpoint yet: if all workers had to restart, {count(steps, 'step')} of the groups "
        "that go on would be lost. Save one with report(checkpoint=…)"
    )


def phases_of(record: c.Recovered) -> tuple[tuple[str, float], ...]:
    """What a recovery's seconds were spent on, in order, as far as that is known."""
    stepped = not isinstance(record, records.RecoveredWithoutReport)
    return (
        ("detect", record.detect_s),
        ("stop", record.stop_s),
        ("wait", record.wait_s),
        ("place", record.place_s),
        ("start", record.start_s),
        ("rendezvous", record.rendezvous_s),
        ("restore", record.restore_s),
        *((("first step", record.first_step_s),) if stepped else ()),
    )


def step_of(record: c.Recovered) -> str:
    """The recovery step that was taken. Nothing need have failed: replica groups for which there was no place
    before start as if they were replaced.
    """
    if record.cause is None and record.rung.is_partial:
        return "start of replica groups"
    return named_step(record.rung)


def named_step(rung: c.Rung) -> str:
    """A recovery step as users read it. A restart for new code is no resize."""
    return "planned restart" if rung is c.Rung.PLANNED else rung.value


def cause_of(record: c.Recovered | c.RecoveryDecided) -> str:
    """What failed, in a few words; nothing, if nothing did."""
    cause = record.cause
    if cause is None:
        return ""
    # A preemption's message names the slice, which is what goes.
    whole = (cause.kind is Kind.PREEMPTED and cause.rank is None) or not who_failed(cause)
    return cause.message if whole else f"{who_failed(cause)}: {cause.message}"


def who_failed(failure: Failure) -> str:
    """Nobody, if nobody in particular failed: a reservation, for example."""
    if failure.rank is not None:
        return f"rank {failure.rank}"
    return f"host {failure.host}" if failure.host is not None else ""
