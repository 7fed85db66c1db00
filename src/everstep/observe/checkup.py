"""What would keep a run from working on this machine, or with a storage path: for ``everstep doctor``.

Nothing is started and no framework is imported. Each finding says what was seen and, where that is a problem,
what to do.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.engine.local.cluster import runtime_folder
from everstep.errors import EverstepError
from everstep.observe.registry import live_runs
from everstep.process import kernel
from everstep.process.sizes import in_units
from everstep.protocol.stacks import py_spy
from everstep.storage.store import open_store, probe

_FRAMEWORKS = ("torch", "jax", "torchft", "ray", "transformers", "lightning")
_FILES = 4096
_GIB = 2**30


class Health(enum.StrEnum):
    OK = "ok"
    NOTE = "note"
    """A run works; something about it is less than it could be."""
    BAD = "bad"


@dataclass(frozen=True)
class Checked:
    what: str
    verdict: Health
    seen: str
    remedy: str = ""


def examine(storage: str | None) -> Iterator[Checked]:
    yield _system()
    yield _frameworks()
    yield _files()
    yield _memory()
    yield _shared_memory()
    yield _runtime_folder()
    yield _stacks()
    yield from _runs()
    if storage is not None:
        yield _storage(storage)


def _system() -> Checked:
    seen = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if kernel.HAS_DEATH_SIGNALS:
        return Checked("system", Health.OK, f"{seen}; {os.cpu_count()} processors")
    remedy = "for development only: workers are fresh processes here, and hangs are hardly noticed. Use Linux"
    return Checked("system", Health.NOTE, seen, remedy)


def _frameworks() -> Checked:
    found = {name: version for name in _FRAMEWORKS if (version := _version(name)) is not None}
    if not found:
        return Checked("frameworks", Health.NOTE, "none", "pip install 'everstep[torch]', or [jax]")
    return Checked("frameworks", Health.OK, ", ".join(f"{name} {version}" for name, version in found.items()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _files() -> Checked:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{soft:,} at most" if soft != resource.RLIM_INFINITY else "no limit"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        upto = f" (up to {hard:,} without root)" if hard > soft else ""
        return Checked(
            "open files", Health.NOTE, seen, f"raise it for many workers: ulimit -n {_FILES}{upto}"
        )
    return Checked("open files", Health.OK, seen)


def _memory() -> Checked:
    available, total = kernel.memory()
    seen = f"{in_units(available)} of {in_units(total)} are free"
    if available < total / 10:
        return Checked("memory", Health.NOTE, seen, "end what else uses it, or the kernel may end workers")
    return Checked("memory", Health.OK, seen)


def _shared_memory() -> Checked:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Checked("shared memory", Health.NOTE, "there is no /dev/shm", "data loaders of torch need one")
    room = shutil.disk_usage(folder)
    seen = f"{in_units(room.free)} of {in_units(room.total)} of /dev/shm are free"
    if room.free < _GIB:
        remedy = "NCCL and data loaders use it: docker run --shm-size=8g, or a larger emptyDir in memory"
        return Checked("shared memory", Health.NOTE, seen, remedy)
    return Checked("shared memory", Health.OK, seen)


def _runtime_folder() -> Checked:
    try:
        folder = runtime_folder()
        free = shutil.disk_usage(folder).free
    except (EverstepError, OSError) as error:
        return Checked("runtime folder", Health.BAD, str(error), "set XDG_RUNTIME_DIR to a folder of yours")
    seen = f"{folder}, {in_units(free)} free"
    if free < 16 << 20:
        return Checked("runtime folder", Health.BAD, seen, "make room there, or set XDG_RUNTIME_DIR")
    return Checked("runtime folder", Health.OK, seen)


def _stacks() -> Checked:
    found = py_spy()
    if found is None:
        remedy = "pip install py-spy, to get the stacks of workers that are stopped when one hangs"
        return Checked("py-spy", Health.NOTE, "not installed", remedy)
    return Checked("py-spy", Health.OK, found)


def _runs() -> Iterator[Checked]:
    """Those whose driver is gone: their workers train on, and wait for the next one."""
    for run in live_runs().values():
        if not run.alive:
            remedy = "run its script again to take them over; else they end after Deadlines(orphan_s=…)"
            yield Checked("runs", Health.NOTE, f"{run.name} has workers here, and no driver", remedy)


def _storage(address: str) -> Checked:
    try:
        store = open_store(address)
        probe(store)
    except EverstepError as error:
        return Checked("storage", Health.BAD, error.message, error.remedy)
    return Checked("storage", Health.OK, f"{store.address()} can be written, and refuses to create twice")
