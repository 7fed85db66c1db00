"""What of this machine, and of a storage path, a run would stumble over: for ``everstep doctor``.

Nothing is started and no framework is imported. Each finding says what was seen and, where that is not well,
what to do.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep import kernel
from everstep.driver.registry import live_runs
from everstep.engine.local.cluster import runtime_folder
from everstep.errors import EverstepError
from everstep.storage.store import open_store, probe

_FRAMEWORKS = ("torch", "jax", "torchft", "ray", "transformers", "lightning")
_FILES = 4096
_GIB = 2**30


class Verdict(enum.StrEnum):
    OK = "ok"
    NOTE = "note"
    """A run works; something about it is less than it could be."""
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def examine(storage: str | None) -> Iterator[Finding]:
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


def _system() -> Finding:
    seen = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if kernel.HAS_DEATH_SIGNALS:
        return Finding("system", Verdict.OK, f"{seen}; {os.cpu_count()} processors")
    remedy = "for development only: workers are fresh processes here, and hangs are hardly noticed. Use Linux"
    return Finding("system", Verdict.NOTE, seen, remedy)


def _frameworks() -> Finding:
    found = {name: version for name in _FRAMEWORKS if (version := _version(name)) is not None}
    if not found:
        return Finding("frameworks", Verdict.NOTE, "none", "pip install 'everstep[torch]', or [jax]")
    return Finding(
        "frameworks", Verdict.OK, ", ".join(f"{name} {version}" for name, version in found.items())
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{soft:,} at most" if soft != resource.RLIM_INFINITY else "no limit"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        upto = f" (up to {hard:,} without root)" if hard > soft else ""
        return Finding(
            "open files", Verdict.NOTE, seen, f"raise it for many workers: ulimit -n {_FILES}{upto}"
        )
    return Finding("open files", Verdict.OK, seen)


def _memory() -> Finding:
    available, total = kernel.memory()
    seen = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB are free"
    if available < total / 10:
        return Finding("memory", Verdict.NOTE, seen, "end what else uses it, or the kernel may end workers")
    return Finding("memory", Verdict.OK, seen)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding(
            "shared memory", Verdict.NOTE, "there is no /dev/shm", "data loaders of torch need one"
        )
    room = shutil.disk_usage(folder)
    seen = f"{room.free / _GIB:.1f} of {room.total / _GIB:.1f} GiB of /dev/shm are free"
    if room.free < _GIB:
        remedy = "NCCL and data loaders use it: docker run --shm-size=8g, or a larger emptyDir in memory"
        return Finding("shared memory", Verdict.NOTE, seen, remedy)
    return Finding("shared memory", Verdict.OK, seen)


def _runtime_folder() -> Finding:
    try:
        folder = runtime_folder()
        free = shutil.disk_usage(folder).free
    except (EverstepError, OSError) as error:
        return Finding("runtime folder", Verdict.BAD, str(error), "set XDG_RUNTIME_DIR to a folder of yours")
    seen = f"{folder}, {free / _GIB:.1f} GiB free"
    if free < 16 << 20:
        return Finding("runtime folder", Verdict.BAD, seen, "make room there, or set XDG_RUNTIME_DIR")
    return Finding("runtime folder", Verdict.OK, seen)


def _stacks() -> Finding:
    beside = os.path.dirname(sys.executable)
    found = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        remedy = "pip install py-spy, to get the stacks of workers that are stopped when one hangs"
        return Finding("py-spy", Verdict.NOTE, "not installed", remedy)
    return Finding("py-spy", Verdict.OK, found)


def _runs() -> Iterator[Finding]:
    """Those whose driver is gone: their workers train on, and wait for the next one."""
    for run in live_runs().values():
        if not run.alive:
            remedy = "run its script again to take them over; else they end after Deadlines(orphan_s=…)"
            yield Finding("runs", Verdict.NOTE, f"{run.name} has workers here, and no driver", remedy)


def _storage(address: str) -> Finding:
    try:
        store = open_store(address)
        probe(store)
    except EverstepError as error:
        return Finding("storage", Verdict.BAD, error.message, error.remedy)
    return Finding("storage", Verdict.OK, f"{store.address()} can be written, and refuses to create twice")
