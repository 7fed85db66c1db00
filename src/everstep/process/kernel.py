"""What the kernel offers for not leaving processes behind: death signals, sessions, and /proc.

Where there is none of that (macOS), processes learn of their guardian's death by the end of their socket to
it, and what a worker started is reached by its process group only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4


HOST_MARK = "EVERSTEP_HOST"
"""A variable in the environment of everything that runs on a host: the host's folder."""

HAS_DEATH_SIGNALS = sys.platform.startswith("linux")
SENDABLE = ("KILL", "TERM", "STOP", "CONT")
"""Signals that a user may have sent to workers and hosts."""


def _prctl(option: int, value: int) -> bool:
    if not HAS_DEATH_SIGNALS:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Get ``sig`` when the *thread* that forked us ends. Exits at once if the parent is already another."""
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent dies."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, session) of a process, or None if it is gone."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = data[data.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[3])


def _all() -> dict[int, tuple[str, int, int]]:
    found = {}
    try:
        names = os.listdir("/proc")
    except FileNotFoundError:
        return {}
    for name in names:
        if name.isdigit():
            stat = _stat(int(name))
            if stat is not None:
                found[int(name)] = stat
    return found


def descendants(root: int) -> list[int]:
    """Every live process below ``root``, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in _all().items():
        children.setdefault(parent, []).append(pid)
    out: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        out += below
        queue += below
    return out


def kill_sessions(sessions: Collection[int], sig: int = signal.SIGKILL) -> int:
    """Signal every process in these sessions, and below them. Returns how many there were."""
    # 0 is no session of ours: it stands for one that can't be seen from here, which may be that of process 1.
    sessions = {session for session in sessions if session > 0}
    everything = _all()
    if not everything:
        return sum(_signal_group(session, sig) for session in sessions)
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in everything.items():
        children.setdefault(parent, []).append(pid)
    queue = [pid for pid, (state, _, session) in everything.items() if session in sessions and state != "Z"]
    hit: set[int] = set()
    while queue:
        pid = queue.pop()
        if pid not in hit:
            hit.add(pid)
            queue += children.get(pid, [])
    for pid in hit:
        send_signal(pid, sig)
    return len(hit)


def marked(folder: Path) -> list[int]:
    """Live processes that belong to the host with this folder."""
    return [pid for pid, host in _hosts() if host == str(folder)]


def marked_below(name: str) -> list[int]:
    """Live processes of all hosts whose folders are in one of this name."""
    return [pid for pid, host in _hosts() if os.path.basename(os.path.dirname(host)) == name]


def _hosts() -> Iterator[tuple[int, str]]:
    """Live processes that belong to a host, and the host's folder."""
    mark = f"{HOST_MARK}=".encode()
    for pid, (state, _, _) in _all().items():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if state != "Z" else []
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        for variable in variables:
            if variable.startswith(mark):
                yield pid, os.fsdecode(variable.removeprefix(mark))


def _signal_group(group: int, sig: int) -> bool:
    try:
        os.killpg(group, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def children_of(parent: int) -> list[tuple[int, int]]:
    """(pid, session) of the direct children."""
    return [(pid, session) for pid, (_, ppid, session) in _all().items() if ppid == parent]


def send_signal(pid: int, sig: int) -> bool:
    try:
        os.kill(pid, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def oom_kills() -> int:
    """How often the kernel killed something in our memory cgroup for want of memory; 0 where it can't be
    told.
    """
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                events = Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events"
                for entry in events.read_text().splitlines():
                    key, value = entry.split()
                    if key == "oom_kill":
                        return int(value)
    except (OSError, ValueError):
        return 0
    return 0


class Used(NamedTuple):
    """What a process and all below it have used so far."""

    seconds: float
    waited: float
    """Seconds in which main threads could have run, and got no processor."""
    traffic: int
    """Bytes read and written, by any means but sockets."""
    processes: frozenset[int]

    def is_more_than(self, before: Used, seconds: float, traffic: float) -> bool:
        worked = abs(self.seconds - before.seconds) + abs(self.waited - before.waited) >= seconds
        return worked or abs(self.traffic - before.traffic) >= traffic or self.processes != before.processes


def used_by(roots: Collection[int]) -> dict[int, Used]:
    """For each of these processes; nothing where the kernel doesn't tell."""
    if not roots or not HAS_DEATH_SIGNALS:
        return {}
    everything = _all()
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in everything.items():
        children.setdefault(parent, []).append(pid)
    found = {}
    for root in roots:
        family, queue = set(), [root]
        while queue:
            family.add(pid := queue.pop())
            queue += children.get(pid, ())
        seconds, traffic = zip(*(_used_by_one(pid) for pid in family), strict=True)
        waited = sum(scheduled(pid).waited for pid in family)
        found[root] = Used(sum(seconds), waited, sum(traffic), frozenset(family))
    return found


def _used_by_one(pid: int) -> tuple[float, int]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        io = Path(f"/proc/{pid}/io").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0, 0
    fields = stat[stat.rindex(b")") + 2 :].split()
    ticks = sum(map(int, fields[11:15]))  # its own, and of children that have ended
    traffic = sum(int(line.split()[1]) for line in io.splitlines()[:2])
    return ticks / os.sysconf("SC_CLK_TCK"), traffic


class Scheduled(NamedTuple):
    """What a process's main thread got of the processors so far."""

    ran: float
    """Seconds."""
    waited: float
    """Seconds in which it could have run, and got no processor."""
    times: int
    """How often it was woken up, or got another turn."""


def scheduled(pid: int) -> Scheduled:
    """All 0 where the kernel doesn't tell."""
    try:
        ran, waited, times = map(int, Path(f"/proc/{pid}/schedstat").read_bytes().split())
    except (OSError, ValueError):
        return Scheduled(0.0, 0.0, 0)
    return Scheduled(ran / 1e9, waited / 1e9, times)


def state_of(pid: int) -> str:
    """One letter, as the kernel has it; empty if it has none, or the process is gone."""
    stat = _stat(pid) if HAS_DEATH_SIGNALS else None
    return stat[0] if stat is not None else ""


def boot_id() -> str:
    """Another one after each boot of this machine; empty where the system doesn't tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not Linux


def anonymous_file(name: str) -> int:
    """A descriptor of a file without a place on disk, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


def set_environment(variables: Mapping[str, str | None]) -> None:
    """Of this process; ``None``: unset."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent doesn't."""
    if not HAS_DEATH_SIGNALS:
        return send_signal(pid, 0)
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def is_dying(pid: int) -> bool:
    """Whether a process has been killed, or is on its way out, and may not have ended yet: its connections
    are closed before it has, and on a busy machine well before. False where there is no /proc.
    """
    try:
        # In this order: a signal is pending before it has its effect.
        status = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    flags = int(stat[stat.rindex(b")") + 2 :].split()[6])
    awaits = [int(line.split()[1], 16) for line in status if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    return bool(flags & _PF_EXITING) or any(mask >> (signal.SIGKILL - 1) & 1 for mask in awaits)


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid, it names a process for good. None if
    it is gone.

    Without /proc, 0 for every process that lives.
    """
    if not Path("/proc/self/stat").exists():
        return 0 if send_signal(pid, 0) else None
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return int(data[data.rindex(b")") + 2 :].split()[19])


def memory() -> tuple[int, int]:
    """(bytes to be had, bytes that there are) on this machine, or in this container if that has less."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = total
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used, stat in _CGROUP_FILES:
        most = "".join(_lines(limit)).strip()
        if most.isdigit() and int(most) < total:
            # Files that nobody uses are given up before anything is killed.
            idle = sum(int(line.split()[1]) for line in _lines(stat) if line.startswith("inactive_file "))
            total = int(most)
            available = min(available, total - int("".join(_lines(used)).strip() or 0) + idle)
    return available, total


def process_limits() -> Iterator[tuple[int, str]]:
    """(how many processes there may be, what says so), for this machine, this container and this user."""
    for where, name in _PROCESS_LIMITS:
        most = "".join(_lines(where)).strip()
        if most.isdigit():
            yield int(most), name
    _, most_of_user = resource.getrlimit(resource.RLIMIT_NPROC)
    if most_of_user != resource.RLIM_INFINITY and os.geteuid():  # root has as many as it likes
        yield most_of_user, "ulimit -Hu"


_CGROUP = "/sys/fs/cgroup"
_PROCESS_LIMITS = (
    ("/proc/sys/kernel/pid_max", "kernel.pid_max"),
    ("/proc/sys/kernel/threads-max", "kernel.threads-max"),
    (f"{_CGROUP}/pids.max", "the cgroup's pids.max"),
    (f"{_CGROUP}/pids/pids.max", "the cgroup's pids.max"),
)
_CGROUP_FILES = (
    (f"{_CGROUP}/memory.max", f"{_CGROUP}/memory.current", f"{_CGROUP}/memory.stat"),
    (
        f"{_CGROUP}/memory/memory.limit_in_bytes",
        f"{_CGROUP}/memory/memory.usage_in_bytes",
        f"{_CGROUP}/memory/memory.stat",
    ),
)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
