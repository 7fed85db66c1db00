"""The one place where something of a run's checkpoints is removed. It asks the journal first.

A folder is removed after the record that gives it up is durable, which a driver that has been replaced can't
write. So a later owner knows of every folder that may be gone, or may yet go. What can't be removed now is
removed by a later owner.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.journal.history import History
from everstep.journal.journal import Journal
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.checkpoints import MANIFEST, read_manifest
from everstep.storage.layout import JOURNAL
from everstep.storage.sources import places_overlap
from everstep.storage.store import open_store


class Deletions:
    def __init__(
        self,
        run: AsyncStore,
        journal: Journal,
        history: History,
        *,
        delete_external: bool = False,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self._run = run
        self._journal = journal
        self._history = history
        self._delete_external = delete_external
        self._storage_options = storage_options

    async def remove(self, folder: str) -> None:
        """Remove a folder that the journal gives up. Its manifest goes first, so that half of a checkpoint
        never looks whole. Raises ``FencedError`` if another driver owns the run.
        """
        assert folder in self._history.deleted, f"{folder} is removed, and the journal doesn't say so"
        await self._journal.flush()
        if self._delete_external:
            await self._remove_external(folder)
        await self._run.delete([f"{folder}/{MANIFEST}"])
        await self._run.clear(folder)

    async def _remove_external(self, folder: str) -> None:
        """Remove the files that the user's own code put elsewhere for this checkpoint: those that were listed
        when it was reported, and nothing beside them. Not if another checkpoint is in the same place, or in
        one of the two: it is made of them. Nor if the run itself is.
        """
        manifest = await read_manifest(self._run, folder)
        if manifest is not None and manifest.external and not self._is_in_use(manifest.external):
            place, options = manifest.external, self._storage_options
            files = [file.path for file in manifest.files]
            if not files:
                return  # a place that only the user's code knows how to read
            await self._run.call(lambda _: open_store(place, options).delete(files))

    def _is_in_use(self, place: str) -> bool:
        left = [*self._history.checkpoints.values(), *self._history.damaged.values()]
        used = [self._run.address(JOURNAL), *(kept.address(self._run) for kept in left)]
        return any(places_overlap(place, other) for other in used)
