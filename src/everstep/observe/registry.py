"""Which runs live on this machine, and where their processes are: for ``ps`` and ``kill``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.engine.local.cluster import HostFile, read_hosts, runtime_folder
from everstep.process import kernel


class LiveWorker(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    host: str
    slice: str
    pid_started: int = 0
    """Set when published: the pid alone may belong to somebody else by the time that it is read."""
    note: str = ""
    """What is known of it that it doesn't say itself: that it is slow."""

    @property
    def alive(self) -> bool:
        return _lives(self.pid, self.pid_started)


class LiveRun(msgspec.Struct, frozen=True):
    name: str
    folder: str
    driver_pid: int
    epoch: int
    workers: list[LiveWorker]
    driver_started: int = 0
    """Set when published, as with workers."""

    @property
    def alive(self) -> bool:
        return _lives(self.driver_pid, self.driver_started)


def _folder() -> Path:
    folder = runtime_folder() / "runs"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _path(name: str, driver_pid: int, driver_started: int) -> Path:
    """Each driver has a file of its own: so removing a dead driver's file never removes a living one's."""
    return _folder() / f"{name}.{driver_pid}-{driver_started}.json"


class Registry:
    """Where a driver says that it lives."""

    def publish(self, run: LiveRun) -> None:
        publish_run(run)

    def forget(self, name: str) -> None:
        forget_run(name)


def publish_run(run: LiveRun) -> None:
    published = msgspec.structs.replace(
        run,
        driver_started=_started(run.driver_pid),
        workers=[msgspec.structs.replace(w, pid_started=_started(w.pid)) for w in run.workers],
    )
    path = _path(run.name, run.driver_pid, published.driver_started)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(published))
    temporary.rename(path)


def forget_run(name: str) -> None:
    """This process drives it no longer."""
    pid = os.getpid()
    _path(name, pid, _started(pid)).unlink(missing_ok=True)


def live_runs() -> dict[str, LiveRun]:
    """The runs that have a process left, by name. What is left of others is cleared away.

    A run whose driver was killed stays while its workers live. Of two drivers, the later one counts.
    """
    found: dict[str, tuple[int, LiveRun]] = {}
    for written, run in _published():
        if run.name not in found or found[run.name][0] < written:
            found[run.name] = (written, run)
    return {name: run for name, (_, run) in sorted(found.items())}


def workers_left(folder: str) -> int:
    """How many workers of the run at this address live on this machine, whoever drives it."""
    runs = [run for _, run in _published() if run.folder == folder]
    return len({worker.pid for run in runs for worker in run.workers if worker.alive})


def _published() -> Iterator[tuple[int, LiveRun]]:
    """When each was written. What has no process left is cleared away."""
    for path in _folder().glob("*.json"):
        try:
            written = path.stat().st_mtime_ns
            run = msgspec.json.decode(path.read_bytes(), type=LiveRun)
        except FileNotFoundError:
            continue  # it has ended just now
        except msgspec.DecodeError:
            path.unlink(missing_ok=True)  # of another version
            continue
        if not run.alive and not any(worker.alive for worker in run.workers):
            path.unlink(missing_ok=True)
        else:
            yield written, run


def hosts_of(run: LiveRun) -> dict[str, HostFile]:
    """The virtual hosts that a run can use, by id: also those without a worker of it just now."""
    workers = {worker.pid for worker in run.workers}
    children = {pid for pid, _ in kernel.children_of(run.driver_pid)}
    found: dict[str, HostFile] = {}
    for folder in runtime_folder().iterdir():
        there = read_hosts(folder) if folder.is_dir() else {}
        hosts = {host.id: host for host in there.values() if _lives(host.pid, host.pid_started)}
        agents = {host.pid for host in hosts.values()}
        if any(workers & set(kernel.descendants(agent)) for agent in agents):
            return hosts
        if agents & children:  # the driver's own, although nothing of the run is there now
            found |= hosts
    return found


def _started(pid: int) -> int:
    return kernel.start_time(pid) or 0


def _lives(pid: int, started: int) -> bool:
    if not started:  # a system that doesn't tell
        return pid > 0 and kernel.send_signal(pid, 0)
    return kernel.start_time(pid) == started and kernel.is_alive(pid)
