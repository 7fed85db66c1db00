"""The page in a real browser: what it shows, by mouse and by keyboard, whatever its journal has in it."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.browser import Browser, Page, find_chromium
from bench.synthetic import WALL, opened, place, row, synthetic, write_journal
from everstep.control import commands as c
from everstep.control.budgets import Budget
from everstep.failures import Failure, Kind
from everstep.health.stragglers import Slowness
from everstep.journal import journal, records
from everstep.journal.lease import stop_request
from everstep.observe.page import static_page
from everstep.observe.registry import LiveRun, LiveWorker, forget_run, publish_run
from everstep.observe.view import RunView
from everstep.protocol.progress import Page as Memory, shared_memory
from everstep.storage.store import open_store
from nvml import GIB, UNKNOWN, Gpu, StandIn, without_compiler

from .served import TOKEN, append, serving, write_live_run

# Loud in CI: there it is installed (scripts/setup.sh).
pytestmark = pytest.mark.skipif(
    find_chromium() is None and not os.environ.get("EVERSTEP_CI"), reason="there is no Chromium here"
)
EVIL = "<img src=x onerror='window.broken = 1'><script>window.broken = 1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def pages(browser: Browser) -> Iterator[list[Page]]:
    """Those that a test opens are closed, and have complained of nothing."""
    found: list[Page] = []
    yield found
    for page in found:
        assert page.errors() == []
        page.close()


def write_page(run: Path) -> Path:
    view = RunView(open_store(str(run)))
    view.refresh()
    file = run.with_suffix(".html")
    file.write_text(static_page(view.as_plain()), encoding="utf-8")
    return file


@pytest.fixture
def show(tmp_path: Path, browser: Browser, pages: list[Page]) -> Any:
    """The page of a run with this journal, as a file."""

    def show(*found: records.AnyRecord, **options: Any) -> Page:
        write_journal(tmp_path / "run", iter(found))
        pages.append(browser.open(write_page(tmp_path / "run").as_uri(), **options))
        pages[-1].frame()
        return pages[-1]

    return show


def text_of(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({selector!r}).innerText"))


def count(page: Page, selector: str) -> int:
    return int(page.run(f"document.querySelectorAll({selector!r}).length"))


def focus(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).focus()")


# ---------------------------------------------------------------------- one file


def test_a_file_shows_its_run_and_asks_for_nothing_else(show: Any) -> None:
    page = show(*synthetic(8, 3))
    said = text_of(page, "main")
    for wanted in ("synthetic", "finished", "goodput", "3 incidents", "checkpoint_000003", "restart"):
        assert wanted in said
    assert [address.split(":")[0] for address in page.requests()] == ["file"]


def test_dark_and_light_follow_the_system(show: Any, browser: Browser, pages: list[Page]) -> None:
    light = show(*synthetic(2, 1))
    pages.append(browser.open(light.run("location.href"), dark=True))
    back = "getComputedStyle(document.body).backgroundColor"
    assert light.run(back) == "rgb(255, 255, 255)"
    assert pages[-1].run(back) == "rgb(20, 23, 27)"


def test_a_click_on_an_incident_in_the_timeline_opens_it(show: Any) -> None:
    *records_of_run, ended = synthetic(8, 1)
    page = show(*records_of_run, ended)
    incident = next(r for r in records_of_run if isinstance(r, c.RecoveryDecided))
    # A rank's lane begins where labels end; 14 pixels are left at the right.
    began, end = incident.cause.at, ended.at  # type: ignore[union-attr]
    box = page.run(
        "(({x, y, width}) => [x, y, width])(document.querySelector('.axis').getBoundingClientRect())"
    )
    page.click(box[0] + 160 + began / end * (box[2] - 160 - 14), box[1] + 32)
    page.wait_for("document.querySelector('.details h3') !== null")
    assert incident.cause.message in text_of(page, ".details h3")
    assert "Recovered in 11 s" in text_of(page, ".details")


def test_the_timeline_goes_from_incident_to_incident_by_keyboard(show: Any) -> None:
    page = show(*synthetic(8, 3))
    focus(page, ".lanes")
    for _ in range(2):
        page.press("ArrowRight")
    assert text_of(page, "#said").startswith("Incident 2 of 3: ")
    page.press("Enter")
    assert page.run("document.activeElement.className") == "details"
    assert "Recovered in" in text_of(page, ".details")
    page.press("Escape")
    assert page.run("document.activeElement.className") == "lanes"


def test_the_timeline_zooms_and_moves_by_keyboard(show: Any) -> None:
    page = show(*synthetic(4, 2))
    shown = "document.querySelector('.tools .muted').textContent"
    whole = page.run(shown)
    focus(page, ".lanes")
    page.press("+")
    page.frame()
    closer = page.run(shown)
    page.press("ArrowRight", shift=True)
    page.frame()
    assert len({whole, closer, page.run(shown)}) == 3
    page.press("0")
    page.frame()
    assert page.run(shown) == whole


def test_the_list_of_incidents_is_walked_and_filtered_by_keyboard(show: Any) -> None:
    page = show(*synthetic(8, 40))
    focus(page, ".list")
    page.press("End")
    page.press("Enter")
    last = text_of(page, ".details h3")
    assert (
        page.run("document.querySelector('.list [aria-selected=true]').getAttribute('aria-posinset')") == "40"
    )
    page.press("Escape")
    assert page.run("document.activeElement.className") == "list"
    page.run("(() => { const box = document.querySelector('[type=search]'); box.focus(); })()")
    page.type("hang")
    assert " of 40 incidents" in text_of(page, ".tools ~ .tools, section[aria-label=Incidents] .tools")
    kinds = page.run("[...document.querySelectorAll('.list .kind')].map((each) => each.textContent)")
    assert {*kinds} == {"hang"}
    assert last


def test_an_incident_shows_its_traceback_and_its_stacks(show: Any, tmp_path: Path) -> None:
    (tmp_path / "run" / "hangs").mkdir(parents=True)
    (tmp_path / "run" / "hangs" / "1.txt").write_text("=== rank 1 (the others wait for this)\nat train.py:31")
    hang = Failure(Kind.HANG, 10.0, "no progress for 25 s", rank=1, traceback="Traceback: here")
    page = show(
        opened(2),
        records.Placed(1.0, [place(0), place(1)], []),
        c.PhaseChanged(5.0, "running", 1),
        c.HangSeen(20.0, 1, (1,), "no progress for 25 s", "hangs/1.txt", "restart"),
        c.FailureSeen(20.0, hang),
        c.RecoveryDecided(20.5, hang, Budget.FAILURES, 1, 3, (), 0.0),
    )
    page.run("document.querySelector('.list .row').click()")
    said = text_of(page, ".details")
    for wanted in ("Traceback: here", "at train.py:31", "hangs/1.txt", "max_failures: 1 of 3", "rank 1"):
        assert wanted in said


def test_a_straggler_is_drawn_in_its_lane_and_in_the_legend(show: Any) -> None:
    slow = records.StragglerSeen(20.0, 1, (1,), "host-0", Slowness.DATA, 0.3)
    page = show(
        opened(2),
        records.Placed(1.0, [place(0), place(1)], []),
        c.PhaseChanged(5.0, "running", 1),
        slow,
        msgspec.structs.replace(slow, at=40.0, over="recovered"),
        records.Renewed(60.0),
    )
    assert "a rank becomes slow" in text_of(page, ".legend")
    page.run("document.querySelector('.list .row').click()")
    assert "30 % slower than its peers: waiting for data" in text_of(page, ".list")
    assert "over: it recovered" in text_of(page, ".details")


def test_the_band_below_the_timeline_shows_where_the_time_went_over_time(show: Any) -> None:
    page = show(
        opened(2),
        records.Placed(1.0, [place(0), place(1)], []),
        c.PhaseChanged(20.0, "running", 1),
        c.GroupStarted(20.0, 1, ((0, 0),), 2, 1, c.Rung.FIRST_START, "", None),
        c.PhaseChanged(80.0, "waiting", 1),
        records.Closed(100.0, "stopped", "", None),
    )
    page.frame()

    def colour_at(share: float) -> list[int]:
        """In the middle of the band, at this share of the run."""
        return list(
            page.run(
                "(() => { const band = document.querySelector('.band');"
                " const sharp = band.width / band.clientWidth;"
                f" const x = 160 + {share} * (band.clientWidth - 174);"
                " return [...band.getContext('2d').getImageData(x * sharp, 23 * sharp, 1, 1).data]; })()"
            )
        )

    def painted(name: str) -> list[int]:
        text = page.run(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
        return [int(text[at : at + 2], 16) for at in (1, 3, 5)] + [255]

    assert colour_at(0.1) == painted("restarting")
    assert colour_at(0.5) == painted("training")
    assert colour_at(0.9) == painted("waiting")


def test_curves_show_what_was_redone_and_what_was_no_number(show: Any) -> None:
    page = show(
        opened(1),
        c.PhaseChanged(5.0, "running", 1),
        records.Metrics(1, 1, [row(loss=value) for value in (5.0, 4.0, math.nan, 3.0)]),
        records.Committed(10.0, "first", 1, 2, row(loss=4.0), None),
        c.GroupStarted(23.0, 2, ((0, 0),), 1, 1, c.Rung.RESTART_IN_PLACE, "", "first"),
        records.Metrics(2, 1, [row(loss=value) for value in (3.5, 3.0)]),
    )
    page.run("document.querySelector('figure').scrollIntoView()")
    page.wait_for("document.querySelector('figure svg') !== null")
    assert (count(page, "figure .curve.redone"), count(page, "figure .strange")) == (1, 1)
    assert "2 reports were done again" in text_of(page, "main")
    focus(page, "figure")
    page.press("ArrowRight")
    assert "report 1: 5" in text_of(page, "figcaption")


# ---------------------------------------------------------------------- whatever a journal has


def test_nothing_in_a_journal_becomes_markup_or_runs(show: Any) -> None:
    failure = Failure(Kind.EXCEPTION, 9.0, EVIL, 0, EVIL, traceback=EVIL, log_tail=EVIL, log_path=EVIL)
    page = show(
        opened(1, name=EVIL),
        records.Placed(1.0, [records.Place(0, EVIL, EVIL, 0)], []),
        c.PhaseChanged(5.0, "running", 1),
        records.Metrics(1, 1, [row(**{EVIL: 1.0, "__proto__": 2.0, "constructor": 3.0})]),
        records.Committed(8.0, EVIL, 1, 1, row(**{EVIL: EVIL}), EVIL),
        c.FailureSeen(10.0, failure),
        c.RecoveryDecided(11.0, failure, Budget.FAILURES, 1, 3, (), 0.0),
        c.HangSeen(12.0, 1, (0,), EVIL, EVIL, "warn"),
        records.Closed(20.0, EVIL, EVIL, None),
    )
    for place_in_list in range(2):
        page.run(f"document.querySelectorAll('.list .row')[{place_in_list}].click()")
        page.frame()
    page.run("document.querySelector('figure').scrollIntoView()")
    page.wait_for("document.querySelectorAll('figure svg').length === 3")
    assert page.run("window.broken") is None
    assert (count(page, "img"), count(page, "main script")) == (0, 0)
    assert page.run("document.querySelector('h1').textContent") == EVIL


def test_even_markup_that_got_into_the_page_would_not_run(show: Any) -> None:
    page = show(*synthetic(2, 1))
    page.run("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror='window.broken = 1'>`)")
    page.run(
        "(() => { const added = document.createElement('script'); added.textContent = 'window.broken = 1'; "
        "document.body.append(added); })()"
    )
    page.frame()
    assert page.run("window.broken") is None
    # The browser says that it refused them: these complaints are wanted.
    page._browser.events.clear()


def test_a_damaged_journal_is_named_and_the_rest_is_shown(
    tmp_path: Path, browser: Browser, pages: list[Page]
) -> None:
    write_journal(tmp_path / "run", synthetic(4, 200))
    (tmp_path / "run" / journal.FOLDER / journal.key_of(2)).write_bytes(b"\0" * 64)
    pages.append(browser.open(write_page(tmp_path / "run").as_uri()))
    assert "The journal is damaged" in text_of(pages[-1], ".alert")
    assert "incidents" in text_of(pages[-1], "main")


def test_a_run_that_has_hardly_begun_has_a_page(show: Any) -> None:
    said = text_of(show(opened(4)), "main")
    for wanted in (
        "Nothing has gone wrong so far",
        "Nothing has been reported so far",
        "There is none so far",
    ):
        assert wanted in said


def test_of_thousands_of_incidents_only_those_in_sight_are_elements(show: Any) -> None:
    page = show(*synthetic(200, 1_000))
    assert "1,000 incidents" in text_of(page, "main")
    assert count(page, ".list .row") < 60
    assert count(page, "canvas") < 20
    focus(page, ".list")
    page.press("End")
    page.press("Enter")
    assert "Recovered in" in text_of(page, ".details")


# ---------------------------------------------------------------------- live


def test_the_list_of_runs_leads_to_a_run_that_grows_while_it_is_looked_at(
    tmp_path: Path, browser: Browser, pages: list[Page]
) -> None:
    live = write_live_run(tmp_path)
    with serving(tmp_path) as server:
        pages.append(browser.open(server.address))
        page = pages[-1]
        page.wait_for("document.querySelector('td a') !== null")
        page.run("document.querySelector('td a').click()")
        page.wait_for("document.querySelector('.facts') !== null")
        assert "Nothing has gone wrong so far" in text_of(page, ".details")
        failure = Failure(Kind.SIGNAL, WALL, "killed by SIGKILL", rank=0)
        append(live, c.FailureSeen(20.0, failure))
        page.wait_for("document.querySelector('.list .row') !== null")
        assert "killed by SIGKILL" in text_of(page, ".list")
        append(live, records.Closed(30.0, "failed", "rank 0 was killed", None))
        page.wait_for("document.querySelector('.badge').textContent.includes('failed')")
        assert "First cause: rank 0 was killed" in text_of(page, ".alert")


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own, with one worker's progress. This one may have others' open."""
    memory = Memory(shared_memory())
    with subprocess.Popen(["sleep", "infinity"], pass_fds=[memory.fd]) as process:
        yield process
        process.kill()
    memory.close()


def test_a_live_run_shows_what_its_workers_use(
    tmp_path: Path, browser: Browser, pages: list[Page], worker: subprocess.Popen[bytes]
) -> None:
    live = write_live_run(tmp_path)
    here = LiveWorker(0, worker.pid, "host-0", "slice-0", note="30 % slower than its peers: computing")
    publish_run(LiveRun("live", str(live), os.getpid(), 1, [here]))
    try:
        with serving(tmp_path) as server:
            pages.append(browser.open(f"{server.address}?run=live"))
            page = pages[-1]
            page.wait_for("document.querySelector('.workers td') !== null")
            assert "start, 30 % slower than its peers: computing" in text_of(page, ".workers")
            assert "GiB" in text_of(page, ".workers")
            append(live, records.Closed(30.0, "failed", "rank 0 was killed", None))
            page.wait_for("document.querySelector('section[aria-label=\"Workers now\"]').hidden")
    finally:
        forget_run("live")


@without_compiler
def test_a_live_run_shows_the_gpus_that_its_workers_use(
    tmp_path: Path, browser: Browser, pages: list[Page], worker: subprocess.Popen[bytes]
) -> None:
    nvml = StandIn(tmp_path / "nvml")
    live = write_live_run(tmp_path / "runs")
    publish_run(LiveRun("live", str(live), os.getpid(), 1, [LiveWorker(0, worker.pid, "host-0", "slice-0")]))
    try:
        with nvml.in_this_process(), serving(tmp_path / "runs") as server:
            pages.append(browser.open(f"{server.address}?run=live"))
            page = pages[-1]
            page.wait_for("document.querySelector('.workers td') !== null")
            assert "GPU" not in text_of(page, ".workers"), "it uses none"
            nvml.reports(Gpu(97, [(worker.pid, 70 * GIB, 97)]), Gpu(60, [(worker.pid, GIB, 60)]))
            page.wait_for("document.querySelectorAll('.workers td').length === 10")
            assert text_of(page, ".workers tr").split("\t")[-2:] == ["GPUs", "GPU memory"]
            assert text_of(page, ".workers tbody tr").split("\t")[-2:] == ["157.0 %", "71.00 GiB"]
            nvml.reports(Gpu(97, [(worker.pid, UNKNOWN, 97), (worker.pid + 1, UNKNOWN, 0)]), rates=3)
            page.wait_for("document.querySelector('.workers td:last-child').textContent === '?'")
    finally:
        forget_run("live")


def test_a_run_is_stopped_from_the_page_with_the_token_of_its_address(
    tmp_path: Path, browser: Browser, pages: list[Page]
) -> None:
    live = write_live_run(tmp_path)
    with serving(tmp_path) as server:
        pages.append(browser.open(f"{server.address}?run=live#token={TOKEN}"))
        page = pages[-1]
        page.wait_for("document.querySelector('.facts') !== null")
        assert TOKEN not in page.run("location.href")
        page.run("document.querySelector('button').click()")
        page.wait_for("document.querySelector('dialog[open]') !== null")
        assert not (live / stop_request(7)).exists()
        page.run("document.querySelector('dialog [type=submit]').click()")
        page.wait_for("document.querySelector('dialog [role=status]').textContent.includes('to stop live')")
        assert (live / stop_request(7)).exists()
