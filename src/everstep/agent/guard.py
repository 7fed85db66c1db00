"""The guardian of a host: the parent of its agent, and a process that nothing on the host can outlive.

Whatever a worker starts, and however it detaches itself, becomes a child of the nearest ancestor that adopts
orphans: of the agent while that lives, of the guardian after that. So when the agent ends, in whatever way,
the guardian kills its children until it has none left, removes the workers' temporary folders, and ends: a
guardian that is gone proves that everything on its host is.

It runs by its path, on the standard library alone: it starts in milliseconds, and has nothing to break.
"""

from __future__ import annotations

import os
import signal
import sys
import time

SCRATCH = "scratch"
"""In a host's folder: links to the temporary folders that its workers have."""


def children() -> list[int]:
    """Processes whose parent is this one; those that have ended and wait to be reaped, too."""
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    data = file.read()
            except OSError:
                continue  # it has ended meanwhile
            if int(data[data.rindex(b")") + 2 :].split()[1]) == me:
                found.append(int(name))
    return found


def end_children(timeout_s: float | None = None) -> bool:
    """Kill children until none is left; orphans of those become children, and are killed next. False: some
    can't be killed, or time is up.

    A child that isn't reaped keeps its number, so nobody else can be hit.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while _reap_all():
        killed = [pid for pid in children() if _kill(pid)]
        if not killed:
            return not _reap_all()
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _reap_all() -> bool:
    """Whether any child is left that has not ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False  # of another user
    return True


def remove_scratch(folder: str) -> None:
    """Remove the temporary folders that workers of this host have left."""
    import shutil

    links = os.path.join(folder, SCRATCH)
    try:
        names = os.listdir(links)
    except OSError:
        return  # it never had a worker
    for name in names:
        link = os.path.join(links, name)
        try:
            place = os.readlink(link)
            shutil.rmtree(place, ignore_errors=True)
            if not os.path.lexists(place):
                os.unlink(link)
        except OSError:
            continue  # removed by the agent meanwhile


def main() -> int:
    agent, ready, folder, lock = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    lives = True

    def pass_on(number: int, _: object) -> None:
        if lives:
            os.kill(agent, number)

    def end(*_: object) -> None:
        pass_on(signal.SIGKILL, None)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGUSR1, pass_on)
    signal.signal(signal.SIGHUP, end)
    os.write(ready, b".")
    os.close(ready)
    while lives:
        # Seen before it is reaped: until then its number is its own, and signals may be passed on.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        lives = ended.si_pid != agent
        _, status = os.waitpid(ended.si_pid, 0)
    end_children()
    remove_scratch(folder)
    if lock:
        # The next agent of this host waits for the lock, which goes with us.
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.unlink(lock[0])
        except FileNotFoundError:
            pass
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
