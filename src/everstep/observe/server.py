"""``everstep ui``: the page over HTTP, for this machine alone.

It listens on loopback. A request must name loopback as its host, so that no name that a stranger's DNS points
here gets an answer; and where a browser says from which page it comes, that must be ours. Requests that
change something need the token as well, which only the user who started this has seen.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from everstep.errors import EverstepError
from everstep.observe import actions
from everstep.observe.page import as_json, live_page, policy
from everstep.observe.run_cache import CachedRun, RunCache
from everstep.process import kernel

LOOPBACK = "127.0.0.1"
_NAMES = {"127.0.0.1", "localhost", "::1"}
_POLL_S = 0.5
_USAGE_S = 2.0
"""Seconds between two events about what workers use."""
_QUIET_S = 15.0
"""Without news, something is sent this often, so that a browser that is gone is noticed."""
_PAUSE = 5
"""A browser is not asked to load a page again for this many times as long as it takes to put it together."""
_MOST_BYTES = 4096


class RefusedRequest(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class PageServer(ThreadingHTTPServer):
    """``serve_forever`` in a thread; ``close`` from any other."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, runs: RunCache, port: int, token: str | None = None) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.runs = runs
        self.token = token or secrets.token_urlsafe(24)
        self.closing = threading.Event()

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def close(self) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "everstep"
    sys_version = ""
    timeout = 60.0
    """For a client that connects and says nothing."""

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Requests are nobody's news."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, act: Any) -> None:
        try:
            self._check_origin()
            act()
        except RefusedRequest as error:
            self._send_error(error.status, str(error))
        except EverstepError as error:
            self._send_error(HTTPStatus.CONFLICT, str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # it went away

    # ------------------------------------------------------------------ who asks

    def _check_origin(self) -> None:
        host = self.headers.get("Host", "")
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = None
        if name not in _NAMES:
            raise RefusedRequest(
                HTTPStatus.FORBIDDEN, f"this page answers as {LOOPBACK} and localhost, not as {host!r}"
            )
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise RefusedRequest(HTTPStatus.FORBIDDEN, f"a page of {origin} may not ask this")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            # A link from elsewhere may open the page, and nothing but the page.
            is_link = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.path.split("?")[0] == "/"
            if not is_link or self.command != "GET":
                raise RefusedRequest(HTTPStatus.FORBIDDEN, "a page of another site may not ask this")

    def _check_token(self) -> None:
        given = self.headers.get("X-Everstep-Token", "")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise RefusedRequest(
                HTTPStatus.FORBIDDEN, "wrong token: take the one that `everstep ui` printed when it started"
            )

    # ------------------------------------------------------------------ reading

    def _get(self) -> None:
        asked = urlsplit(self.path)
        run = parse_qs(asked.query).get("run", [None])[0]
        match asked.path:
            case "/":
                self._send("text/html; charset=utf-8", live_page().encode())
            case "/api/runs":
                self._send("application/json", self.server.runs.page())
            case "/api/run" if run is not None:
                self._send("application/json", self.server.runs.run(run).page())
            case "/api/events":
                self._stream(self.server.runs.run(run) if run is not None else self.server.runs)
            case _:
                raise RefusedRequest(HTTPStatus.NOT_FOUND, f"there is no {asked.path} here")

    def _stream(self, what: CachedRun | RunCache) -> None:
        """Send an event whenever something is new, as long as the browser listens."""
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        sent: object = None
        quiet_s = 0.0
        unused_s = _USAGE_S
        pause_s = 0.0
        while not self.server.closing.wait(max(_POLL_S, pause_s) if sent is not None else 0.0):
            version = what.version()
            quiet_s += _POLL_S
            unused_s += _POLL_S
            if isinstance(what, CachedRun) and unused_s >= _USAGE_S and (used := what.usage()):
                self.wfile.write(b"event: usage\ndata: " + used + b"\n\n")
                unused_s = 0.0
            pause_s = 0.0
            if version != sent:
                self.wfile.write(b"event: changed\ndata: {}\n\n")
                sent, quiet_s = version, 0.0
                pause_s = _PAUSE * what.cost_s if isinstance(what, CachedRun) else 0.0
            elif quiet_s >= _QUIET_S:
                self.wfile.write(b": still here\n\n")
                quiet_s = 0.0

    # ------------------------------------------------------------------ what changes something

    def _post(self) -> None:
        # Before anything is read from it.
        self._check_token()
        asked = self._body()
        cached = self.server.runs.run(_text(asked, "run"))
        match self.path:
            case "/api/stop":
                done = cached.stop()
            case "/api/kill":
                done = _kill(cached, asked)
            case _:
                raise RefusedRequest(HTTPStatus.NOT_FOUND, f"there is no {self.path} here")
        self._send("application/json", as_json({"done": done}).encode())

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, f"a request has 1 to {_MOST_BYTES} bytes")
        try:
            asked = json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, f"a request is JSON: {error}") from error
        if not isinstance(asked, dict):
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, "a request is a JSON object")
        return asked

    # ------------------------------------------------------------------ answering

    def _send(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self._send_headers(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_headers(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", f"{policy(connect=True)}; frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        self.close_connection = True  # what it sent besides is not read
        self._send("application/json", as_json({"error": message}).encode(), status)


def _kill(cached: CachedRun, asked: dict[str, Any]) -> str:
    which, name = _text(asked, "which"), _text(asked, "signal")
    if name not in kernel.SENDABLE:
        raise RefusedRequest(
            HTTPStatus.BAD_REQUEST, f"signal is {name!r}, expected {', '.join(kernel.SENDABLE)}"
        )
    match _text(asked, "kind"):
        case "rank" if which.isdecimal():
            return actions.signal_rank(cached.live(), int(which), name)
        case "host":
            return actions.signal_host(cached.live(), which, name)
        case "slice":
            return "; ".join(actions.signal_slice(cached.live(), which, name))
        case kind:
            raise RefusedRequest(
                HTTPStatus.BAD_REQUEST, f"{kind} {which!r}: expected a rank's number, a host or a slice"
            )


def _text(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, f"{name} is {value!r}, expected text")
    return value
