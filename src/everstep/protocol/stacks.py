"""Where a worker is: its Python stacks, taken from outside, and what they say.

``faulthandler`` writes them from a signal handler, which needs neither Python's lock nor the main thread's
help. A process that is stopped can't run one: there py-spy is asked, where it is installed, and else the
kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import everstep
from everstep.health.vitals import StackPlace

SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 1) - 1
"""Makes a worker write its stacks. Nobody else uses it: not a scheduler, not a framework."""

_PY_SPY_S = 5.0


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line}, in {self.function}'


class Stacks(NamedTuple):
    main: tuple[Frame, ...]
    """Of the main thread, innermost first."""
    text: str
    """Of all threads, as ``faulthandler`` or py-spy has written it."""


NONE = Stacks((), "")

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_SPIED_THREAD = re.compile(r"^Thread (\S+) \(")
_SPIED_FRAME = re.compile(r"^    (\S+) \((.*):(\d+)\)$")


def parse(text: str, main_thread: int) -> Stacks:
    """What ``faulthandler`` wrote."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = found[int(thread[1], 16)] = []
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return Stacks(tuple(found.get(main_thread, ())), text)


def py_spy() -> str | None:
    """The program, if it is installed."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def spy(pid: int) -> Stacks:
    """What py-spy finds, if it is installed and has the rights."""
    program = py_spy()
    if program is None:
        return NONE
    command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return NONE
    return parse_spied(text, pid)


def parse_spied(text: str, pid: int) -> Stacks:
    """What py-spy printed. The main thread has the number of its process."""
    main: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if thread := _SPIED_THREAD.match(line):
            inside = thread[1] == str(pid)
        elif inside and (frame := _SPIED_FRAME.match(line)):
            main.append(Frame(frame[2], int(frame[3]), frame[1]))
    return Stacks(tuple(main), text)


def in_kernel(pid: int) -> str:
    """What the kernel knows of a process whose Python stack can't be had."""
    parts = []
    for name in ("wchan", "syscall", "stack"):
        try:
            found = Path(f"/proc/{pid}/{name}").read_text().strip()
        except OSError:
            continue  # only root may read some of them
        if found and found != "0":
            parts.append(f"{name}: {found}")
    return "\n".join(parts)


# ---------------------------------------------------------------------- what a stack says

_OURS = str(Path(everstep.__file__).parent) + "/"
_LIBRARY = sysconfig.get_paths()["stdlib"] + "/"
_PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_COLLECTIVES = re.compile(
    r"/(?:site|dist)-packages/(?:torch/(?:distributed|autograd|nn/parallel)/|torchft/|jax/|jaxlib/|torch_xla/)"
)


def place_of(main: tuple[Frame, ...], marked: StackPlace = StackPlace.UNKNOWN) -> StackPlace:
    """Whether a main thread with this stack waits for others, by the code that it is in.

    ``marked``: where it says that it is, if it is in a function of Everstep's (``Progress.waiting``).
    """
    if not main:
        return StackPlace.UNKNOWN
    outside = [frame for frame in main if not _is_of_python(frame)]
    if not outside:
        return StackPlace.WAITING
    first = outside[0]
    if first.file.startswith(_OURS):
        return marked or StackPlace.WORKING
    if _COLLECTIVES.search(first.file):
        return StackPlace.COLLECTIVE
    return StackPlace.WORKING if first is main[0] else StackPlace.WAITING


def _is_of_python(frame: Frame) -> bool:
    inside = frame.file.startswith("<frozen") or frame.file.startswith(_LIBRARY)
    return inside and not _PACKAGES.search(frame.file)


def line_of(main: tuple[Frame, ...]) -> str:
    """The innermost line of the user's own code, else of any."""
    own = (f for f in main if not _is_of_python(f) and not f.file.startswith(_OURS))
    frame = next((f for f in own if not _PACKAGES.search(f.file)), main[0] if main else None)
    return f"{frame.file}:{frame.line} in {frame.function}" if frame is not None else ""


def text_of(main: tuple[Frame, ...]) -> str:
    """As a traceback has it: innermost last, and from the user's first line on."""
    if not main:
        return ""
    frames = main[::-1]
    begins = next((i for i, f in enumerate(frames) if not _starts_workers(f)), 0)
    return "\n".join(["Stack of the main thread (most recent call last):", *map(str, frames[begins:])])


def _starts_workers(frame: Frame) -> bool:
    return frame.file.startswith(f"{_OURS}agent/") or frame.file.startswith("<frozen runpy")
