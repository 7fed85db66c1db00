"""Virtual hosts on this machine: each is an agent in a process group of its own.

What the local engine runs on (one host), and what tests and people on a laptop use to break things: a host is
killed with SIGKILL and frozen with SIGSTOP, with everything that runs on it, as if it were a machine.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import msgspec

from everstep.agent.guard import remove_scratch
from everstep.agent.sockets import SOCKET
from everstep.errors import EverstepError, signal_name
from everstep.process import kernel
from everstep.storage.private import no_room, private_folder, shared_temporary

_START_S = 30.0
_END_S = 10.0


class HostFile(msgspec.Struct, frozen=True):
    """What is known of a virtual host: ``host.json`` in its folder."""

    id: str
    slice: str
    index: int
    hosts_in_slice: int
    slots: int | None
    """Workers that fit on it; None: as many as the run asks for."""
    pid: int
    pid_started: int


def runtime_folder() -> Path:
    """A short path of the user's alone: Unix sockets have names of at most 100 characters or so."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or shared_temporary())
    if len(str(base)) > 40 or not os.access(base, os.W_OK):
        base = Path("/tmp")
    return private_folder(base / f"everstep-{os.getuid()}", "XDG_RUNTIME_DIR")


@contextmanager
def room_in_runtime_folder() -> Iterator[None]:
    """A folder that is full is reported as such. It is in memory on many machines, and small."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise no_room(runtime_folder(), error, "XDG_RUNTIME_DIR") from error


class LocalCluster:
    """Slices of virtual hosts. ``Trainer(…, engine=cluster)`` runs on them; leaving the ``with`` block ends
    them.

    Args:
        slices: How many slices there are at first.
        hosts_per_slice: Hosts in each; they live and die as one.
        workers_per_host: Worker slots of each host. None: as many as a run asks for. Hosts have no GPUs
            and no custom resources: a run that asks for any is refused.
    """

    def __init__(
        self,
        slices: int = 1,
        hosts_per_slice: int = 1,
        workers_per_host: int | None = 1,
        *,
        folder: Path | None = None,
    ) -> None:
        self.hosts_per_slice = hosts_per_slice
        self.workers_per_host = workers_per_host
        with room_in_runtime_folder():
            self.folder = folder or Path(tempfile.mkdtemp(prefix="c", dir=runtime_folder()))
            self.folder.mkdir(mode=0o700, exist_ok=True)
        for host, facts in self.hosts.items():  # of an earlier driver, in a folder that was given
            if not _lives(facts):
                _clear_away(self.folder / host)
        _sweep(self.folder)
        self._next_slice = 0
        self._lock = threading.Lock()
        self._timers: dict[str, threading.Timer] = {}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for _ in range(slices):
                self.add_slice(wait=False)
            for host in self.hosts:
                self._wait_ready(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ what there is

    @property
    def hosts(self) -> dict[str, HostFile]:
        """The hosts, by id. Those that were killed are still listed, until their slice is removed."""
        return read_hosts(self.folder)

    @property
    def slices(self) -> dict[str, list[str]]:
        """Host ids by slice, in order."""
        found: dict[str, list[str]] = {}
        for host in sorted(self.hosts.values(), key=lambda h: h.index):
            found.setdefault(host.slice, []).append(host.id)
        return found

    # ------------------------------------------------------------------ capacity

    def add_slice(self, name: str | None = None, hosts: int | None = None, wait: bool = True) -> str:
        """A new slice. With ``hosts`` below ``hosts_per_slice``, one that isn't whole; call again with its
        name to complete it.
        """
        with self._lock:
            name = name or self.next_slice()
            there = len(self.slices.get(name, []))
            count = hosts if hosts is not None else self.hosts_per_slice - there
            with room_in_runtime_folder():
                made = [self._start_host(name, there + i) for i in range(count)]
        if wait:
            for host in made:
                self._wait_ready(host)
        return name

    def next_slice(self) -> str:
        """A name that no slice has had yet."""
        while f"slice-{self._next_slice}" in self.slices:
            self._next_slice += 1
        self._next_slice += 1
        return f"slice-{self._next_slice - 1}"

    def host_name(self, slice_name: str, index: int) -> str:
        return f"{slice_name}-host-{index}" if self.hosts_per_slice > 1 else f"{slice_name}-host"

    def _start_host(self, slice_name: str, index: int) -> str:
        host = self.host_name(slice_name, index)
        folder = self.folder / host
        # A process that was killed while it started this host may have left half of one.
        _clear_away(folder)
        folder.mkdir(mode=0o700)
        log = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        me = os.getpid()
        # The package's own folder may not be on a fresh interpreter's path (a checkout, an editable install
        # of another).
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            kernel.HOST_MARK: str(folder),
        }
        try:
            agent = subprocess.Popen(
                [
                    sys.executable, "-m", "everstep.agent",
                    host, str(folder), str(me), str(kernel.start_time(me) or 0),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=env,
            )  # fmt: skip
        finally:
            os.close(log)
        self._agents[host] = agent
        facts = HostFile(
            host,
            slice_name,
            index,
            self.hosts_per_slice,
            self.workers_per_host,
            agent.pid,
            kernel.start_time(agent.pid) or 0,
        )
        (folder / "host.json.tmp").write_bytes(msgspec.json.encode(facts))
        (folder / "host.json.tmp").rename(folder / "host.json")
        return host

    def _wait_ready(self, host: str) -> None:
        folder = self.folder / host
        deadline = time.monotonic() + _START_S
        while not (folder / "ready").exists():
            if self._agents[host].poll() is not None or time.monotonic() > deadline:
                log = (folder / "agent.log").read_text(errors="replace").strip()
                raise EverstepError(
                    f"the agent of {host} did not start{_how_it_ended(self._agents[host])}\n{log[-4000:]}"
                )
            time.sleep(0.005)

    def remove_slice(self, name: str) -> None:
        """Take a slice away without warning, and forget it."""
        for host in self.slices.get(name, []):
            self._cancel_timer(host)
            self.end_host(host)
            _clear_away(self.folder / host)

    # ------------------------------------------------------------------ breaking things

    def kill_host(self, host: str) -> None:
        """The machine is gone: SIGKILL for everything on it."""
        self.end_host(host)

    def freeze_host(self, host: str) -> None:
        """The machine stops answering, without a signal or a reset: SIGSTOP for everything on it."""
        self._signal(host, signal.SIGSTOP)

    def thaw_host(self, host: str) -> None:
        """It answers again, and doesn't know that time has passed."""
        self._signal(host, signal.SIGCONT)

    def preempt_slice(self, name: str, grace_s: float = 30.0) -> None:
        """A notice for every host of the slice; after ``grace_s`` they are gone."""
        for host in self.slices[name]:
            (self.folder / host / "grace_s").write_text(str(grace_s))
            kernel.send_signal(self.hosts[host].pid, signal.SIGTERM)
            timer = threading.Timer(grace_s, self.kill_host, (host,))
            timer.daemon = True
            self._timers[host] = timer
            timer.start()

    def cancel_preemption(self, name: str) -> None:
        """The slice stays after all."""
        for host in self.slices[name]:
            self._cancel_timer(host)
            kernel.send_signal(self.hosts[host].pid, signal.SIGUSR1)

    def _cancel_timer(self, host: str) -> None:
        timer = self._timers.pop(host, None)
        if timer is not None:
            timer.cancel()

    def _signal(self, host: str, sig: int) -> None:
        pid = self.hosts[host].pid
        # The agent first: it must not report the deaths of its workers on its way out.
        for target in [pid, *kernel.descendants(pid)]:
            kernel.send_signal(target, sig)

    def end_host(self, host: str, timeout_s: float = _END_S) -> bool:
        """Kill everything on a host. True once nothing of it is left."""
        facts = self.hosts.get(host)
        if facts is None:
            return True
        deadline = time.monotonic() + timeout_s
        if _lives(facts):
            # Its guardian kills the agent, which must not report its workers' deaths, then all the rest,
            # and goes last.
            kernel.send_signal(facts.pid, signal.SIGHUP)
            kernel.send_signal(facts.pid, signal.SIGCONT)
            while _lives(facts) and time.monotonic() < deadline:
                time.sleep(0.002)  # perhaps another process's child, which can't be waited for
        for target in [facts.pid, *kernel.descendants(facts.pid)] if _lives(facts) else []:
            kernel.send_signal(target, signal.SIGKILL)
        while left := kernel.marked(self.folder / host):
            for pid in left:
                kernel.send_signal(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        if host in self._agents:
            self._agents[host].poll()
        return not _lives(facts)

    def end_strays(self, timeout_s: float = _END_S) -> list[int]:
        """Kill what runs on hosts of a cluster with a folder of this name, wherever that was: the runtime
        folder may have been removed, or be another one in another session. Returns what can't be killed.
        """
        deadline = time.monotonic() + timeout_s
        while left := kernel.marked_below(self.folder.name):
            if time.monotonic() > deadline:
                break
            for pid in left:
                kernel.send_signal(pid, signal.SIGKILL)
            time.sleep(0.002)
        return left

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """End every host. Nothing of the cluster is left after this."""
        for host in list(self._timers):
            self._cancel_timer(host)
        for host in self.hosts:
            self.end_host(host)
            _clear_away(self.folder / host)
        shutil.rmtree(self.folder, ignore_errors=True)


def _sweep(ours: Path) -> None:
    """Remove what clusters left here whose processes were all killed, so that none could clean up."""
    for folder in runtime_folder().iterdir():
        hosts = read_hosts(folder).values() if folder.is_dir() and folder != ours else []
        if hosts and not any(_lives(facts) for facts in hosts):
            for facts in hosts:
                _clear_away(folder / facts.id)
            shutil.rmtree(folder, ignore_errors=True)


def _clear_away(folder: Path) -> None:
    """Remove what is left of a host whose guardian is gone, and so may not have done it."""
    for pid in kernel.marked(folder):
        kernel.send_signal(pid, signal.SIGKILL)
    remove_scratch(str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _how_it_ended(agent: subprocess.Popen[bytes]) -> str:
    code = agent.poll()
    if code is None:
        return f" within {_START_S:g} s"
    return f" (exit code {code})" if code <= 128 else f" (killed by {signal_name(code - 128)})"


def _lives(facts: HostFile) -> bool:
    return kernel.is_alive(facts.pid) and kernel.start_time(facts.pid) == facts.pid_started


def read_hosts(folder: Path) -> dict[str, HostFile]:
    found = {}
    try:
        entries = sorted(entry.name for entry in os.scandir(folder))
    except FileNotFoundError:
        return {}
    for name in entries:
        try:
            facts = msgspec.json.decode((folder / name / "host.json").read_bytes(), type=HostFile)
        except (FileNotFoundError, NotADirectoryError):
            continue
        found[facts.id] = facts
    return found


def socket_of(folder: Path, host: str) -> Path:
    return folder / host / SOCKET
