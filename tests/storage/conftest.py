"""Stores to test on: a folder, this process's memory, and a server that speaks S3."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.storage.store import Limits, Store, open_store
from storage.faults import FaultyProxy
from storage.server import S3Server

QUICK = Limits(operation_s=5.0, answer_s=0.5, piece_s=1.0)
"""For tests that wait for a stalled connection."""


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    if request.param == "memory":
        return open_store(f"memory://{secrets.token_hex(8)}/some/prefix")
    server: S3Server = request.getfixturevalue("server")
    return open_store(f"s3://{server.bucket()}/some/prefix", server.options())


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.port) as running:
        yield running


@pytest.fixture
def faulty(server: S3Server, proxy: FaultyProxy) -> Store:
    """A store behind ``proxy``."""
    return open_store(f"s3://{server.bucket()}/run", server.options(proxy.port), QUICK)


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, contents: bytes) -> Path:
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
        return path

    return make
