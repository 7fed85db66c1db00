"""How long the page of a large run takes: to be written, and to be there in Chromium, drawn."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.browser import Browser, find_chromium
from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.synthetic import synthetic, write_journal
from everstep.observe.page import static_page
from everstep.observe.view import RunView
from everstep.storage.store import open_store

TITLE = "the page of a large run"
ROUNDS, PEER_ROUNDS = 5, 0
WORKERS = 1_000

_DRAWN = """
location.protocol === 'file:' && document.readyState === 'complete'
&& document.querySelector('.list .row') !== null
"""


def measure(options: Options) -> Outcome:
    what = f"{WORKERS:,} workers, {options.incidents:,} incidents"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        write_journal(run, synthetic(WORKERS, options.incidents, options.seed))
        options.say("pages: the journal is written")
        began = time.monotonic()
        view = RunView(open_store(str(run)))
        view.refresh()
        page = Path(folder, "page.html")
        page.write_text(static_page(view.as_plain()), encoding="utf-8")
        written_s = time.monotonic() - began
        options.say(f"pages: the page is written, {page.stat().st_size / 1e6:.1f} MB")
        rows = [Row(f"everstep show --html: {what}", "s", Sample((written_s,)))]
        notes = [f"the file has {page.stat().st_size / 1e6:.1f} MB"]
        if find_chromium() is not None:
            rows.insert(0, Row(f"open the page: {what}", "s", Sample(_open(page, options.rounds))))
        else:
            notes.append("there is no Chromium here: the page was not opened")
    return Outcome("pages", TITLE, tuple(rows), tuple(notes))


def _open(file: Path, rounds: int) -> tuple[float, ...]:
    """From the navigation until the first frame with everything in sight drawn, in a fresh tab each time."""
    found = []
    with Browser() as browser:
        for _ in range(rounds):
            page = browser.open("about:blank")
            began = time.monotonic()
            page.send("Page.navigate", url=file.as_uri())
            page.wait_for(_DRAWN)
            page.frame()
            found.append(time.monotonic() - began)
            page.close()
    return tuple(found)
