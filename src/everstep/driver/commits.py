"""Commits, and what they lead to: a record in the journal, and retention.

A commit whose outcome isn't known is asked for again until it is: the same parts come to the same manifest.
It never becomes a deletion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from everstep.config import CheckpointConfig
from everstep.control import commands as c, events as e
from everstep.driver.deletions import Deletions
from everstep.driver.scores import Scores, no_longer_kept
from everstep.driver.unsaved import Unsaved
from everstep.errors import ConflictingPartsError, DamagedCheckpointError, StorageError
from everstep.failures import Failure, Kind
from everstep.identity import Incarnation
from everstep.journal import records
from everstep.journal.history import History
from everstep.process.clock import Clock
from everstep.saved.checkpoints import CheckpointRef
from everstep.snapshots.layout import holds_state
from everstep.storage import checkpoints
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.checkpoints import Manifest

_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0


class Commits:
    def __init__(
        self,
        run: AsyncStore,
        history: History,
        deletions: Deletions,
        config: CheckpointConfig,
        write: Callable[[records.AnyRecord], None],
        emit: Callable[[e.Event], None],
        say: Callable[[str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        clock: Clock,
        unsaved: Unsaved,
    ) -> None:
        """``write`` puts a record into the journal, and into ``history``."""
        self._run = run
        self._history = history
        self._deletions = deletions
        self._config = config
        self._write = write
        self._emit = emit
        self._say = say
        self._spawn = spawn
        self._clock = clock
        self._unsaved = unsaved
        self._scores = Scores(config, say)
        self._removing: set[str] = set()

    async def commit(self, command: c.CommitCheckpoint, metrics: msgspec.Raw) -> bool:
        """Commit it, and let go of what it replaces. False if it can't be committed."""
        ready = command.checkpoint
        of = Incarnation(command.epoch, command.group, command.generation)
        try:
            manifest = await self._until_known(command, metrics)
        except StorageError as error:
            self._unsaved.failed(of, ready.index, str(error))
            now = self._clock.now()
            self._say(f"checkpoint {ready.folder} can't be committed: {error}")
            cause = (
                Failure(Kind.CONFLICT, now, str(error)) if isinstance(error, ConflictingPartsError) else None
            )
            self._emit(e.CommitFailed(at=now, folder=ready.folder, reason=str(error), cause=cause))
            return False
        self._unsaved.saved(of, ready.index)
        state = holds_state(file.path for file in manifest.files)
        place = (command.epoch, ready.index, command.group, command.generation, command.order)
        ref = CheckpointRef(ready.folder, *place, state)
        self._write(
            records.Committed.of(self._clock.now(), ref, metrics, manifest.external, manifest.validation)
        )
        kept = self._history.checkpoints[ready.folder]
        if not kept.is_pending:
            self._scores.warn_without_score(kept)
        self._emit(e.CheckpointCommitted(at=self._clock.now(), folder=ready.folder, state=state))
        self.retain()
        return True

    def validated(self, record: records.Validated) -> None:
        """What a validation came to counts, for retention too."""
        self._write(record)
        kept = self._history.checkpoints.get(record.folder)
        if kept is not None:
            self._scores.warn_without_score(kept)
        self.retain()

    async def _until_known(self, command: c.CommitCheckpoint, metrics: msgspec.Raw) -> Manifest:
        ready = command.checkpoint
        ref = CheckpointRef(
            ready.folder, command.epoch, ready.index, command.group, command.generation, command.order
        )
        pause = _PAUSE_S
        while True:
            if ready.folder in self._history.deleted:
                raise StorageError("its folder was given up before")
            try:
                parts = [part.record for _, part in ready.parts]
                return await checkpoints.commit(self._run, ref, parts, bytes(metrics))
            except (checkpoints.CommittedOtherwiseError, ConflictingPartsError, DamagedCheckpointError):
                raise
            except StorageError as error:
                self._unsaved.failed(ref.incarnation, ref.index, str(error))
                if pause == _PAUSE_S:
                    self._say(f"checkpoint {ready.folder} can't be committed yet: {error}; it is tried again")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def retain(self) -> None:
        for folder in no_longer_kept(self._history, self._config):
            self._emit(e.CheckpointGone(at=self._clock.now(), folder=folder))
            self._give_up(folder)

    def discard(self, folder: str) -> None:
        """This folder can't become a checkpoint any more."""
        self._spawn(self._patiently(lambda: self._make_void(folder)))

    async def _make_void(self, folder: str) -> None:
        # An earlier driver may be about to commit it: then it is one, and stays.
        if await checkpoints.make_void(self._run, folder):
            self._give_up(folder)

    def _give_up(self, folder: str) -> None:
        if folder not in self._history.deleted:
            self._write(records.Deleted(self._clock.now(), folder))
            self._removing.add(folder)
            self._spawn(self._patiently(lambda: self._remove(folder)))

    async def _remove(self, folder: str) -> None:
        await self._deletions.remove(folder)
        self._removing.discard(folder)

    async def _patiently(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Until storage does it. What is left when the driver ends is done when the run is resumed."""
        pause = _PAUSE_S
        while True:
            try:
                await work()
                return
            except DamagedCheckpointError as error:
                self._say(f"{error}; it is left as it is")
                return
            except StorageError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def finish_deletions(self, limit_s: float) -> None:
        """At the end of a run. What remains is removed when it is resumed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for folder in sorted(self._removing):
                    with suppress(StorageError):  # of the others, some may be removed
                        await self._remove(folder)
        if self._removing:
            self._say(
                f"folders that are no longer needed can't be removed: {', '.join(sorted(self._removing))}"
            )
