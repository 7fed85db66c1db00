"""The live picture of a run, at the bottom of a terminal.

It is drawn by a thread of its own, a few times a second: watching costs the run next to nothing, and a
terminal that takes nothing (Ctrl+S, a stalled connection) holds up nobody else.
"""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from everstep.control import commands as c
from everstep.identity import Incarnation
from everstep.journal import records
from everstep.journal.ledger import RunLedger
from everstep.observe.display import PlainDisplay, Printed, describe, describe_start, is_terminal, stamped
from everstep.observe.observer import NewReports
from everstep.observe.picture import News, Picture, RunEnding, Saved
from everstep.observe.registry import LiveRun

_REFRESH_S = 0.2
_OUTPUT_WAITING = 10_000
"""Pieces of workers' output that wait for the terminal; then the oldest go. All of it is in the log files."""
_CLOSE_S = 3.0
_SMALLEST = (40, 12)
"""Columns and lines below which a picture is of no use."""
_OUTPUT = "output"
_HEAD = len(stamped("", 0.0))


@dataclass(frozen=True)
class OutputLine:
    """What a worker printed."""

    rank: int
    text: str


def live_display(stream: TextIO) -> LiveDisplay | None:
    """A live display on this terminal, unless it can't show one, or shows another already."""
    console = Console(file=stream, highlight=False, force_jupyter=False)
    able = console.is_terminal and console.is_interactive and not console.is_dumb_terminal
    room = console.width >= _SMALLEST[0] and console.height >= _SMALLEST[1]
    return LiveDisplay(console) if able and room and not LiveDisplay.on_screen else None


class LiveDisplay:
    """A picture at the bottom of the terminal; what happens, and what workers print, scrolls above it.

    On the driver's loop things are only noted down. All else is done by the thread that draws.
    """

    on_screen = False
    """Whether one is being shown: a terminal has room for one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._picture = Picture()
        self._began = time.monotonic()
        self._news: deque[tuple[float, News]] = deque()
        self._output: deque[tuple[float, OutputLine]] = deque(maxlen=_OUTPUT_WAITING)
        self._printed = Printed()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ on the driver's loop

    def opened(self, ledger: RunLedger) -> None:
        self._picture.ledger = ledger

    def resumed(self, reports: Mapping[int, int]) -> None:
        self._picture.reports.resume(reports)

    def ended(self, how: str) -> None:
        self._note(RunEnding(how))

    def record(self, record: c.Record) -> None:
        self._note(record)

    def say(self, line: str) -> None:
        self._note(line)

    def started(self, run: LiveRun) -> None:
        self._note(run)

    def committed(self, of: Incarnation, index: int, address: str) -> None:
        self._note(Saved(address))

    def output(self, rank: int, text: str) -> None:
        self._output.append((time.monotonic(), OutputLine(rank, text)))

    def progress(self, rank: int, epoch: int, index: int, newest: NewReports) -> None:
        self._picture.reports.add(epoch, index, newest)

    def reported(self, of: Incarnation, rank: int, index: int, metrics: msgspec.Raw, saves: bool) -> None:
        pass

    def unsaved(self, of: Incarnation, index: int) -> None:
        pass

    def _note(self, news: News) -> None:
        self._news.append((time.monotonic(), news))
        if self._thread is None and not self._closing.is_set():
            LiveDisplay.on_screen = True
            self._thread = threading.Thread(target=self._main, name="everstep-display", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Draw the last state, and give the terminal back as it was."""
        self._closing.set()
        if self._thread is not None:
            # With a limit: a terminal that takes nothing must not keep the script from ending.
            self._thread.join(_CLOSE_S)
            LiveDisplay.on_screen = False

    # ------------------------------------------------------------------ on the thread that draws

    def _main(self) -> None:
        try:
            self._draw()
        except Exception as error:  # a terminal that is gone, or a bug: a picture must never end a run
            plain = PlainDisplay(sys.__stderr__)
            plain.line(f"everstep: the live display ended ({error!r}); plain lines from here on")
            ended = False
            while not ended:
                ended = self._closing.wait(_REFRESH_S)
                for line, _ in self._take_in():
                    plain.line(line)

    def _draw(self) -> None:
        live = Live(
            console=self._console,
            auto_refresh=False,
            # The script's own prints go above the picture; but not to the terminal, if they went elsewhere.
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
            get_renderable=lambda: self._picture.render(self._console, time.monotonic()),
            vertical_overflow="crop",
        )
        with live:
            ended = False
            while not ended:
                ended = self._closing.wait(_REFRESH_S)
                lines = [_styled(line, style, self._console.width) for line, style in self._take_in()]
                if ended:
                    lines += [Text.from_ansi(line) for line in self._printed.rest()]
                if lines:
                    self._console.print(*lines, sep="\n", soft_wrap=True)
                live.refresh()

    def _take_in(self) -> list[tuple[str, str]]:
        """What has come since the last time, put into the picture and into lines with their style."""
        taken: list[tuple[float, News | OutputLine]] = []
        for queue in (self._news, self._output):
            taken += [queue.popleft() for _ in range(len(queue))]
        lines = []
        for at, news in sorted(taken, key=lambda item: item[0]):
            if isinstance(news, OutputLine):
                lines += [(line, _OUTPUT) for line in self._printed.lines(news.rank, news.text)]
                continue
            self._picture.take(news, at)
            lines += [(stamped(line, at - self._began), style) for line, style in _lines(news)]
        return lines


def _lines(news: News) -> list[tuple[str, str]]:
    match news:
        case str():
            return [(news, "")]
        case LiveRun():
            return [(line, "dim") for line in describe_start(news)]
        case c.Record():
            line = describe(news)
            return [(line, _line_style(news))] if line else []
        case _:
            return []


def _styled(line: str, style: str, width: int) -> Text:
    if style == _OUTPUT:
        return Text.from_ansi(line)
    # Wrapped here, with the lines that follow set in below the words.
    text = Text("\n".join(textwrap.wrap(line, max(width, 2 * _HEAD), subsequent_indent=" " * _HEAD)), style)
    text.stylize("not bold dim default", 0, _HEAD)
    return text


def _line_style(record: c.Record) -> str:
    match record:
        case c.FailureSeen():
            return "dim red" if record.failure.echo else "bold red"
        case c.PreemptionSeen():
            return "bold magenta"
        case c.Recovered():
            return "bold green"
        case c.Waiting() | c.HostSetAside() | records.StragglerSeen():
            return "yellow"
        case _:
            return ""
