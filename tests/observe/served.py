"""A server of the page over runs that a test writes itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.synthetic import opened, write_journal
from everstep.control import commands as c
from everstep.journal import journal, records
from everstep.observe.run_cache import RunCache
from everstep.observe.server import PageServer

TOKEN = "a-token-of-the-test"


@contextlib.contextmanager
def serving(storage: Path) -> Iterator[PageServer]:
    server = PageServer(RunCache(str(storage), with_live=False), 0, TOKEN)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def write_live_run(storage: Path, name: str = "live") -> Path:
    """A run that nobody has closed. Its driver is on another machine, so nothing says that it is dead."""
    owned = msgspec.structs.replace(opened(1, name), lease=7)
    first = c.GroupStarted(5.0, 1, ((0, 0),), 1, 1, c.Rung.FIRST_START, "", None)
    placed = records.Placed(2.0, [records.Place(0, "host-0", "slice-0", 0)], [])
    write_journal(storage / name, iter([owned, placed, c.PhaseChanged(5.0, "running", 1), first]))
    return storage / name


def append(run: Path, *found: records.AnyRecord) -> None:
    """As its driver does: in the next object, whole at once."""
    folder = run / journal.FOLDER
    number = max(journal.numbers_in(file.name for file in folder.iterdir())) + 1
    temporary = run / "being written"
    temporary.write_bytes(b"".join(map(records.encode, found)))
    temporary.rename(folder / journal.key_of(number))


def ask(
    server: PageServer, path: str, body: Any = None, **headers: str | None
) -> tuple[int, dict[str, str], bytes]:
    """One request, with these headers besides or in place of the usual ones."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=600)
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    data = json.dumps(body) if body is not None else None
    try:
        connection.request("POST" if body is not None else "GET", path, data, given)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
