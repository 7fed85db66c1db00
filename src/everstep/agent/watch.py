"""Measures the progress of a host's workers, from outside, and reports it. What it means is decided
elsewhere.

Used from the agent's main thread only. Time in which this process did not run, or in which a worker waited
for a processor or for its messages to be read, doesn't count.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from everstep.health.vitals import Finding, ProcessState, StackPlace, Stage, Vitals
from everstep.process import kernel
from everstep.protocol import framing, stacks, wire
from everstep.protocol.progress import Page, Seen

if TYPE_CHECKING:
    from everstep.agent.drivers import Holder
    from everstep.agent.worker_process import WorkerProcess
    from everstep.agent.workers import HostWorkers

_BUSY = 0.05
"""Share of one processor that a worker and its children use at least, if they do something. A process that
only waits has threads that look at the time, or beat: that is up to 2 %.
"""
_MAIN_BUSY = 0.002
"""The same for its main thread alone, which has nothing to do but training. Waiting for something with a time
limit, over and over, takes less.
"""
_TRAFFIC = 1 << 16
"""Bytes a second that they read and write at least, if they wait for a disk."""
_RECENT = 64
_LOCKED_S = 2.0
"""A Python thread runs twice a second. It may be late, but not as late as this."""
_DUMP_S = 3.0
_DUMP_POLL_S = 0.05
_STATES = {"T": ProcessState.STOPPED, "t": ProcessState.TRACED, "D": ProcessState.BLOCKED}


class Watched:
    """One worker's progress, as it was seen."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._seen = Seen(page)
        self._quiet = self._still = self._locked = self._asleep = 0.0
        self._longest_still = 0.0
        """Since the last progress."""
        self._lull: dict[Stage, float] = {}
        self._gaps: dict[Stage, deque[float]] = {}
        self._steps: deque[float] = deque(maxlen=_RECENT)
        """How long one took; of those that came between two looks, the mean."""
        self._unreported = 0.0
        """Since the look that last saw a report."""
        self._used: kernel.Used | None = None
        self._unaccounted = 0.0
        """Time since then."""
        self._scheduled = kernel.Scheduled(0.0, 0.0, 0)
        self._ran = 0.0
        """What the main thread had run by then."""

    @property
    def stage(self) -> Stage:
        return self._seen.stage

    def look(self, pid: int, elapsed: float) -> bool:
        """Take in what has happened in this time. True if nothing has, as far as the worker itself says."""
        last, self._scheduled = self._scheduled, kernel.scheduled(pid)
        counted = max(0.0, elapsed - max(0.0, self._scheduled.waited - last.waited))
        self._asleep = 0.0 if self._scheduled.times != last.times else self._asleep + counted
        now, before = Seen(self.page), self._seen
        self._seen = now
        self._locked = 0.0 if now.ticks != before.ticks else self._locked + counted
        self._quiet += counted
        self._unaccounted += counted
        self._count_steps(before, now, counted)
        if (now.marks, now.stage) == (before.marks, before.stage):
            return True
        self._gaps.setdefault(before.stage, deque(maxlen=_RECENT)).append(self._quiet)
        self._lull[before.stage] = max(self._lull.get(before.stage, 0.0), self._longest_still)
        self._quiet = self._still = self._longest_still = self._unaccounted = 0.0
        self._used = None
        return False

    def _count_steps(self, before: Seen, now: Seen, seconds: float) -> None:
        self._unreported += seconds
        if now.reports != before.reports:
            if before.reports:  # the first one, with all that is compiled in it, takes longer
                self._steps.append(self._unreported / (now.reports - before.reports))
            self._unreported = 0.0

    def wants_account(self, every_s: float) -> bool:
        """What it uses is compared over some time: the kernel counts in hundredths of a second."""
        return self._used is None or self._unaccounted >= every_s

    def account(self, used: kernel.Used) -> None:
        """What it and its children have used until now, while it makes no progress."""
        before, seconds = self._used, self._unaccounted
        ran, self._ran = self._scheduled.ran - self._ran, self._scheduled.ran
        self._used, self._unaccounted = used, 0.0
        if before is None:
            return
        if ran >= _MAIN_BUSY * seconds or used.is_more_than(before, _BUSY * seconds, _TRAFFIC * seconds):
            self._still = 0.0
        else:
            self._still += seconds
            self._longest_still = max(self._longest_still, self._still)

    def disturbed(self, pid: int) -> None:
        """We have woken it up ourselves, to take its stacks: that doesn't count as progress."""
        ran = self._scheduled.ran
        self._scheduled = kernel.scheduled(pid)
        self._ran += self._scheduled.ran - ran

    def is_quiet_for(self, seconds: float) -> bool:
        return self._quiet >= seconds and self.stage not in (Stage.START, Stage.RETURNED)

    def vitals(self, spec: wire.WorkerSpec, pid: int) -> Vitals:
        seen = self._seen
        return Vitals(
            spec.member.rank,
            spec.generation,
            seen.stage,
            self._quiet,
            min(self._still, self._quiet),
            min(self._asleep, self._quiet),
            self._locked if self._locked > _LOCKED_S else 0.0,
            self._usual(),
            self._lull.get(seen.stage, 0.0),
            seen.reports,
            seen.collectives,
            _STATES.get(kernel.state_of(pid), ProcessState.RUNNING),
            seen.allowed_s,
            seen.label,
            sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0,
            min(seen.device_s, self._quiet),
        )

    def _usual(self) -> float:
        gaps = self._gaps.get(self.stage, deque())
        if self.stage is Stage.TRAINING and len(gaps) < 2:
            # Too few to know how long a step takes. The first, with all that is compiled in it, is longer.
            gaps = deque([*gaps, *self._gaps.get(Stage.FIRST_STEP, ())])
        return max(gaps, default=0.0)


class Watch:
    """All workers of this host."""

    def __init__(self, workers: HostWorkers, holder: Holder) -> None:
        self._workers = workers
        self._holder = holder
        self._examining: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        before = time.monotonic()
        while True:
            workers = self._workers.running()
            look_s = min((w.spec.look_s for w in workers), default=1.0)
            await asyncio.sleep(look_s)
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * look_s), now
            self._measure([w for w in workers if w.line.is_read], elapsed)
            self._end_stopped_templates()

    def _end_stopped_templates(self) -> None:
        """Only a template learns how its workers ended. One that is stopped doesn't report it: it is killed,
        and then the kernel tells us.
        """
        for worker in self._workers.running():
            if not kernel.is_alive(worker.pid) and kernel.state_of(worker.template.pid) in ("T", "t"):
                worker.template.kill()

    def _measure(self, workers: list[WorkerProcess], elapsed: float) -> None:
        quiet = [w for w in workers if w.watched.look(w.pid, elapsed)]
        due = [w for w in quiet if w.watched.wants_account(w.spec.quiet_s / 2)]
        used = kernel.used_by({w.pid for w in due if w.watched.stage is not Stage.RETURNED})
        for worker in due:
            if worker.pid in used:
                worker.watched.account(used[worker.pid])
        late: dict[int, list[Vitals]] = {}
        for worker in workers:
            if worker.watched.is_quiet_for(worker.spec.quiet_s):
                vitals = worker.watched.vitals(worker.spec, worker.pid)
                late.setdefault(worker.spec.epoch, []).append(vitals)
        for epoch, found in late.items():
            self._holder.send(wire.Quiet(epoch, found))

    # ------------------------------------------------------------------ examining

    def examine(self, message: wire.Examine) -> None:
        task = asyncio.ensure_future(self._examine(message))
        self._examining.add(task)
        task.add_done_callback(self._examining.discard)

    async def _examine(self, message: wire.Examine) -> None:
        workers = [w for w in self._workers.running() if w.spec.epoch == message.epoch]
        found = await asyncio.gather(*(find(worker) for worker in workers))
        self._holder.send(wire.Examined(message.epoch, message.check, list(found)))


async def find(worker: WorkerProcess) -> Finding:
    """Where one worker is."""
    vitals = worker.watched.vitals(worker.spec, worker.pid)
    if vitals.stage is Stage.RETURNED:
        return Finding(vitals)
    worker.watched.page.forget_stacks()
    found = await take_stacks(worker.pid, worker.watched.page)
    worker.watched.disturbed(worker.pid)
    if not found.main:
        return Finding(vitals, StackPlace.UNKNOWN, threads=stacks.in_kernel(worker.pid))
    main = found.main
    return Finding(
        vitals,
        stacks.place_of(main, Seen(worker.watched.page).place),
        stacks.line_of(main),
        framing.clip(stacks.text_of(main)),
        framing.clip(found.text),
    )


async def take_stacks(pid: int, page: Page) -> stacks.Stacks:
    """The stacks of a worker: by its own signal handler, else with py-spy."""
    found, main_thread = stacks.NONE, Seen(page).main_thread
    if main_thread and kernel.state_of(pid) not in ("T", "t"):
        found = stacks.parse(await _dump(pid, page), main_thread)
    return found if found.main else await asyncio.to_thread(stacks.spy, pid)


async def _dump(pid: int, page: Page) -> str:
    """Make it write its stacks, and read them once it has."""
    since = page.end
    kernel.send_signal(pid, stacks.SIGNAL)
    text, deadline = "", time.monotonic() + _DUMP_S
    while time.monotonic() < deadline:
        await asyncio.sleep(_DUMP_POLL_S)
        before, text = text, page.stacks(since)
        if text and text == before:
            break
    return text
