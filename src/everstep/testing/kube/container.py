"""A container's first process: when it ends, so does all that was started in it. Run by path, and light.

SIGTERM is passed on. SIGUSR1, which is also what it gets when its kubelet dies, ends everything at once.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(kubelet: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD})
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != kubelet:
        os._exit(1)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error}", file=sys.stderr)
            os._exit(127)
    while True:
        heard = signal.sigwait({signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD})
        if heard == signal.SIGUSR1:
            end_all()
            os._exit(128 + signal.SIGKILL)
        if heard == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        status = reap(child)
        if status is not None:
            end_all()
            os._exit(status)


def reap(child: int) -> int | None:
    """The exit code of the container's own process, if it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_all() -> None:
    """Orphans come to us, so that what is killed from the top down is all there is."""
    while True:
        children = [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == os.getpid()
        ]
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.wait()
        except ChildProcessError:
            return


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
