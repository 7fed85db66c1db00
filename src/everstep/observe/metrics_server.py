"""``RunConfig(metrics_port=…)``: ``/metrics`` over HTTP, while this process drives a run.

The port is opened before anything of the run starts, so that one that is in use is an error at once. One
thread answers one request after the other; it ends with the run, also in the middle of a request.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from everstep.config import RunConfig
from everstep.errors import ConfigError

if TYPE_CHECKING:
    from everstep.observe.prometheus import MetricsSource

_PATIENCE_S = 2.0
"""For a client that connects and says nothing."""


@contextlib.contextmanager
def metrics_server(config: RunConfig) -> Iterator[MetricsServer | None]:
    """Has the port from now on; ``serve`` begins to answer."""
    if config.metrics_port is None:
        yield None
        return
    _require_prometheus()
    server = _listening(config.metrics_host, config.metrics_port)
    try:
        yield server
    finally:
        server.close()


def _require_prometheus() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"RunConfig.metrics_port needs prometheus_client, which can't be imported here ({error}).",
            "Install it: pip install 'everstep[metrics]'; or leave metrics_port out.",
            "RunConfig.metrics_port",
        ) from error


def _listening(host: str, port: int) -> MetricsServer:
    try:
        return MetricsServer(host, port)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"RunConfig.metrics_host is {host!r}, which is no address of this machine "
                f"({error.strerror}).",
                "Leave it out for 127.0.0.1, or give 0.0.0.0 to be reached from other machines.",
                "RunConfig.metrics_host",
            ) from error
        raise ConfigError(
            f"RunConfig.metrics_port is {port}, and can't be listened on at {host} ({error.strerror}).",
            "Give another port, or 0 for any that is free (EVERSTEP_METRICS_PORT overrides it). If this very "
            "run has it, its driver still lives: see everstep ps.",
            "RunConfig.metrics_port",
        ) from error


class _HttpServer(HTTPServer):
    registry: Any = None
    current: socket.socket | None = None

    def __init__(self, host: str, port: int) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        self.socket.setblocking(False)  # a client that has hung up isn't waited for

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks DNS for a name that nobody needs

    def process_request(self, request: Any, client_address: Any) -> None:
        self.current = request
        try:
            super().process_request(request, client_address)
        finally:
            self.current = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's news."""


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    server_version = "everstep"
    sys_version = ""
    timeout = _PATIENCE_S

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Neither are requests."""

    def do_GET(self) -> None:
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        if self.path.partition("?")[0] != "/metrics":
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"there is /metrics here\n")
            return
        self._send(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self.server.registry))

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class MetricsServer:
    """Listens from when it is made; answers from ``serve`` to ``close``."""

    def __init__(self, host: str, port: int) -> None:
        self._http = _HttpServer(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._http.server_address[1]}/metrics"
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None

    def serve(self, source: MetricsSource) -> None:
        from prometheus_client import CollectorRegistry

        from everstep.observe.prometheus import RunCollector

        self._http.registry = CollectorRegistry()
        self._http.registry.register(RunCollector(source))
        self._thread = threading.Thread(target=self._answer, name="everstep-metrics", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._http, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    return
                self._http.handle_request()

    def close(self) -> None:
        self._wake.close()
        if self._thread is not None:
            while self._thread.is_alive():
                self._hang_up()
                self._thread.join(0.05)
        self._http.server_close()
        self._woken.close()

    def _hang_up(self) -> None:
        client = self._http.current
        if client is not None:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
