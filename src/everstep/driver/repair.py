"""After a time in which nobody drove and no worker was left, storage is put in order.

A manifest is a commit, whatever became of the driver that wrote it. A checkpoint that is whole by its parts
is committed. The newest must be restorable. What nobody can finish any more is deleted; but not if the
journal has been damaged: what isn't known isn't garbage.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from everstep.driver.deletions import Deletions
from everstep.errors import ConflictingPartsError, DamagedCheckpointError, StorageAccessError, StorageError
from everstep.journal import records
from everstep.journal.history import History
from everstep.process.clock import Clock
from everstep.protocol.metrics import NO_METRICS
from everstep.saved.checkpoints import CheckpointRef
from everstep.snapshots.layout import holds_state
from everstep.storage import attempts, checkpoints, restore
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.checkpoints import Manifest


class Repair:
    def __init__(
        self,
        store: AsyncStore,
        history: History,
        deletions: Deletions,
        write: Callable[[records.AnyRecord], None],
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """``write`` puts a record into the journal, and into ``history``."""
        self._store = store
        self._history = history
        self._deletions = deletions
        self._write = write
        self._say = say
        self._clock = clock
        self._adopted: list[Manifest] = []
        self._left_alone: set[str] = set()
        """Folders that can't be read."""
        self._unread: StorageError | None = None
        """Why the disk did not give what it holds, if it didn't."""

    async def put_in_order(self, *, journal_is_whole: bool) -> None:
        """For the owner of the run, before workers start."""
        folders = await self.adopt_manifests()
        unfinished = await self._finish(folders)
        self._add_rows()
        await self._find_restorable()
        garbage = {*unfinished} if journal_is_whole else set()
        for folder in folders:
            if folder in garbage or folder in self._history.deleted:
                await self._clear_away(folder)

    async def _clear_away(self, folder: str) -> None:
        """One that can't be removed holds nobody up."""
        try:
            if folder not in self._history.deleted:
                if not await checkpoints.make_void(self._store, folder):
                    return
                self._write(records.Deleted(self._clock.now(), folder))
            await self._deletions.remove(folder)
        except StorageError as error:
            self._say(f"{folder} is no longer needed, and can't be removed: {error}")

    # ------------------------------------------------------------------ what was committed

    async def adopt_manifests(self) -> list[str]:
        """Take in every checkpoint that exists and that the journal doesn't know. Returns all folders of
        checkpoints, whole or not. For every driver that takes a run, also with its workers.
        """
        folders = await checkpoints.list_folders(self._store)
        history = self._history
        history.add_begun(await attempts.begun(self._store, folders, history.last_epoch))
        for folder in history.checkpoints.keys() - {*folders}:
            await self._forget_if_gone(folder)
        found: list[tuple[str, Manifest]] = []
        for folder in self._unknown(folders):
            try:
                manifest = await checkpoints.read_manifest(self._store, folder)
            except StorageError as error:
                self._leave_alone(folder, error)
                continue
            if manifest is not None:
                found.append((folder, manifest))
        for folder, manifest in sorted(found, key=lambda entry: _place(entry[1])):
            self._record(folder, manifest)
        return folders

    async def _forget_if_gone(self, folder: str) -> None:
        """Somebody removed it, or put an old journal back. It must not take the place of one that is there
        when retention counts.
        """
        if not await self._store.exists(f"{folder}/{checkpoints.MANIFEST}"):
            self._say(f"checkpoint {folder} is gone, and nothing says why: it is left out")
            self._history.forget(folder)

    def _unknown(self, folders: list[str]) -> list[str]:
        history = self._history
        known = {*history.checkpoints, *history.damaged, *history.deleted, *self._left_alone}
        return [folder for folder in folders if folder not in known]

    async def _finish(self, folders: list[str]) -> list[str]:
        """Commit what is whole by its parts. Nobody can tell any more what the ranks reported; the parts that
        they saved still can. Returns the folders that aren't whole.
        """
        unfinished: list[str] = []
        whole: list[tuple[str, list[checkpoints.PartRecord]]] = []
        for folder in self._unknown(folders):
            try:
                parts = await checkpoints.whole_by_parts(self._store, folder)
            except checkpoints.NewerFormatError:
                continue  # who understands it can finish it
            except StorageError as error:
                self._leave_alone(folder, error)
                continue
            if parts and self._is_newer(parts[0]):  # of older ones, nobody has said that they count
                whole.append((folder, parts))
            else:
                unfinished.append(folder)
        for folder, parts in sorted(whole, key=lambda entry: (entry[1][0].epoch, entry[1][0].index)):
            try:
                self._record(folder, await self._commit(folder, parts))
            except (checkpoints.CommittedOtherwiseError, ConflictingPartsError):
                # Somebody has made it void, and could not record that; or it can't be one.
                unfinished.append(folder)
            except DamagedCheckpointError as error:
                self._leave_alone(folder, error)
        return unfinished

    async def _commit(self, folder: str, parts: list[checkpoints.PartRecord]) -> Manifest:
        """As the last of those that are known."""
        order = 1 + max((kept.ref.order for kept in self._history.checkpoints.values()), default=0)
        first = parts[0]
        ref = CheckpointRef(folder, first.epoch, first.index, first.group, first.generation, order)
        return await checkpoints.commit(self._store, ref, [msgspec.json.encode(part) for part in parts])

    def _leave_alone(self, folder: str, error: StorageError) -> None:
        """Neither used nor removed. Raises what says nothing about this folder."""
        self._judge(error)
        self._say(f"{error}; it is left as it is")
        self._left_alone.add(folder)

    def _judge(self, error: StorageError) -> None:
        """Whether it is this one file that can't be read: it is damaged, or a disk can't read it. Else the
        error is raised: a store that is away says nothing about a checkpoint, and one of a newer Everstep
        must not be passed over.
        """
        if isinstance(error, DamagedCheckpointError):
            return
        lasting = isinstance(error, StorageAccessError | checkpoints.NewerFormatError)
        if lasting or not self._store.is_local:
            raise error
        self._unread = error

    def _is_newer(self, part: checkpoints.PartRecord) -> bool:
        newest = self._history.newest
        return newest is None or (part.epoch, part.index) > _age(newest.ref)

    def _record(self, folder: str, manifest: Manifest) -> None:
        self._say(f"checkpoint {folder} is whole, and is one of the run's from now on")
        self._adopted.append(manifest)
        state = holds_state(file.path for file in manifest.files)
        ref = CheckpointRef(
            folder, manifest.epoch, manifest.index, manifest.group, manifest.generation, manifest.order, state
        )
        metrics = msgspec.Raw(manifest.metrics) if manifest.metrics else NO_METRICS
        self._write(
            records.Committed.of(self._clock.now(), ref, metrics, manifest.external, manifest.validation)
        )

    def _add_rows(self) -> None:
        """What was reported with a checkpoint is one of the run's metrics, too. While workers live, they tell
        it again themselves.
        """
        adopted = [manifest for manifest in self._adopted if manifest.metrics and manifest.group == 0]
        known = {epoch: self._history.reports(epoch) for epoch in {manifest.epoch for manifest in adopted}}
        for manifest in adopted:
            of = (manifest.group, manifest.generation)
            if manifest.index not in known[manifest.epoch].get(of, {}):
                row = msgspec.Raw(manifest.metrics)
                self._write(records.Metrics(manifest.epoch, manifest.index, [row], *of))

    # ------------------------------------------------------------------ what can be restored

    async def _find_restorable(self) -> None:
        """The newest checkpoint must be whole, or the one before it, … One that could not be read an earlier
        time, and can now, counts again.
        """
        history = self._history
        for kept in sorted(history.damaged.values(), key=lambda kept: -kept.ref.order):
            newest = history.newest
            if newest is not None and _age(kept.ref) < _age(newest.ref):
                continue
            if await self._damage_of(kept.ref.folder) is None:
                self._say(f"checkpoint {kept.ref.folder} can be read again")
                self._write(kept.as_record(self._clock.now()))
        while (newest := history.newest) is not None and newest.external is None:
            folder = newest.ref.folder
            damage = await self._damage_of(folder)
            if damage is None:
                return
            self._say(f"{damage}; the one before it is used")
            self._write(records.Damaged(self._clock.now(), folder, str(damage)))
        if history.newest is None and self._unread is not None:
            raise self._unread  # better no start than one from the beginning, while the disk has a bad day

    async def _damage_of(self, folder: str) -> StorageError | None:
        """Why a checkpoint can't be restored; None if it can."""
        try:
            manifest = await checkpoints.read_manifest(self._store, folder)
            size = sum(file.size for file in manifest.files) if manifest is not None else 0
            await self._store.call(lambda store: restore.verify(store.child(folder)), size)
        except StorageError as error:
            self._judge(error)
            return error
        return None


def _age(ref: CheckpointRef) -> tuple[int, int]:
    return (ref.epoch, ref.index)


def _place(manifest: Manifest) -> tuple[int, int, int]:
    return (manifest.epoch, manifest.order, manifest.index)
