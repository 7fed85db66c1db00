"""Checkpoints in a run's folder: parts of each rank, and the manifest that makes them one.

A checkpoint exists when its manifest does. Each rank copies its files into the checkpoint's folder, then
writes a part record (files, sizes, digests). From the parts alone any owner of the run can write the
manifest, once. The files are plain: a user can look into a checkpoint, and load it, without Everstep.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from everstep.control.reports import Part
from everstep.errors import StorageError
from everstep.storage import folder as disk

MANIFEST = ".manifest.json"
PARTS = ".parts"
NAMES = ".names"
FORMAT = 1


class FileRecord(msgspec.Struct, frozen=True):
    path: str
    size: int
    sha256: str


class PartRecord(msgspec.Struct, frozen=True):
    """What one rank brought."""

    rank: int
    files: list[FileRecord]
    external: str | None = None
    """Where the checkpoint is, if somebody else put it there (``NO_UPLOAD``)."""


class Manifest(msgspec.Struct, frozen=True):
    format: int
    epoch: int
    index: int
    files: list[FileRecord]
    external: str | None = None


def folder_name(epoch: int, index: int, group: int | None, generation: int) -> str:
    """A name that is never used twice: (epoch, index) is unique in a run; with replica groups, group and
    generation are part of it.
    """
    base = f"checkpoint_{epoch:04d}_{index:06d}"
    return base if group is None else f"{base}_g{group:03d}.{generation:03d}"


def claim_name(run: Path, name: str, owner: str) -> str:
    """A folder name that the user chose, made unique.

    The first incarnation to use a name gets it. A later one (a run that was rewound, a frozen worker that
    woke up) gets the name with its own suffix: every rank of an incarnation comes to the same answer without
    asking anybody.
    """
    names = run / NAMES
    disk.make_private(names)
    claim = names / name
    if disk.create(claim, owner.encode()) or claim.read_bytes() == owner.encode():
        return name
    return f"{name}.{owner}"


def upload_part(run: Path, folder: str, source: Path, rank: int, index: int) -> Part:
    """Copy this rank's files into the checkpoint, durably, and then say so with a part record."""
    target = run / folder
    disk.make_private(target)
    files: list[FileRecord] = []
    parents: set[Path] = {target}
    for relative in disk.files_below(source):
        place = target / relative
        disk.make_private(place.parent)
        size, digest, taken = disk.copy_durably(source / relative, place)
        for parent in relative.parents:
            parents.add(target / parent)
        if taken:  # where two ranks bring a file of the same name, the first one's stays
            files.append(FileRecord(relative.as_posix(), size, digest))
    for parent in sorted(parents):
        disk.sync_folder(parent)
    return _record(run, folder, PartRecord(rank, files), index)


def note_external(run: Path, folder: str, address: str, rank: int, index: int) -> Part:
    """A checkpoint that the user's own code has put somewhere already."""
    disk.make_private(run / folder)
    return _record(run, folder, PartRecord(rank, [], address), index)


def _record(run: Path, folder: str, record: PartRecord, index: int) -> Part:
    parts = run / folder / PARTS
    disk.make_private(parts)
    encoded = msgspec.json.encode(record)
    if not disk.create(parts / f"rank-{record.rank:05d}.json", encoded):
        raise StorageError(
            f"checkpoint {folder} has a part of rank {record.rank} already",
            "use each checkpoint_dir_name once, for example with the step number in it",
        )
    return Part(index, folder, encoded)


def commit(run: Path, folder: str, epoch: int, index: int, parts: list[bytes]) -> Manifest:
    """Write the manifest: from here on the checkpoint exists."""
    records = [msgspec.json.decode(part, type=PartRecord) for part in parts]
    files = sorted((f for record in records for f in record.files), key=lambda f: f.path)
    external = next((record.external for record in records if record.external), None)
    manifest = Manifest(FORMAT, epoch, index, files, external)
    disk.sync_folder(run)
    if not disk.create(run / folder / MANIFEST, msgspec.json.encode(manifest)):
        present = read_manifest(run, folder)
        if present != manifest:
            raise StorageError(f"checkpoint {folder} was committed by somebody else")
    return manifest


def read_manifest(run: Path, folder: str) -> Manifest | None:
    try:
        return msgspec.json.decode((run / folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None


def discard(run: Path, folder: str) -> None:
    """Remove a checkpoint. Its manifest goes first, so that half of one never looks whole."""
    (run / folder / MANIFEST).unlink(missing_ok=True)
    disk.remove_tree(run / folder)
