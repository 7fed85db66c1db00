"""``everstep ui`` over HTTP: what it answers, whom, and what it does for whom."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bench.synthetic import synthetic, write_journal
from everstep.journal import records
from everstep.journal.lease import stop_request
from everstep.observe.registry import LiveRun, LiveWorker, forget_run, publish_run
from everstep.observe.server import PageServer
from processes import wait_for

from .served import TOKEN, append, ask, serving, write_live_run


@pytest.fixture
def live(tmp_path: Path) -> Path:
    return write_live_run(tmp_path)


@pytest.fixture
def server(tmp_path: Path, live: Path) -> Iterator[PageServer]:
    with serving(tmp_path) as server:
        yield server


def test_it_lists_runs_and_shows_each(tmp_path: Path, server: PageServer) -> None:
    write_journal(tmp_path / "done", synthetic(8, 3))
    (tmp_path / "notes").mkdir()
    status, _, body = ask(server, "/api/runs")
    assert status == 200
    assert {(run["id"], run["state"]) for run in json.loads(body)["runs"]} == {
        ("done", "finished"),
        ("live", "running"),
    }
    status, _, body = ask(server, "/api/run?run=done")
    assert status == 200
    assert len(json.loads(body)["incidents"]) == 3


def test_the_page_is_refused_nothing_but_its_own_script(server: PageServer) -> None:
    status, headers, body = ask(server, "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-inline" not in policy
    assert TOKEN.encode() not in body
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_it_listens_on_loopback_alone(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "0.0.0.0", "", "[", "host-0"])
def test_a_name_that_points_here_gets_no_answer(server: PageServer, host: str) -> None:
    for path in ("/", "/api/runs", "/api/events"):
        status, _, body = ask(server, path, Host=host)
        assert (status, b"not as" in body) == (403, True)


@pytest.mark.parametrize("host", ["localhost:{}", "127.0.0.1:{}", "localhost:9", "[::1]:{}"])
def test_every_name_of_loopback_is_answered(server: PageServer, host: str) -> None:
    assert ask(server, "/api/runs", Host=host.format(server.server_port))[0] == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "https://127.0.0.1"]
)
def test_a_page_of_another_origin_is_refused_even_with_the_token(
    server: PageServer, live: Path, origin: str
) -> None:
    assert ask(server, "/api/runs", Origin=origin)[0] == 403
    status, _, _ = ask(server, "/api/stop", {"run": "live"}, Origin=origin, X_Everstep_Token=TOKEN)
    assert status == 403
    assert not (live / stop_request(7)).exists()


def test_a_page_of_another_site_may_link_here_and_nothing_else(server: PageServer) -> None:
    def asked(path: str, mode: str) -> int:
        return ask(server, path, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode=mode)[0]

    assert asked("/?run=live", "navigate") == 200
    assert asked("/api/runs", "navigate") == 403
    assert asked("/", "no-cors") == 403


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], f"{TOKEN} ", "ü"])
def test_nothing_is_stopped_or_killed_without_the_token(
    server: PageServer, live: Path, token: str | None
) -> None:
    for path in ("/api/stop", "/api/kill"):
        asked = {"run": "live", "kind": "rank", "which": "0", "signal": "KILL"}
        status, _, body = ask(server, path, asked, X_Everstep_Token=token)
        assert (status, b"everstep ui" in body) == (403, True)
    assert not (live / stop_request(7)).exists()


def test_with_the_token_a_run_is_asked_to_stop_as_by_the_command(server: PageServer, live: Path) -> None:
    origin = f"http://127.0.0.1:{server.server_port}"
    status, _, body = ask(server, "/api/stop", {"run": "live"}, Origin=origin, X_Everstep_Token=TOKEN)
    assert (status, "to stop live" in json.loads(body)["done"]) == (200, True)
    assert (live / stop_request(7)).exists()


def test_a_run_that_has_ended_says_so_when_it_is_asked_to_stop(server: PageServer, live: Path) -> None:
    append(live, records.Closed(9.0, "finished", "finished", None))
    status, _, body = ask(server, "/api/stop", {"run": "live"}, X_Everstep_Token=TOKEN)
    assert (status, json.loads(body)) == (409, {"error": "live has ended already: finished"})


def test_with_the_token_a_rank_is_killed(server: PageServer, live: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    publish_run(LiveRun("live", str(live), worker.pid, 1, [LiveWorker(0, worker.pid, "host-0", "slice-0")]))
    try:
        asked = {"run": "live", "kind": "rank", "which": "0", "signal": "KILL"}
        status, _, body = ask(server, "/api/kill", asked, X_Everstep_Token=TOKEN)
        assert (status, "killed rank 0 of live" in json.loads(body)["done"]) == (200, True)
        assert worker.wait() == -signal.SIGKILL
    finally:
        worker.kill()
        worker.wait()
        forget_run("live")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        [],
        {"run": "live"},
        {"run": "live", "kind": "rank", "which": "-1", "signal": "KILL"},
        {"run": "live", "kind": "rank", "which": "0", "signal": "SEGV"},
        {"run": "live", "kind": "process", "which": "1", "signal": "KILL"},
        {"run": 3, "kind": "rank", "which": "0", "signal": "KILL"},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(server: PageServer, asked: object) -> None:
    status, _, body = ask(server, "/api/kill", asked, X_Everstep_Token=TOKEN)
    assert (status, "error" in json.loads(body)) == (400, True)


@pytest.mark.parametrize("run", ["..", "../live", "%2e%2e", "/etc", "nobody", "", "live/journal"])
def test_only_runs_that_are_listed_can_be_asked_for(server: PageServer, run: str) -> None:
    assert ask(server, f"/api/run?run={run}")[0] in (404, 409)


def test_a_journal_of_another_version_is_an_error_of_that_run_alone(
    tmp_path: Path, server: PageServer
) -> None:
    newer = tmp_path / "newer" / "journal"
    newer.mkdir(parents=True)
    body = b"\x81\xa4type\xa6Future"
    (newer / "0000000001").write_bytes(struct.pack("<II", len(body), zlib.crc32(body)) + body)
    runs = {run["id"]: run for run in json.loads(ask(server, "/api/runs")[2])["runs"]}
    assert "newer Everstep" in runs["newer"]["error"]
    assert runs["live"]["state"] == "running"
    assert ask(server, "/api/run?run=newer")[0] == 409


def test_a_run_whose_journal_turns_out_unreadable_stays_so(server: PageServer, live: Path) -> None:
    assert ask(server, "/api/run?run=live")[0] == 200
    garbled = records.Committed(10.0, "first", 1, 3, msgspec.Raw(b"\x81\xa1\xff\x01"), None)
    append(live, garbled, records.Renewed(11.0))
    wait_for(lambda: ask(server, "/api/run?run=live")[0] == 409, "the look that finds it")
    append(live, records.Renewed(12.0))
    for _ in range(3):
        status, _, body = ask(server, "/api/run?run=live")
        assert (status, b"can't be read" in body) == (409, True)


def test_events_tell_when_something_is_new(server: PageServer, live: Path) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=600) as connection:
        connection.sendall(b"GET /api/events?run=live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream = connection.makefile("rb")
        lines = iter(stream.readline, b"")
        assert next(line for line in lines if line.startswith(b"event")) == b"event: changed\n"
        append(live, records.Renewed(20.0))
        assert next(line for line in lines if line.startswith(b"event")) == b"event: changed\n"


def test_the_command_prints_where_to_look_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    write_journal(tmp_path / "done", synthetic(2, 1))
    started = subprocess.Popen(
        [sys.executable, "-m", "everstep.cli.main", "ui", str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        said = next(line for line in started.stdout if line.startswith("open "))
        assert re.fullmatch(r"open http://127\.0\.0\.1:\d+/#token=[\w-]{20,}\n", said)
        started.send_signal(signal.SIGINT)
        assert started.wait() == 0
    finally:
        started.kill()
        started.wait()
