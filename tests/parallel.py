"""How tests are shared out among processes (``pytest -n 7``, or ``-n auto`` as ``make test`` has it).

Each process has folders, ports, clusters and a mark of its own, so any two tests may run side by side. This
is about time and memory: tests that share something costly run in one process, and long ones begin first.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROWS = (
    # One Ray cluster for each of these two, one API server for each of those. No more at once: clusters are
    # what loads a machine most, and some of their own limits are seconds.
    ("e2e/ray/test_reserving.py", "e2e/ray/test_driver_deaths.py", "e2e/ray/test_slices.py"),
    ("e2e/ray/", "kube/test_chain.py"),
    ("kube/test_life.py", "kube/test_autoscaler.py", "kube/test_outages.py"),
    ("kube/",),
    # A server that speaks S3.
    ("storage/",),
)
"""Tests whose names begin so run in one process, one after the other. So do those of a file that has a
fixture for all of it.
"""

LONG = (
    "sim/test_schedules.py::test_a_fixed_set",
    "e2e/test_demo.py",
    "e2e/test_examples.py",
    "parity/",
    "chaos/",
    "backend/",
    "e2e/test_replica_groups.py",
    "e2e/test_worker_deaths.py",
    "e2e/",
    "bench/",
    "cli/",
)
"""And of the others, these come first."""


def row_of(nodeid: str) -> str | None:
    name = nodeid.removeprefix("tests/")
    row = next((row[0] for row in ROWS if name.startswith(row)), None)
    file = name.partition("::")[0]
    return row or (file if _shares_a_fixture(file) else None)


@functools.cache
def _shares_a_fixture(file: str) -> bool:
    return '(scope="module"' in (Path(__file__).parent / file).read_text()


def turn(nodeid: str) -> int:
    name = nodeid.removeprefix("tests/")
    order = [*(start for row in ROWS for start in row), *LONG]
    return next((n for n, start in enumerate(order) if name.startswith(start)), len(order))


class Rows(LoadScopeScheduling):  # type: ignore[misc]
    """A row goes to one process, any other test to whichever is free."""

    def _split_scope(self, nodeid: str) -> str:
        return row_of(nodeid) or nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Rows:
    config.option.loadscopereorder = False
    return Rows(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More processes than cores, since tests mostly wait. None for a few tests: they are done before more
    processes have started.
    """
    chosen = config.option.keyword or config.option.lf or config.args_source is config.ArgsSource.ARGS
    return 0 if chosen else 3 * (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports and items make millions of objects that stay, in each process: looking for garbage among them
    is a fifth of the time now, and as much again at every look later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: turn(item.nodeid))
