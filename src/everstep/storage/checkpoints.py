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
    .names/.e1                          attempt 1 has begun (see ``attempts``)
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.errors import (
    ConfigError,
    ConflictingFilesError,
    ConflictingPlacesError,
    DamagedCheckpointError,
    StorageError,
)
from everstep.saved.checkpoints import CheckpointRef
from everstep.saved.reports import Part
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.folder import compare, digest_of, files_below
from everstep.storage.store import PARALLEL_FILES, FileRecord, Store, open_store

MANIFEST = ".manifest.json"
PARTS = ".parts"
NAMES = ".names"
METADATA_FILE = ".metadata.json"
"""Where ``Checkpoint.set_metadata`` keeps its dict: inside the folder, as Ray Train does."""
FORMAT = 3
"""Of part records and manifests. 1 had no epoch and index in its parts, and no ranks in its manifests. 2 had
manifests without a seal, and without what the journal says of a checkpoint.
"""
RESERVED = ("journal", "logs", "requests")
"""Folders of a run that hold something else than checkpoints."""
LONGEST_NAME = 200
"""Bytes of a name that a user gives. File systems take 255: the rest is for the suffix of a name that was
used before, and for what an upload that outlives its worker adds.
"""

OURS = re.compile(r"checkpoint_(?P<epoch>\d{4,})_\d{6,}(_g(?P<group>\d{3,})\.(?P<generation>\d{3,}))?")
"""Names of folders that no user gave."""
_SUFFIX = re.compile(r"(?P<name>.+)\.e\d+(g\d+\.\d+)?(\.\d+)?")


class Share(msgspec.Struct, frozen=True):
    """Whose share of which checkpoint."""

    folder: str
    rank: int
    epoch: int
    index: int
    """Index of the report among those of this rank in this epoch."""
    group: int = 0
    generation: int = 0
    ranks: int = 0
    """How many ranks the checkpoint is of; 0: not known."""
    metrics: bytes = b""
    """What rank 0 reported with it, as the journal has it."""
    validation: bytes = b""
    """How it is to be validated; empty: it isn't."""


class PartRecord(msgspec.Struct, frozen=True):
    """What one rank brought."""

    rank: int
    files: list[FileRecord]
    external: str | None = None
    """Where the checkpoint is, if the user's code put it there (``NO_UPLOAD``)."""
    format: int = 1
    epoch: int = 0
    index: int = 0
    group: int = 0
    generation: int = 0
    ranks: int = 0
    metrics: bytes = b""
    taken: list[FileRecord] = []
    """What this rank would have brought, and another rank had brought a file of that name already."""
    validation: bytes = b""
    """How the checkpoint is to be validated, if this rank has asked for it."""
    seal: str = ""
    """As a manifest's. Empty: written by a version whose parts had none."""

    @property
    def checkpoint(self) -> tuple[int, int, int, int, int]:
        """Which one it is a part of."""
        return (self.epoch, self.index, self.group, self.generation, self.ranks)


class Manifest(msgspec.Struct, frozen=True):
    """All that there is to know of a checkpoint: from the manifests alone, a run's list of checkpoints can be
    made again.
    """

    format: int
    epoch: int
    index: int
    files: list[FileRecord]
    external: str | None = None
    ranks: list[int] = []
    """The ranks that brought a part."""
    group: int = 0
    generation: int = 0
    order: int = 0
    metrics: bytes = b""
    """What rank 0 reported with it, as the journal has it."""
    void: bool = False
    """This takes the place of a manifest, so that none can be written any more: the folder is given up."""
    seal: str = ""
    """A digest of everything else here: an entry that is changed or dropped is noticed."""
    validation: bytes = b""
    """How it is to be validated; empty: it isn't."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What two manifests of one checkpoint have in common, also if two drivers write them."""
        return (self.epoch, self.index, self.group, self.generation, self.files, self.external)


# ---------------------------------------------------------------------- names


def folder_name(epoch: int, index: int, group: int | None, generation: int) -> str:
    """A name that is never used twice: (epoch, index) is unique in a run; with replica groups, group and
    generation are part of it.
    """
    base = f"checkpoint_{epoch:04d}_{index:06d}"
    return base if group is None else f"{base}_g{group:03d}.{generation:03d}"


def check_name(name: str) -> None:
    """Whether a user's ``checkpoint_dir_name`` can be the name of a checkpoint's folder."""
    if not name or "/" in name or name.startswith(".") or not name.isprintable():
        raise ConfigError(
            f"checkpoint_dir_name={name!r} can't be the name of a folder",
            "give it a plain name, without slashes, control characters or a leading dot",
            "checkpoint_dir_name",
        )
    size = len(name.encode())
    if size > LONGEST_NAME:
        raise ConfigError(
            f"checkpoint_dir_name={name[:40]!r}… has {size} bytes in UTF-8: at most {LONGEST_NAME} fit",
            "give a shorter name, and report the rest as metrics",
            "checkpoint_dir_name",
        )
    # Some file systems make no difference between upper and lower case, or drop dots and spaces at the end.
    seen = unicodedata.normalize("NFKC", name).casefold().rstrip(". ")
    if not seen or seen in RESERVED or OURS.fullmatch(seen):
        raise ConfigError(
            f"checkpoint_dir_name={name!r} is a name that Everstep uses itself",
            f"give it another name than {', '.join(RESERVED)} and checkpoint_<number>_<number>",
            "checkpoint_dir_name",
        )


def claim_name(store: Store, name: str, incarnation: str, index: int, rank: int) -> str:
    """A folder name that the user chose for a report, made unique.

    The first report to use a name gets it. A later one (of a run that was rewound, of a worker that was
    frozen and woke up, or simply of the next step) gets the name with a suffix of its own: every rank comes
    to the same answer without asking another.
    """
    check_name(name)
    report = f"{incarnation}.{index}"
    if not store.create(f"{NAMES}/.{report}", name.encode()):
        chosen = (store.read(f"{NAMES}/.{report}") or b"").decode()
        raise ConfigError(
            f"checkpoint_dir_name={name!r} at rank {rank}, and {chosen!r} at another rank, in report {index}",
            "give the same name at all ranks: they save one checkpoint together",
            "checkpoint_dir_name",
        )
    return name if store.create(f"{NAMES}/{name}", report.encode()) else f"{name}.{report}"


# ---------------------------------------------------------------------- bringing a part


def upload_part(store: Store, share: Share, source: Path, check: Callable[[], None] = lambda: None) -> Part:
    """Upload the files of this rank's folder into the checkpoint: ``upload_files``."""
    names = [path.as_posix() for path in files_below(source) if not _is_ours(path)]
    return upload_files(store, share, {name: source / name for name in names}, check)


def upload_files(
    store: Store, share: Share, sources: Mapping[str, Path], check: Callable[[], None] = lambda: None
) -> Part:
    """Upload this rank's files into the checkpoint, durably, and then write the part record.

    Doing it again with the same files, say after a crash, comes to the same part. Where two ranks bring a
    file of the same name, the first one's stays, and the other's part says so. ``check`` is called between
    the two; if it raises, there is no part.
    """
    target = store.child(share.folder)
    names = list(sources)
    at_once = max(1, min(PARALLEL_FILES, len(names)))

    def upload(name: str) -> FileRecord | None:
        return target.upload(sources[name], name, f"rank {share.rank}", beside=at_once - 1)

    with ThreadPoolExecutor(at_once, thread_name_prefix="everstep-upload") as pool:
        futures = [pool.submit(upload, name) for name in names]
        try:
            found = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()  # after a failure, what hasn't begun need not
    check()
    brought = [record for record in found if record is not None]
    refused = [name for name, record in zip(names, found, strict=True) if record is None]
    taken = [FileRecord(name, *digest_of(sources[name])) for name in refused]
    return record_part(store, share, brought, taken=taken)


def note_external(store: Store, share: Share, address: str, options: Mapping[str, str] | None = None) -> Part:
    """A checkpoint that the user's own code has put somewhere already. Its files are listed if possible."""
    try:
        files = list(open_store(address, options).list())
    except (StorageError, ValueError):
        files = []  # a place that only the user's code knows how to read
    return record_part(store, share, files, address)


def record_part(
    store: Store,
    share: Share,
    files: list[FileRecord],
    external: str | None = None,
    taken: list[FileRecord] | None = None,
) -> Part:
    """Write the record of this rank's part. Its files are there already."""
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
        taken or [],
        share.validation,
    )
    encoded = msgspec.json.encode(sealed(record))
    if not store.create(f"{share.folder}/{part_of(share.rank)}", encoded):
        raise StorageError(
            f"checkpoint {share.folder} has another part of rank {share.rank} already",
            "use each checkpoint_dir_name once, for example with the step number in it",
        )
    return Part(share.index, share.folder, encoded)


def part_of(rank: int) -> str:
    """Where in a checkpoint's folder a rank says what it has brought."""
    return f"{PARTS}/rank-{rank:05d}.json"


def _is_ours(path: Path) -> bool:
    """What lies in a checkpoint that was restored and is reported again, and isn't the user's."""
    return path.parts[0] == PARTS or path.as_posix() == MANIFEST


# ---------------------------------------------------------------------- committing


class NewerFormatError(StorageError):
    """Written by an Everstep that this one doesn't understand."""


class CommittedOtherwiseError(StorageError):
    """There is a manifest already, and it isn't ours."""


async def commit(
    store: AsyncStore, ref: CheckpointRef, parts: Iterable[bytes], metrics: bytes = b""
) -> Manifest:
    """Write the manifest: from here on the checkpoint exists. Again from the same parts, it is the same.

    A ``StorageError`` leaves open whether it was written; committing again shows.
    ``CommittedOtherwiseError``, ``ConflictingPartsError`` and ``DamagedCheckpointError`` are final.
    """
    manifest = _manifest_from(store.address(ref.folder), ref, parts, metrics)
    if await store.call(lambda blocking: _create_manifest(blocking.child(ref.folder), manifest)):
        return manifest
    present = await read_manifest(store, ref.folder)
    if present is None:
        raise CommittedOtherwiseError(f"checkpoint {ref.folder} was given up by another driver")
    if present.identity != manifest.identity:
        raise CommittedOtherwiseError(f"checkpoint {ref.folder} was committed by somebody else")
    return present


def _create_manifest(checkpoint: Store, manifest: Manifest) -> bool:
    """Check that the files are there and write the manifest, in one step: the files may be in a folder that
    had this name before, and was moved away.
    """
    there = {file.path: file for file in checkpoint.list()}
    if MANIFEST not in there and manifest.external is None:
        for file in manifest.files:
            compare_listed(checkpoint, file, there)
    return checkpoint.create(MANIFEST, msgspec.json.encode(manifest))


def compare_listed(checkpoint: Store, file: FileRecord, listed: Mapping[str, FileRecord]) -> None:
    """Look whether a file is there, as it was saved. A list may lag behind: what was just uploaded is missing
    from it.
    """
    if file.path in listed:
        compare(checkpoint.address(), file, listed[file.path])
    elif not checkpoint.exists(file.path):
        raise DamagedCheckpointError(checkpoint.address(), file.path, "is missing")


def _manifest_from(checkpoint: str, ref: CheckpointRef, parts: Iterable[bytes], metrics: bytes) -> Manifest:
    decoded = (_decode(part, PartRecord, checkpoint, PARTS) for part in parts)
    records = sorted(decoded, key=lambda record: record.rank)
    _check_places(checkpoint, records)
    files: dict[str, FileRecord] = {}
    for record in records:
        for file in record.files:
            known = files.get(file.path)
            # Uploaded files are one rank's, or the same. Others' code may still have been writing when an
            # earlier rank looked: the largest is the latest.
            if known is None or (record.external and file.size > known.size):
                files[file.path] = file
    _check_conflicts(records, files)
    manifest = Manifest(
        FORMAT,
        ref.epoch,
        ref.index,
        [files[path] for path in sorted(files)],
        next((record.external for record in records if record.external), None),
        [record.rank for record in records],
        ref.group,
        ref.generation,
        ref.order,
        metrics or next((record.metrics for record in records if record.metrics), b""),
        validation=next((record.validation for record in records if record.validation), b""),
    )
    return sealed(manifest)


def _check_places(checkpoint: str, records: list[PartRecord]) -> None:
    """One address leads to a checkpoint: what a rank has saved elsewhere would not be found."""
    places = [(record.rank, (record.external or checkpoint).rstrip("/")) for record in records]
    for rank, place in places:
        if place != places[0][1]:
            raise ConflictingPlacesError(*places[0], rank, place)


def _check_conflicts(records: list[PartRecord], files: Mapping[str, FileRecord]) -> None:
    """The same file from several ranks is one file. Different ones can't all be kept."""
    for record in records:
        for file in record.taken:
            if files.get(file.path) != file:
                claims = [r for r in records if any(f.path == file.path for f in (*r.files, *r.taken))]
                raise ConflictingFilesError(file.path, tuple(r.rank for r in claims))


async def make_void(store: AsyncStore, folder: str) -> bool:
    """Make sure that a folder can't become a checkpoint any more, even if another driver is about to commit
    it. False: it is one already.
    """
    tombstone = sealed(Manifest(FORMAT, 0, 0, [], void=True))
    if await store.create(f"{folder}/{MANIFEST}", msgspec.json.encode(tombstone)):
        return True
    return await read_manifest(store, folder) is None


async def read_manifest(store: AsyncStore, folder: str) -> Manifest | None:
    """None if there is none (yet, or any more)."""
    return _manifest_in(await store.read(f"{folder}/{MANIFEST}"), store.address(folder))


def manifest_of(checkpoint: Store) -> Manifest | None:
    """The manifest in a checkpoint's own store."""
    return _manifest_in(checkpoint.read(MANIFEST), checkpoint.address())


def _manifest_in(data: bytes | None, checkpoint: str) -> Manifest | None:
    if data is None:
        return None
    manifest = _decode(data, Manifest, checkpoint, MANIFEST)
    return None if manifest.void else manifest


async def whole_by_parts(store: AsyncStore, folder: str) -> list[PartRecord]:
    """The parts of a checkpoint that every rank has brought one of, from the lowest rank up; else nothing.

    Where only some ranks save, storage doesn't show whether the others have nothing to save or aren't done.
    """
    address = store.address(folder)
    parts: dict[int, PartRecord] = {}
    for file in await store.list(f"{folder}/{PARTS}"):
        data = await store.read(file.path)
        if data is not None:
            part = _decode(data, PartRecord, address, file.path.removeprefix(f"{folder}/"))
            parts[part.rank] = part
    if parts:
        # The list may lag behind. Which parts there must be, each of them says.
        known = next(iter(parts.values()))
        first = known.group * known.ranks
        for rank in sorted({*range(first, first + known.ranks)} - parts.keys()):
            data = await store.read(f"{folder}/{part_of(rank)}")
            if data is None:
                return []
            parts[rank] = _decode(data, PartRecord, address, part_of(rank))
    records = [parts[rank] for rank in sorted(parts)]
    same = len({record.checkpoint for record in records}) == 1
    return records if same and len(records) == records[0].ranks else []


Format = TypeVar("Format", PartRecord, Manifest)


def sealed(record: Format) -> Format:
    plain = msgspec.structs.replace(record, seal="")
    return msgspec.structs.replace(plain, seal=hashlib.sha256(msgspec.json.encode(plain)).hexdigest())


def _decode(data: bytes, kind: type[Format], checkpoint: str, file: str) -> Format:
    try:
        record = msgspec.json.decode(data, type=kind)
        unchanged = _seal_holds(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(checkpoint, file, f"can't be read: {error}") from error
    if not unchanged:
        raise DamagedCheckpointError(checkpoint, file, "was changed after it was written")
    if record.format > FORMAT:
        raise NewerFormatError(
            f"{checkpoint} was written by a newer Everstep: {file} has format {record.format}, and this one "
            f"reads up to {FORMAT}",
            "upgrade Everstep",
        )
    if isinstance(record, Manifest) and record.format >= 3 and not record.seal:
        raise DamagedCheckpointError(checkpoint, file, "has lost its seal")
    return record


def _seal_holds(data: bytes) -> bool:
    """Checked before anything in it is used, its format included. Manifests of formats 1 and 2 have none, nor
    have parts of earlier versions.
    """
    plain = msgspec.json.decode(data)
    seal = plain.get("seal")
    return not seal or seal == hashlib.sha256(msgspec.json.encode({**plain, "seal": ""})).hexdigest()


# ---------------------------------------------------------------------- what is there


async def list_folders(store: AsyncStore) -> list[str]:
    """Every checkpoint's folder in the run, committed or not. Other folders there aren't Everstep's."""
    names = {file.path.removeprefix(f"{NAMES}/") for file in await store.list(NAMES)}
    # Where case makes no difference, "best" may have been taken by "Best".
    folded = {name.casefold() for name in names}

    def is_checkpoint(folder: str) -> bool:
        if folder in RESERVED:
            return False
        if OURS.fullmatch(folder) or folder in names:
            return True
        suffixed = _SUFFIX.fullmatch(folder)
        return suffixed is not None and suffixed["name"].casefold() in folded

    return [folder for folder in await store.folders() if is_checkpoint(folder)]
