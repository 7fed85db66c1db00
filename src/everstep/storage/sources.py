"""Which folders may be reported as checkpoints: none that holds a run, and none of a run that is removed
afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path

from everstep.errors import ConfigError
from everstep.storage.layout import JOURNAL, is_numbered
from everstep.storage.restore import default_cache
from everstep.storage.store import Store, open_store


def check_source(source: Path, store: Store, *, delete: bool) -> None:
    """Raise ``ConfigError`` if uploading this folder, or removing it after that, would take a run with it."""
    found = _run_within(source, store)
    if found is not None:
        raise ConfigError(
            f"report(checkpoint=Checkpoint({str(source)!r})): {found} is the folder of a run",
            "save into a folder of the checkpoint's own, for example tempfile.mkdtemp()",
            "checkpoint",
        )
    if not delete:
        return
    above = next((folder for folder in source.resolve().parents if _is_run(folder)), None)
    if above is not None:
        raise _not_removed(source, f"it belongs to the run {above}")
    if overlap(source, default_cache()):
        raise _not_removed(source, "workers of this host share what is there")


def overlap(one: Path, other: Path) -> bool:
    """Whether they are one folder, or one is in the other: what removes one takes files of the other."""
    one, other = one.resolve(), other.resolve()
    return one == other or one in other.parents or other in one.parents


def places_overlap(one: str, other: str) -> bool:
    """The same of two addresses, however they are written."""
    paths = [_path_at(address) for address in (one, other)]
    if isinstance(paths[0], Path) and isinstance(paths[1], Path):
        return overlap(paths[0], paths[1])
    first, second = (f"{path}/" for path in paths)
    return first.startswith(second) or second.startswith(first)


def _path_at(address: str) -> Path | str:
    """Of a folder, its path. Else the address, as ``Store`` writes it if it knows the kind."""
    try:
        store = open_store(address)
    except ConfigError:
        return address.rstrip("/")  # only the user's code knows how to read it
    return Path(store.address()) if store.is_local else store.address().rstrip("/")


def _not_removed(source: Path, why: str) -> ConfigError:
    return ConfigError(
        f"report(checkpoint=Checkpoint({str(source)!r}), delete_local_checkpoint_after_upload=True): {why}",
        "give delete_local_checkpoint_after_upload=False (ASYNC removes by default), or report a copy",
        "delete_local_checkpoint_after_upload",
    )


def _run_within(source: Path, store: Store) -> Path | None:
    """The first folder of a run that this one is, or has in it."""
    source = source.resolve()
    if store.is_local:
        ours = Path(store.address()).resolve()
        if ours == source or source in ours.parents:
            return ours
    below = (Path(root) for root, folders, _ in os.walk(source) if JOURNAL in folders)
    return next(filter(_is_run, below), None)


def _is_run(folder: Path) -> bool:
    journal = folder / JOURNAL
    try:
        return any(is_numbered(entry.name) for entry in journal.iterdir())
    except OSError:
        return False  # there is none, or none that is ours
