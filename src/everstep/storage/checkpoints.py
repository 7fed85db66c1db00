"""Checkpoints of a run: parts of each rank, and the manifest that makes them one.

A checkpoint exists when its manifest does. Each rank uploads its files into the checkpoint's folder, then
writes a part record (files, sizes, digests). From the parts alone any owner of the run can write the
manifest, once. The files are plain: a user can look into a checkpoint, and load it, without Everstep.

In a run's store::

    checkpoint_0001_000007/             or the name that the user gave
        model.pt, shards/0, …           what the ranks brought
        .parts/rank-00000.json          what each of them says that it brought
        .manifest.json                  written last: from here on the checkpoint exists
    .names/best                         who has the name "best"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.control.reports import Part
from everstep.errors import DamagedCheckpointError, StorageError
from everstep.storage.folder import files_below
from everstep.storage.store import PARALLEL_FILES, FileRecord, Store, open_store

MANIFEST = ".manifest.json"
PARTS = ".parts"
NAMES = ".names"
FORMAT = 2
"""Of part records and manifests. 1 had no epoch and index in its parts, and no ranks in its manifests."""

_OURS = re.compile(r"checkpoint_\d{4,}_\d{6,}(_g\d{3,}\.\d{3,})?")
_SUFFIX = re.compile(r"(?P<name>.+)\.e\d+(g\d+\.\d+)?")


class Share(msgspec.Struct, frozen=True):
    """Whose share of which checkpoint."""

    folder: str
    rank: int
    epoch: int
    index: int
    """The how-many-th report of this rank in this epoch."""
    group: int = 0
    generation: int = 0
    ranks: int = 0
    """How many ranks the checkpoint is of; 0: not known."""
    metrics: bytes = b""
    """What rank 0 reported with it, as the journal has it."""


class PartRecord(msgspec.Struct, frozen=True):
    """What one rank brought."""

    rank: int
    files: list[FileRecord]
    external: str | None = None
    """Where the checkpoint is, if somebody else put it there (``NO_UPLOAD``)."""
    format: int = 1
    epoch: int = 0
    index: int = 0
    group: int = 0
    generation: int = 0
    ranks: int = 0
    metrics: bytes = b""

    @property
    def checkpoint(self) -> tuple[int, int, int, int, int]:
        """Which one it is a part of."""
        return (self.epoch, self.index, self.group, self.generation, self.ranks)


class Manifest(msgspec.Struct, frozen=True):
    format: int
    epoch: int
    index: int
    files: list[FileRecord]
    external: str | None = None
    ranks: list[int] = []
    """Who brought a part."""


# ---------------------------------------------------------------------- names


def folder_name(epoch: int, index: int, group: int | None, generation: int) -> str:
    """A name that is never used twice: (epoch, index) is unique in a run; with replica groups, group and
    generation are part of it.
    """
    base = f"checkpoint_{epoch:04d}_{index:06d}"
    return base if group is None else f"{base}_g{group:03d}.{generation:03d}"


def claim_name(run: Store, name: str, owner: str) -> str:
    """A folder name that the user chose, made unique.

    The first incarnation to use a name gets it. A later one (a run that was rewound, a frozen worker that
    woke up) gets the name with its own suffix: every rank of an incarnation comes to the same answer without
    asking anybody.
    """
    return name if run.create(f"{NAMES}/{name}", owner.encode()) else f"{name}.{owner}"


# ---------------------------------------------------------------------- bringing a part


def upload_part(run: Store, share: Share, source: Path, check: Callable[[], None] = lambda: None) -> Part:
    """Upload this rank's files into the checkpoint, durably, and then say so with a part record.

    Doing it again with the same files, say after a crash, comes to the same part. Where two ranks bring a
    file of the same name, the first one's stays. ``check`` is called between the two; if it raises, there is
    no part.
    """
    target = run.child(share.folder)
    names = [path.as_posix() for path in files_below(source) if not _is_ours(path)]
    at_once = max(1, min(PARALLEL_FILES, len(names)))

    def upload(name: str) -> FileRecord | None:
        return target.upload(source / name, name, f"rank {share.rank}", beside=at_once - 1)

    with ThreadPoolExecutor(at_once, thread_name_prefix="everstep-upload") as pool:
        futures = [pool.submit(upload, name) for name in names]
        try:
            found = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()  # after a failure, what hasn't begun need not
    check()
    return _record(run, share, [record for record in found if record is not None])


def note_external(run: Store, share: Share, address: str, options: Mapping[str, str] | None = None) -> Part:
    """A checkpoint that the user's own code has put somewhere already. Its files are listed if possible."""
    try:
        files = list(open_store(address, options).list())
    except (StorageError, ValueError):
        files = []  # a place that only the user's code knows how to read
    return _record(run, share, files, address)


def _record(run: Store, share: Share, files: list[FileRecord], external: str | None = None) -> Part:
    record = PartRecord(
        share.rank,
        files,
        external,
        FORMAT,
        share.epoch,
        share.index,
        share.group,
        share.generation,
        share.ranks,
        share.metrics,
    )
    encoded = msgspec.json.encode(record)
    if not run.create(f"{share.folder}/{PARTS}/rank-{share.rank:05d}.json", encoded):
        raise StorageError(
            f"checkpoint {share.folder} has another part of rank {share.rank} already",
            "use each checkpoint_dir_name once, for example with the step number in it",
        )
    return Part(share.index, share.folder, encoded)


def _is_ours(path: Path) -> bool:
    """What lies in a checkpoint that was restored and is reported again, and isn't the user's."""
    return path.parts[0] == PARTS or path.as_posix() == MANIFEST


# ---------------------------------------------------------------------- committing


def commit(run: Store, folder: str, epoch: int, index: int, parts: Iterable[bytes]) -> Manifest:
    """Write the manifest: from here on the checkpoint exists. Again from the same parts, it is the same."""
    decoded = (_decode(part, PartRecord, run.address(folder), PARTS) for part in parts)
    records = sorted(decoded, key=lambda record: record.rank)
    files: dict[str, FileRecord] = {}
    for record in records:
        for file in record.files:
            known = files.get(file.path)
            # Uploaded files are one rank's, or the same. Others' code may still have been writing when an
            # earlier rank looked: the largest is the latest.
            if known is None or (record.external and file.size > known.size):
                files[file.path] = file
    manifest = Manifest(
        FORMAT,
        epoch,
        index,
        [files[path] for path in sorted(files)],
        next((record.external for record in records if record.external), None),
        [record.rank for record in records],
    )
    if not run.create(f"{folder}/{MANIFEST}", msgspec.json.encode(manifest)):
        present = read_manifest(run, folder)
        if present is None or (present.epoch, present.index, present.files, present.external) != (
            manifest.epoch,
            manifest.index,
            manifest.files,
            manifest.external,
        ):
            raise StorageError(f"checkpoint {folder} was committed by somebody else")
    return manifest


def read_manifest(run: Store, folder: str) -> Manifest | None:
    return manifest_of(run.child(folder))


def manifest_of(checkpoint: Store) -> Manifest | None:
    """The manifest in a checkpoint's own store; None if there is none (yet, or any more)."""
    data = checkpoint.read(MANIFEST)
    return None if data is None else _decode(data, Manifest, checkpoint.address(), MANIFEST)


def read_parts(run: Store, folder: str) -> dict[int, Part]:
    """The parts that are in storage, by rank: a later driver can commit what is complete."""
    parts: dict[int, Part] = {}
    for file in run.list(f"{folder}/{PARTS}"):
        data = run.read(file.path)
        if data is not None:
            record = _decode(data, PartRecord, run.address(folder), file.path.removeprefix(f"{folder}/"))
            parts[record.rank] = Part(record.index, folder, data)
    return parts


def whole_by_parts(run: Store, folder: str) -> list[PartRecord]:
    """The parts of a checkpoint that every rank has brought one of, from the lowest rank up; else nothing.

    Where only some ranks save, the others' silence can't be told from their absence by looking at storage.
    """
    records: list[PartRecord] = []
    for rank, part in sorted(read_parts(run, folder).items()):
        records.append(_decode(part.record, PartRecord, run.address(folder), f"{PARTS}/rank-{rank:05d}.json"))
    same = len({record.checkpoint for record in records}) == 1
    return records if same and len(records) == records[0].ranks else []


Format = TypeVar("Format", PartRecord, Manifest)


def _decode(data: bytes, kind: type[Format], checkpoint: str, file: str) -> Format:
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(checkpoint, file, f"can't be read: {error}") from error
    if record.format > FORMAT:
        raise StorageError(
            f"{checkpoint} was written by a newer Everstep: {file} has format {record.format}, and this one "
            f"reads up to {FORMAT}",
            "upgrade Everstep",
        )
    return record


# ---------------------------------------------------------------------- letting go


def delete_external(run: Store, folder: str, options: Mapping[str, str] | None = None) -> None:
    """Remove the files that somebody else put elsewhere for this checkpoint: those that were listed when it
    was reported, and nothing beside them.
    """
    manifest = read_manifest(run, folder)
    if manifest is not None and manifest.external:
        open_store(manifest.external, options).delete(file.path for file in manifest.files)


def discard(run: Store, folder: str) -> None:
    """Remove a checkpoint. Its manifest goes first, so that half of one never looks whole. What Everstep
    didn't put there (``external``) stays.
    """
    run.delete([f"{folder}/{MANIFEST}"])
    run.clear(folder)


def list_folders(run: Store) -> list[str]:
    """Every checkpoint's folder in the run, committed or not. Other folders there are somebody else's."""
    names = {file.path.removeprefix(f"{NAMES}/") for file in run.list(NAMES)}

    def is_checkpoint(folder: str) -> bool:
        if _OURS.fullmatch(folder) or folder in names:
            return True
        suffixed = _SUFFIX.fullmatch(folder)
        return suffixed is not None and suffixed["name"] in names

    return [folder for folder in run.folders() if is_checkpoint(folder)]


def garbage(run: Store, committed: Collection[str], protected: Collection[str] = ()) -> list[str]:
    """Folders that no owner can commit any more.

    Args:
        run: The run's store. Only its owner may ask, and only between taking the run over and starting
            workers, or with everything that workers may still bring in ``protected``.
        committed: Folders whose commit is in the journal, and whose deletion isn't.
        protected: Folders that may still be committed: those of a live epoch, and those whose parts an
            agent still holds.
    """
    keep = {*committed, *protected}
    return [folder for folder in list_folders(run) if folder not in keep]
