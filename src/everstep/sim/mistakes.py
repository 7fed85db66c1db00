"""Mistakes that were made in the driver's own code, put back, or that could be: the simulator must find each.

A mistake replaces one method for as long as it is in; production never imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep.control import commands as c, events as e
from everstep.driver import journal, records
from everstep.driver.commits import Commits
from everstep.driver.deletions import Deletions
from everstep.driver.journal import Journal
from everstep.driver.repair import Repair
from everstep.driver.validations import Validations
from everstep.errors import StorageError
from everstep.storage import checkpoints
from everstep.storage.checkpoints import MANIFEST, Manifest


@dataclass(frozen=True)
class Mistake:
    name: str
    what: str
    where: type
    attribute: str
    wrong: Callable[..., Any]


@contextmanager
def made(mistake: Mistake | None) -> Iterator[None]:
    """The driver has this mistake inside the block."""
    if mistake is None:
        yield
        return
    right = getattr(mistake.where, mistake.attribute)
    setattr(mistake.where, mistake.attribute, mistake.wrong)
    try:
        yield
    finally:
        setattr(mistake.where, mistake.attribute, right)


async def _check_nothing(self: Journal) -> None:
    """A number that a compaction has freed is taken for the end of the journal."""


async def _remove_at_once(self: Deletions, folder: str) -> None:
    await self._run.delete([f"{folder}/{MANIFEST}"])
    await self._run.clear(folder)


async def _discard_what_fails(self: Commits, command: c.CommitCheckpoint, metrics: msgspec.Raw) -> bool:
    ready = command.checkpoint
    ref = e.CheckpointRef(ready.folder, command.epoch, ready.index, order=command.order)
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
    """Only parts tell what is whole, and rank 0 alone has saved one."""
    folders = await checkpoints.list_folders(self._run)
    last_epoch = await checkpoints.last_epoch(self._run, folders)
    self._history.last_epoch = max(self._history.last_epoch, last_epoch)
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
    self.append(records.Snapshot(self._archives, last))
    await self.flush()
    self._first = last
    await self._store.delete(small)


def _retain_without_waiting(self: Commits) -> None:
    keep = self._config.num_to_keep
    for kept in self._history.in_order()[:-keep] if keep else ():
        self._emit(e.CheckpointGone(at=self._clock.now(), folder=kept.ref.folder))
        self._give_up(kept.ref.folder)


async def _finish_at_once(self: Validations) -> None:
    return None


MISTAKES = {
    mistake.name: mistake
    for mistake in (
        Mistake(
            "free-number",
            "a driver that wakes up after a compaction appends at a number that has become free",
            Journal,
            "_check_place",
            _check_nothing,
        ),
        Mistake(
            "unjournaled-deletion",
            "folders are removed before the record that gives them up is durable",
            Deletions,
            "remove",
            _remove_at_once,
        ),
        Mistake(
            "discarded-commit",
            "a commit that got no answer is taken for one that failed, and its folder is removed",
            Commits,
            "commit",
            _discard_what_fails,
        ),
        Mistake(
            "uncounted-manifest",
            "a resume looks at parts only, not at manifests that the journal doesn't know",
            Repair,
            "adopt_manifests",
            _adopt_none,
        ),
        Mistake(
            "trusted-journal",
            "checkpoints that a damaged journal doesn't know are taken for garbage",
            Repair,
            "_record",
            _adopt_nothing_unknown,
        ),
        Mistake(
            "lost-append",
            "records that are appended while others are written are forgotten",
            Journal,
            "_write_some",
            _lose_what_comes_meanwhile,
        ),
        Mistake(
            "early-archive",
            "an archive counts before the record that names it is durable, and counts twice",
            Journal,
            "compact",
            _archive_too_early,
        ),
        Mistake(
            "impatient-retention",
            "a checkpoint that waits for its validation is given up",
            Commits,
            "retain",
            _retain_without_waiting,
        ),
        Mistake(
            "forgotten-validation",
            "a run is over while checkpoints wait for their validation",
            Validations,
            "finish",
            _finish_at_once,
        ),
    )
}
