"""What the user sees: plain lines, and on a terminal the live picture."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from everstep.control import commands as c
from everstep.failures import Failure, Kind
from everstep.health.stragglers import Slowness
from everstep.journal import records
from everstep.journal.records import Opened, Owner
from everstep.observe import live
from everstep.observe.display import PlainDisplay, describe, make_display
from everstep.observe.live import LiveDisplay
from everstep.observe.observer import NewReports
from everstep.observe.picture import Picture, RunEnding, Saved
from everstep.observe.registry import LiveRun, LiveWorker
from processes import LIMIT_S, wait_for

SIGKILL = Failure(Kind.SIGNAL, 20.0, "killed by SIGKILL", rank=1, host="slice-0-host-1", signal="SIGKILL")


def workers(*places: str, pid: int = 100) -> list[LiveWorker]:
    """A worker on each of these hosts, named SLICE-host-N."""
    return [
        LiveWorker(rank, pid + rank, host, host.rpartition("-host")[0]) for rank, host in enumerate(places)
    ]


def run_on(*places: str, epoch: int = 1, pid: int = 100) -> LiveRun:
    return LiveRun("demo", "/runs/demo", 1, epoch, workers(*places, pid=pid))


def raw(**metrics: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(metrics))


def started(at: float, epoch: int, rung: c.Rung = c.Rung.FIRST_START) -> c.GroupStarted:
    return c.GroupStarted(at, epoch, ((0, 0),), 2, 1, rung, "first start", None)


def recovered(at: float, cause: Failure | None = SIGKILL) -> c.Recovered:
    kept = "agents, templates, placement"
    return c.Recovered(
        at, 2, c.Rung.RESTART_IN_PLACE, cause, kept, 11, 0.1, 0.0, 0.0, 0.0, 0.2, 0.3, 0.0, 0.4
    )


def training() -> Picture:
    """A run that has been training from 12.0 on; its first word came at 10.0."""
    picture = Picture()
    picture.ledger.apply(opened(10.0))
    for record in (c.PhaseChanged(10.0, "placing", 0), c.PhaseChanged(11.0, "starting", 1)):
        tell(picture, record)
    tell(picture, c.PhaseChanged(12.0, "running", 1))
    picture.take(run_on("slice-0-host-0", "slice-0-host-1"), 12.0)
    tell(picture, started(12.0, 1))
    return picture


def opened(at: float) -> Opened:
    owner = Owner("host", "boot", 1, 1)
    return Opened(3, 1, owner, at, 1000.0 + at, "0", "demo", 2, 2, "", "", "")


def tell(picture: Picture, record: c.Record) -> None:
    """As the driver does: the ledger takes in what is written."""
    picture.ledger.apply(record)  # type: ignore[arg-type]
    picture.take(record, record.at)


def shown(picture: Picture, now: float, width: int = 100, height: int = 30, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, height=height, force_terminal=True, record=True)
    console.print(picture.render(console, now))
    text = console.export_text()
    room = 2 if width >= 40 else 0  # for an echoed ^C, on any terminal that gets a picture
    assert all(len(line.rstrip()) <= width - room for line in text.splitlines())
    return text


def line_with(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


# ---------------------------------------------------------------------- the picture


def test_the_picture_shows_state_workers_and_goodput():
    text = shown(training(), 20.0)
    assert "everstep · demo" in text
    assert "● running  attempt 1" in text
    assert "goodput 80.0 %  00:10" in text
    assert "slice-0" in line_with(text, "● rank 0 pid 100")
    assert "slice-0-host-1" in line_with(text, "● rank 1 pid 101")


def test_the_picture_shows_reports_metrics_and_the_last_checkpoint():
    picture = training()
    shown(picture, 13.0)
    picture.reports.add(1, 40, NewReports(raw(loss=0.123456, step=40, note="x" * 100)))
    picture.take(Saved("/runs/demo/checkpoint_0001_000040"), 13.5)
    text = shown(picture, 15.0)
    assert "20.0 reports/s · 40 in all" in text
    assert "loss 0.1235  step 40" in text
    assert "checkpoint_0001_000040  1.5 s ago" in text


def test_reports_are_counted_over_restarts():
    picture = training()
    picture.reports.add(1, 40, NewReports())
    picture.reports.add(2, 5, NewReports())
    assert "45 in all" in shown(picture, 15.0)


def test_reports_of_earlier_drivers_are_counted_and_are_no_speed_of_this_ones():
    picture = training()
    picture.reports.resume({1: 300, 2: 390})
    assert "0.0 reports/s · 690 in all" in shown(picture, 13.0)
    picture.reports.add(2, 380, NewReports(earlier=380))  # what the driver before had dealt with
    assert "0.0 reports/s · 690 in all" in shown(picture, 13.5)
    picture.reports.add(2, 420, NewReports(earlier=410))  # told again, ten of them new
    assert "10.0 reports/s · 720 in all" in shown(picture, 14.0)
    picture.reports.add(3, 5, NewReports())
    assert "725 in all" in shown(picture, 15.0)


def test_a_failed_worker_is_marked_and_the_others_stop_with_it():
    picture = training()
    picture.take(c.FailureSeen(20.0, SIGKILL), 20.0)
    tell(picture, c.PhaseChanged(20.0, "stopping", 1))
    text = shown(picture, 22.0)
    assert "● stopping" in text
    assert "✗ rank 1 pid 101  killed by SIGKILL" in text
    assert "○ rank 0 pid 100" in text
    assert "goodput 66.7 %" in text  # 8 of 12 s


def slow(at: float, over: str = "", kind: Slowness = Slowness.DATA) -> records.StragglerSeen:
    return records.StragglerSeen(at, 1, (1,), "slice-0-host-1", kind, 0.35, over)


def test_a_slow_worker_is_marked_as_long_as_it_is():
    picture = training()
    tell(picture, slow(20.0))
    text = shown(picture, 20.0)
    assert "◐ rank 1" in text
    assert "35 % slower than its peers: waiting for data" in text
    tell(picture, slow(30.0, "recovered"))
    assert "slower" not in shown(picture, 30.0)
    tell(picture, c.FailureSeen(31.0, SIGKILL))
    tell(picture, slow(31.5))
    assert "✗ rank 1" in shown(picture, 32.0)


def test_the_lines_about_a_slow_worker_say_who_where_and_why():
    assert describe(slow(1.0)) == "rank 1 on slice-0-host-1 is 35 % slower than its peers: waiting for data"
    assert describe(slow(1.0, kind=Slowness.BUSY_HOST)) == (
        "host slice-0-host-1 is busy: rank 1 is 35 % slower than the others"
    )
    assert describe(slow(1.0, "recovered")) == "rank 1 on slice-0-host-1 is as fast as the others again"
    assert describe(slow(1.0, "restarted")) == ""


def test_an_echo_marks_nobody():
    picture = training()
    picture.take(c.FailureSeen(20.0, msgspec.structs.replace(SIGKILL, echo=True)), 20.0)
    assert "✗" not in shown(picture, 20.0)


def test_a_lost_host_marks_all_its_workers():
    picture = training()
    lost = Failure(Kind.HOST_SILENT, 20.0, "no heartbeat for 1.5 s", host="slice-0-host-1")
    picture.take(c.FailureSeen(20.0, lost), 20.0)
    text = shown(picture, 20.0)
    assert "✗ rank 1 pid 101  host silent: no heartbeat for 1.5 s" in text
    assert "● rank 0" in text


def test_a_worker_on_another_host_is_shown_as_replaced():
    picture = training()
    picture.take(run_on("slice-0-host-0", "slice-2-host-1", epoch=2, pid=200), 22.0)
    text = shown(picture, 23.0)
    assert "◆ rank 1 pid 201  in place of slice-0-host-1" in text
    assert "● rank 0 pid 200" in text


def test_recoveries_are_told_with_their_cost_the_newest_first():
    picture = training()
    for at in (30.0, 40.0):
        picture.take(started(at, 2, c.Rung.RESTART_IN_PLACE), at)
    picture.take(recovered(31.0), 31.0)
    slower = msgspec.structs.replace(recovered(41.0), wait_s=2.0, steps_lost=1)
    picture.take(slower, 41.0)
    lines = shown(picture, 42.0, width=120).splitlines()
    first = next(i for i, line in enumerate(lines) if "restarts 2" in line)
    assert "3.00 s" in lines[first]
    assert "1 step lost" in lines[first]
    assert "1.00 s   11 steps lost  restart in place        rank 1: killed by SIGKILL" in lines[first + 1]


def test_the_line_about_a_replacement_says_what_a_full_restart_would_lose():
    def said(unsaved: int) -> str:
        out = io.StringIO()
        PlainDisplay(out).record(c.RecoveryDecided(1.0, SIGKILL, "max_failures", 1, -1, (1,), 0.0, unsaved))
        return out.getvalue()

    assert "119 steps of the groups that go on would be lost" in said(119)
    assert "report(checkpoint=" in said(119)
    assert "lost" not in said(0)


def test_a_failure_of_nobody_in_particular_names_nobody():
    """A reservation that can't be made has no rank, and no host that would be known."""
    failure = Failure(Kind.RESERVATION, 5.0, "no answer within 300 s")
    assert describe(c.FailureSeen(5.0, failure)) == "reservation failed: no answer within 300 s"
    decided = describe(c.RecoveryDecided(5.0, failure, "controller_failure_limit", 1, 3, (), 0.0))
    assert decided == "recovering from no answer within 300 s (controller_failure_limit: 1 of 3)"
    again = describe(recovered(9.0, failure))
    assert "by «restart in place»: no answer within 300 s; kept" in again
    picture = training()
    picture.take(c.FailureSeen(5.0, failure), 13.0)
    picture.take(recovered(14.0, failure), 14.0)
    assert "None" not in shown(picture, 15.0)


def test_a_preempted_slice_counts_down_until_the_notice_is_cancelled():
    picture = training()
    picture.take(c.PreemptionSeen(20.0, "slice-0", 26.0), 20.0)
    assert "goes in 4.0 s" in shown(picture, 22.0)
    picture.take(c.PreemptionSeen(23.0, "slice-0", None), 23.0)
    assert "goes in" not in shown(picture, 24.0)


def test_waiting_says_for_what():
    picture = training()
    picture.take(c.PhaseChanged(20.0, "waiting", 1), 20.0)
    picture.take(c.Waiting(20.0, 4, "2 of 4 workers fit"), 20.0)
    assert "● waiting  attempt 1  2 of 4 workers fit" in shown(picture, 21.0)


def test_time_stands_still_when_the_run_has_ended():
    picture = training()
    tell(picture, c.PhaseChanged(20.0, "ending", 1))
    tell(picture, c.PhaseChanged(20.0, "ended", 1))
    assert "goodput 80.0 %  00:10" in shown(picture, 500.0)


@pytest.mark.parametrize("how", ["finished", "failed", "stopped", "taken over"])
def test_the_last_state_says_how_the_run_ended(how: str):
    picture = training()
    tell(picture, c.PhaseChanged(20.0, "ended", 1))
    assert "● ended" in shown(picture, 20.0)
    picture.take(RunEnding(how), 21.0)
    assert f"● {how}  attempt 1" in shown(picture, 500.0)
    assert "00:10" in shown(picture, 500.0)


def test_a_driver_that_breaks_has_failed_in_whatever_phase_it_was():
    picture = training()
    picture.take(RunEnding("failed"), 21.0)
    text = shown(picture, 500.0)
    assert "● failed" in text
    assert "00:11" in text


def timeline(picture: Picture, now: float) -> str:
    return shown(picture, now, width=46).splitlines()[2][2:42]


def test_the_timeline_shows_a_hang_from_when_it_began():
    picture = training()
    hang = Failure(Kind.HANG, 30.0, "no progress for 12 s", rank=1)
    tell(picture, c.FailureSeen(40.0, hang))
    tell(picture, c.PhaseChanged(40.0, "stopping", 1))
    tell(picture, c.PhaseChanged(41.0, "running", 2))
    assert timeline(picture, 50.0) == "╌" * 3 + "━" * 17 + "╌" * 12 + "━" * 8


def test_a_hang_that_is_only_warned_about_is_over_with_the_next_report():
    picture = training()
    shown(picture, 13.0)
    picture.reports.add(1, 40, NewReports())
    shown(picture, 20.0)
    tell(picture, c.HangSeen(40.0, 1, (1,), "no progress for 20 s", "", "warn"))
    assert "● hanging" in shown(picture, 40.0)
    assert timeline(picture, 50.0) == "╌" * 3 + "━" * 7 + "╌" * 30
    picture.reports.add(1, 41, NewReports())
    assert "● running" in shown(picture, 50.0)
    assert timeline(picture, 90.0) == "╌" * 2 + "━" * 3 + "╌" * 16 + "━" * 19


def test_a_hang_of_a_replica_group_is_no_hang_of_those_that_report():
    picture = training()
    shown(picture, 13.0)
    picture.reports.add(1, 40, NewReports())
    shown(picture, 39.0)
    tell(picture, c.FailureSeen(40.0, Failure(Kind.HANG, 30.0, "no progress for 12 s", rank=1)))
    picture.reports.add(1, 41, NewReports())
    assert "● running" in shown(picture, 40.0)


def test_many_hosts_are_folded_into_slices_and_many_slices_are_counted():
    picture = training()
    places = [f"slice-{s}-host-{h}" for s in range(8) for h in range(4)]
    picture.take(run_on(*places), 13.0)
    text = shown(picture, 14.0, height=24)
    assert "4 hosts  ● ranks 0–3" in text
    assert len(text.splitlines()) <= 24
    assert "and 5 slices more" in shown(picture, 14.0, height=13)


@pytest.mark.parametrize("width", [10, 40, 250])
@pytest.mark.parametrize("height", [1, 5, 100])
def test_any_size_of_terminal_can_be_drawn(width, height):
    picture = training()
    picture.reports.add(1, 40, NewReports(raw(loss=0.1)))
    picture.take(recovered(15.0), 15.0)
    shown(picture, 20.0, width, height)


def test_a_terminal_without_unicode_gets_ascii():
    picture = training()
    picture.take(recovered(15.0), 15.0)
    picture.take(started(15.0, 2, c.Rung.RESTART_IN_PLACE), 15.0)
    shown(picture, 20.0, encoding="ascii").encode("ascii")


# ---------------------------------------------------------------------- plain lines


class Written:
    """A stream that can be read back, in some encoding."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self._bytes = io.BytesIO()
        self.stream = io.TextIOWrapper(self._bytes, encoding=encoding)

    @property
    def lines(self) -> list[str]:
        return self._bytes.getvalue().decode(self.stream.encoding).splitlines()


def test_where_there_is_no_terminal_there_are_plain_lines():
    out = Written()
    display = make_display(out.stream)
    assert isinstance(display, PlainDisplay)
    display.started(run_on("slice-0-host-0", "slice-0-host-1"))
    display.record(recovered(31.0))
    display.record(c.PhaseChanged(31.0, "running", 2))
    display.output(0, "half a ")
    display.output(0, "line\n10 %\r20 %\r\nthe rest")
    display.close()
    assert [line.partition("s  ")[2] or line for line in out.lines] == [
        "slice-0: hosts slice-0-host-0, slice-0-host-1; ranks 0, 1; pids 100, 101",
        "recovered in 1.000 s by «restart in place»: rank 1: killed by SIGKILL; kept agents, templates, "
        "placement; 11 steps lost; seconds: detect 0.100, start 0.200, rendezvous 0.300, first step 0.400",
        "[rank 0] half a line",
        "[rank 0] 20 %",
        "[rank 0] the rest",
    ]


@pytest.mark.parametrize(
    ("rung", "told"),
    [
        (c.Rung.PLANNED, "planned restart in 1.000 s;"),
        (c.Rung.REPLACE_GROUPS, "start of replica groups in 1"),
    ],
)
def test_a_restart_without_a_failure_is_told_as_what_it_is(rung, told):
    line = describe(msgspec.structs.replace(recovered(31.0), cause=None, rung=rung))
    assert line.startswith(told)
    assert "resize" not in line


def unreported(record: c.Recovered) -> records.RecoveredWithoutReport:
    return records.RecoveredWithoutReport(**msgspec.structs.asdict(record))


def test_what_is_not_known_of_a_recovery_without_reports_is_left_out():
    assert describe(unreported(recovered(31.0))) == (
        "restarted in 0.600 s by «restart in place»: rank 1: killed by SIGKILL; kept agents, templates, "
        "placement; steps lost and time to the first step unknown, as nothing was reported; "
        "seconds: detect 0.100, start 0.200, rendezvous 0.300"
    )


def test_the_picture_of_a_script_that_never_reports_claims_no_lost_steps():
    picture = training()
    tell(picture, c.PhaseChanged(20.0, "starting", 2))
    tell(picture, started(21.0, 2, c.Rung.RESTART_IN_PLACE))
    assert "under way" in line_with(shown(picture, 21.0), "restarts 1")
    tell(picture, c.PhaseChanged(21.0, "running", 2))
    assert "training, no report yet" in line_with(shown(picture, 22.0), "restarts 1")
    tell(picture, unreported(recovered(31.0)))
    line = line_with(shown(picture, 32.0), "restarts 1")
    assert "0.60 s  nothing reported  restart in place" in line


def test_a_progress_bar_that_never_ends_its_line_is_not_kept_whole():
    out = Written()
    display = PlainDisplay(out.stream)
    for i in range(1000):
        display.output(0, f"\r{i} of 1000")
    display.close()
    assert out.lines == ["[rank 0] 999 of 1000"]


def test_what_a_stream_cannot_encode_is_replaced():
    out = Written("ascii")
    PlainDisplay(out.stream).record(recovered(31.0))
    assert "by ?restart in place?" in out.lines[0]


def test_a_closed_stream_is_no_error():
    stream = io.StringIO()
    stream.close()
    display = make_display(stream)
    display.say("nobody hears this")
    display.output(0, "nor this\n")
    display.close()


# ---------------------------------------------------------------------- on a real terminal

SCRIPT = textwrap.dedent(
    """
    import sys, time
    from everstep.observe.display import make_display
    from everstep.observe.registry import LiveRun, LiveWorker
    from everstep.control import commands as c

    display = make_display()
    print(type(display).__name__, flush=True)
    try:
        now = time.monotonic()
        display.record(c.PhaseChanged(now, "running", 1))
        display.started(LiveRun("demo", "/runs/demo", 1, 1, [LiveWorker(0, 100, "slice-0-host", "slice-0")]))
        display.output(0, "\\x1b[32mhello\\x1b[0m [bold]from[/bold] rank 0\\n")
        print("the script's own", flush=True)
        BODY
    finally:
        display.close()
    print("restored", flush=True)
    """
)
SEEN = "while display._news or display._output: time.sleep(0.01)\n"
"""Everything so far is on the screen."""


class OnTerminal:
    """A script on a terminal of its own."""

    def __init__(self, body: str, script: str = SCRIPT, **environment: str) -> None:
        self.main, terminal = pty.openpty()
        set_size(terminal, 30, 100)
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                script.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ").strip()),
            ],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**env, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment},
            start_new_session=True,
        )
        os.close(terminal)
        self.text = ""

    def read_until(self, done: Callable[[str], bool]) -> str:
        """Read what it shows until that is enough, or it has ended."""
        while not done(self.text):
            assert select.select([self.main], [], [], 30)[0], f"nothing more came after {self.text!r}"
            try:
                data = os.read(self.main, 1 << 16)
            except OSError:  # how Linux says that nobody has the terminal open any more
                break
            if not data:
                break
            self.text += data.decode(errors="replace")
        return self.text

    def finish(self) -> int:
        self.read_until(lambda text: False)
        os.close(self.main)
        return self.process.wait(LIMIT_S)


def set_size(terminal: int, lines: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def test_on_a_terminal_the_picture_is_live_and_the_terminal_is_given_back():
    run = OnTerminal(SEEN)
    assert run.finish() == 0
    assert "LiveDisplay" in run.text
    assert "● running" in strip(run.text)
    assert "hello [bold]from[/bold] rank 0" in strip(run.text)
    assert "the script's own" in run.text
    assert run.text.rindex(SHOW) > run.text.rindex(HIDE)
    assert run.text.rindex("restored") > run.text.rindex(SHOW)


def test_an_exception_leaves_the_terminal_as_it_was():
    run = OnTerminal(SEEN + "raise RuntimeError('on purpose')")
    assert run.finish() == 1
    assert "RuntimeError: on purpose" in run.text
    assert run.text.rindex(SHOW) > run.text.rindex(HIDE)


def test_ctrl_c_leaves_the_terminal_as_it_was():
    run = OnTerminal("time.sleep(60)")
    run.read_until(lambda text: "rank 0 pid 100" in strip(text))
    os.kill(run.process.pid, signal.SIGINT)
    assert run.finish() != 0
    assert "KeyboardInterrupt" in run.text
    assert run.text.rindex(SHOW) > run.text.rindex(HIDE)


@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_a_terminal_that_can_only_print_gets_plain_lines(term):
    run = OnTerminal("pass", TERM=term)
    assert run.finish() == 0
    assert "PlainDisplay" in run.text
    assert "slice-0: host slice-0-host" in run.text
    assert HIDE not in run.text


def test_a_tiny_terminal_gets_plain_lines():
    run = OnTerminal("pass", COLUMNS="20", LINES="5")
    assert run.finish() == 0
    assert "PlainDisplay" in run.text


def test_no_color_means_none():
    run = OnTerminal(SEEN, NO_COLOR="1")
    assert run.finish() == 0
    assert "LiveDisplay" in run.text
    colours = [f"\x1b[{code}m" for code in (31, 32, 33, 34, 35, 36, "1;32")]
    assert not any(colour in run.text for colour in colours)


def test_output_that_goes_to_a_file_stays_there(tmp_path: Path):
    target = tmp_path / "out.txt"
    script = SCRIPT.replace("import sys, time", f"import sys, time; sys.stdout = open({str(target)!r}, 'w')")
    run = OnTerminal(SEEN, script)
    assert run.finish() == 0
    assert target.read_text() == "LiveDisplay\nthe script's own\nrestored\n"
    assert "the script's own" not in run.text


def test_a_terminal_that_goes_away_does_not_end_the_run(tmp_path: Path):
    run = OnTerminal(
        f"""
        import os, pathlib, signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            while True:
                os.write(2, b".")
                time.sleep(0.01)
        except OSError:
            pass
        display.say("to nobody")
        display.close()
        pathlib.Path({str(tmp_path / "closed")!r}).touch()
        os._exit(0)
        """
    )
    run.read_until(lambda text: "rank 0 pid 100" in strip(text))
    os.close(run.main)
    assert run.process.wait(LIMIT_S) == 0
    assert (tmp_path / "closed").exists()


def test_a_terminal_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "_CLOSE_S", 0.2)
    monkeypatch.setenv("TERM", "xterm-256color")
    reader, terminal = pty.openpty()
    stream = open(terminal, "w")  # noqa: SIM115
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=100, height=30))
    for i in range(2_000):
        display.say("a line that nobody reads " * 4)
        display.progress(0, 1, i, NewReports())
        display.output(0, "x" * 100 + "\n")
    display.close()
    assert display._thread is not None
    drain = threading.Thread(target=_read_all, args=(reader,), daemon=True)
    drain.start()  # now it takes everything, and the thread ends
    wait_for(lambda: not display._thread.is_alive(), "the display to end")
    stream.close()
    drain.join(LIMIT_S)
    os.close(reader)


def _read_all(fd: int) -> None:
    try:
        while os.read(fd, 1 << 16):
            pass
    except OSError:
        pass


def test_a_second_display_on_the_same_terminal_is_plain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LiveDisplay, "on_screen", True)
    monkeypatch.setenv("TERM", "xterm-256color")
    reader, terminal = pty.openpty()
    with open(terminal, "w") as stream:
        assert isinstance(make_display(stream), PlainDisplay)
    os.close(reader)


def test_a_bug_in_the_picture_turns_it_into_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Picture, "render", broken)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=100, height=30))
    display.say("before")
    assert display._thread is not None
    wait_for(lambda: not display._news, "the first line")
    display.say("after")
    display.close()
    told = capfd.readouterr().err
    assert "the live display ended (ZeroDivisionError('a bug')); plain lines from here on" in told
    assert "after" in told


def strip(text: str) -> str:
    """Without colours and cursor movements."""
    import re

    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
