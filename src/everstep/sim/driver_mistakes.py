"""Mistakes in the driver and the journal: most were made once, and the others could be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from everstep.control import commands as c, events as e
from everstep.driver.commits import Commits
from everstep.driver.deletions import Deletions
from everstep.driver.from_workers import FromWorkers
from everstep.driver.incoming import Incoming
from everstep.driver.repair import Repair
from everstep.driver.take_over import TakeOver
from everstep.driver.timers import Timers
from everstep.driver.validations import Validations
from everstep.errors import StorageError
from everstep.health import survivors
from everstep.health.survivors import LeftWorker, Unfit
from everstep.journal import journal, records
from everstep.journal.journal import Journal
from everstep.protocol import wire
from everstep.saved import retention
from everstep.saved.checkpoints import CheckpointRef
from everstep.saved.retention import Scored
from everstep.sim.planting import Mistake, with_faults
from everstep.sim.scenario import FaultKind, Scenario
from everstep.storage import attempts, checkpoints, layout
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.checkpoints import MANIFEST, Manifest
from everstep.topology.slices import HostId

_is_superseded = Journal._is_superseded


def _free_every_number(self: Journal, name: str) -> bool:
    """Those, too, where a driver that was replaced appends when it wakes up."""
    return int(name) < self._first if layout.is_numbered(name) else _is_superseded(self, name)


async def _remove_at_once(self: Deletions, folder: str) -> None:
    await self._run.delete([f"{folder}/{MANIFEST}"])
    await self._run.clear(folder)


async def _discard_what_fails(self: Commits, command: c.CommitCheckpoint, metrics: msgspec.Raw) -> bool:
    ready = command.checkpoint
    ref = CheckpointRef(ready.folder, command.epoch, ready.index, order=command.order)
    try:
        manifest = await checkpoints.commit(self._run, ref, [part.record for _, part in ready.parts])
    except StorageError as error:
        self._emit(e.CommitFailed(at=self._clock.now(), folder=ready.folder, reason=str(error)))
        await self._run.clear(ready.folder)
        return False
    self._write(
        records.Committed(
            self._clock.now(), ready.folder, command.epoch, ready.index, metrics, manifest.external
        )
    )
    self._emit(e.CheckpointCommitted(at=self._clock.now(), folder=ready.folder))
    self.retain()
    return True


async def _adopt_none(self: Repair) -> list[str]:
    """Which checkpoints are whole is known by their parts only, and rank 0 alone has saved one."""
    folders = await checkpoints.list_folders(self._store)
    self._history.add_begun(await attempts.begun(self._store, folders, self._history.last_epoch))
    return folders


def _adopt_nothing_unknown(self: Repair, folder: str, manifest: Manifest) -> None:
    self._write(records.Deleted(self._clock.now(), folder))


async def _lose_what_comes_meanwhile(self: Journal) -> None:
    if self._lost is not None:
        raise self._lost
    if not self._unsure:
        self._unsure = b"".join(data for _, data in self._waiting)
    if not await self._store.create(journal.key_of(self._next), self._unsure):
        raise await self._fenced()
    await self._check_place()
    self._waiting.clear()
    self._unsure = b""
    self._next += 1


async def _archive_too_early(self: Journal) -> None:
    first, last = self._first, self._next
    small = [journal.key_of(number) for number in range(first, last)]
    found = [await self._whole(name) for name in small]
    name = f"archive-{last:010d}-{first}"
    await self._store.create(name, b"".join(found))
    self._archives = [*self._archives, name]
    self.append(records.Compacted(self._archives, last))
    await self.flush()
    self._first = last
    await self._store.delete(small)


def _retain_without_waiting(self: Commits) -> None:
    keep = self._config.num_to_keep
    for kept in self._history.in_order()[:-keep] if keep else ():
        self._emit(e.CheckpointGone(at=self._clock.now(), folder=kept.ref.folder))
        self._give_up(kept.ref.folder)


def _remove_the_newest(
    checkpoints: Iterable[Scored], let_go: Iterable[CheckpointRef], *, num_to_keep: int | None, order: str
) -> list[str]:
    """The best are kept, and nothing beside them."""
    worst = retention.ranked(checkpoints, let_go, order)[: -num_to_keep if num_to_keep else 0]
    return [one.ref.folder for one in worst if not one.is_pending]


async def _finish_at_once(self: Validations) -> None:
    return None


_unfit = survivors._unfit


def _keep_who_was_told_to_end(
    workers: Sequence[LeftWorker], is_over: bool, generations: Mapping[int, int]
) -> dict[Unfit, set[int]]:
    """Workers that are alive and have joined go on, also those that had been told to end."""
    return {**_unfit(workers, is_over, generations), Unfit.TOLD_TO_END: set()}


def _keep_who_was_replaced(
    workers: Sequence[LeftWorker], is_over: bool, generations: Mapping[int, int]
) -> dict[Unfit, set[int]]:
    """All workers that are there go on, also if the journal says that later ones were begun."""
    return {**_unfit(workers, is_over, generations), Unfit.REPLACED: set()}


def _with_hosts_that_wake_up(scenario: Scenario) -> bool:
    """After their workers were replaced, who report still."""
    frozen = sum(strike.family is FaultKind.FREEZE for strike in scenario.strikes)
    return frozen >= 2 and scenario.checkpoint_every < 10 and scenario.settings.max_failures != 0


def _with_lost_hosts_that_are_back(scenario: Scenario) -> bool:
    """With all the workers of a replica group that was replaced."""
    grouped = scenario.settings.group_size is not None and scenario.hosts_per_slice == 1
    return grouped and FaultKind.RETURN in scenario.families


_received = FromWorkers.received


def _heard_by_rank(self: FromWorkers, message: wire.FromWorker) -> None:
    """Messages of a worker count for the one that has its rank now."""
    for epoch, generation, rank in list(self._workers.streams):
        if rank == message.rank:
            _received(self, msgspec.structs.replace(message, epoch=epoch, generation=generation))


def _notice_nothing(self: Timers, due: float) -> None:
    """Time in which the driver did not run counts like any other."""


def _with_drivers_that_sleep(scenario: Scenario) -> bool:
    """Often, while slices are taken away after a notice."""
    struck = Counter(strike.family for strike in scenario.strikes)
    return scenario.fault_s > 60.0 and struck[FaultKind.PREEMPT] >= 2 and struck[FaultKind.CLOCK] >= 2


_wait = TakeOver.wait


async def _wait_briefly(self: TakeOver, condition: Callable[[], bool], timeout_s: float) -> None:
    """An agent that is silent for longer than a heartbeat may be is taken for lost."""
    await _wait(self, condition, min(timeout_s, 1.5))


def _with_agents_that_are_slow(scenario: Scenario) -> bool:
    """While a driver takes over."""
    return scenario.one_machine and scenario.families >= {FaultKind.DRIVER, FaultKind.FREEZE}


async def _note_nothing(store: AsyncStore, epoch: int, generations: object) -> None:
    """Only the journal says which attempts have begun, and it may be lost."""


def _check_no_lease(self: Incoming, host: HostId, lease: int) -> None:
    """Only the journal says that another driver has taken the run, and storage may be away."""


MISTAKES = (
    Mistake(
        "free-number",
        "a compaction frees the numbers at which drivers that were replaced would append",
        (Journal,),
        "_is_superseded",
        _free_every_number,
        with_faults(FaultKind.DRIVER),
    ),
    Mistake(
        "unjournaled-deletion",
        "folders are removed before the record that gives them up is durable",
        (Deletions,),
        "remove",
        _remove_at_once,
    ),
    Mistake(
        "discarded-commit",
        "a commit that got no answer is taken for one that failed, and its folder is removed",
        (Commits,),
        "commit",
        _discard_what_fails,
    ),
    Mistake(
        "uncounted-manifest",
        "a resume looks at parts only, not at manifests that the journal doesn't know",
        (Repair,),
        "adopt_manifests",
        _adopt_none,
        with_faults(FaultKind.DRIVER, FaultKind.POWER),
    ),
    Mistake(
        "trusted-journal",
        "checkpoints that a damaged journal doesn't know are taken for garbage",
        (Repair,),
        "_record",
        _adopt_nothing_unknown,
        with_faults(FaultKind.JOURNAL),
    ),
    Mistake(
        "lost-append",
        "records that are appended while others are written are forgotten",
        (Journal,),
        "_write_some",
        _lose_what_comes_meanwhile,
    ),
    Mistake(
        "early-archive",
        "an archive counts before the record that names it is durable, and counts twice",
        (Journal,),
        "compact",
        _archive_too_early,
    ),
    Mistake(
        "impatient-retention",
        "a checkpoint that waits for its validation is given up",
        (Commits,),
        "retain",
        _retain_without_waiting,
        lambda scenario: scenario.validates,
    ),
    Mistake(
        "best-only",
        "the newest checkpoint is removed where older ones have better scores",
        (retention,),
        "to_remove",
        _remove_the_newest,
        lambda scenario: scenario.scored,
    ),
    Mistake(
        "forgotten-validation",
        "a run is over while checkpoints wait for their validation",
        (Validations,),
        "finish",
        _finish_at_once,
        lambda scenario: scenario.validates,
    ),
    Mistake(
        "kept-leavers",
        "workers that had been told to end are kept by the next driver",
        (survivors,),
        "_unfit",
        _keep_who_was_told_to_end,
        with_faults(FaultKind.DRIVER),
    ),
    Mistake(
        "kept-replaced",
        "workers that had been replaced are kept by the next driver",
        (survivors,),
        "_unfit",
        _keep_who_was_replaced,
        _with_lost_hosts_that_are_back,
    ),
    Mistake(
        "impatient-take-over",
        "agents that live, and are slow to answer a new driver, are taken for lost",
        (TakeOver,),
        "wait",
        _wait_briefly,
        _with_agents_that_are_slow,
    ),
    Mistake(
        "stale-report",
        "reports of workers that were replaced are accepted",
        (FromWorkers,),
        "received",
        _heard_by_rank,
        _with_hosts_that_wake_up,
    ),
    Mistake(
        "timers-first",
        "a driver that slept does what is due before it hears what happened meanwhile",
        (Timers,),
        "_notice_gap",
        _notice_nothing,
        _with_drivers_that_sleep,
    ),
    Mistake(
        "forgotten-attempt",
        "the number of an attempt is used again once the journal has lost it",
        (attempts,),
        "note",
        _note_nothing,
        with_faults(FaultKind.JOURNAL),
    ),
    Mistake(
        "deaf-driver",
        "a driver without storage goes on when agents say that they obey a later one",
        (Incoming,),
        "_check_lease",
        _check_no_lease,
        lambda scenario: scenario.families >= {FaultKind.CUT, FaultKind.DRIVER},
    ),
)
