"""A real API server for all of these tests, and an operator in a process of its own for each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from everstep.testing.kube import ApiServer, NoApiServer, find_programs

try:
    # Found before the tests get a cache of their own.
    os.environ["KUBEBUILDER_ASSETS"] = str(find_programs())
    MISSING = ""
except NoApiServer as error:
    MISSING = str(error)


@pytest.fixture(scope="package", autouse=True)
def _warm() -> Iterator[None]:
    from kube.quick import warm

    with warm():
        yield


@pytest.fixture(scope="session")
def programs() -> None:
    """For tests that start an API server of their own."""
    if MISSING:
        assert not os.environ.get("EVERSTEP_CI"), MISSING
        pytest.skip(MISSING)


@pytest.fixture(scope="package")
def server(programs: None) -> Iterator[ApiServer]:
    from kube.live import install

    with ApiServer() as server:
        install(server)
        yield server


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For Ray, whose sockets lie deep in it."""
    with tempfile.TemporaryDirectory(prefix="evk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
