"""A server that speaks S3, in a process of its own that ends with ours."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import urllib.request
from types import TracebackType

from processes import LIMIT_S

_SCRIPT = """
import logging, sys, threading
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.s3.responses import S3Response

# As S3 does it, and moto doesn't: of two that create one object at once, one is refused.
one_by_one, put_object = threading.Lock(), S3Response.put_object
def put_object_once(response):
    with one_by_one:
        return put_object(response)
S3Response.put_object = put_object_once

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
import os
os._exit(0)
"""


class S3Server:
    """``with S3Server() as server: server.bucket()``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Without the mark by which a test finds what it left over: this one outlives tests on purpose.
            env={name: value for name, value in os.environ.items() if name != "EVERSTEP_TEST_SESSION"},
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> S3Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._process.stdout.close()

    def bucket(self) -> str:
        """The name of a new bucket."""
        name = f"bucket-{secrets.token_hex(4)}"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        urllib.request.urlopen(request).close()
        return name

    def options(self, port: int | None = None) -> dict[str, str]:
        """``storage_options`` that lead here, or through a proxy in front of it."""
        return {
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
            "aws_endpoint": f"http://127.0.0.1:{port or self.port}",
            "allow_http": "true",
        }
