"""One Ray cluster for all tests here; nodes come and go with each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from processes import ours, wait_for

from .cluster import RUNNING, RayCluster, everstep_actors, everstep_groups


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    try:
        cluster.connect()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(ray_cluster: RayCluster) -> Iterator[RayCluster]:
    """The cluster, without any host; and nothing of ours in it after the test."""
    yield ray_cluster
    while RUNNING:
        RUNNING.pop().abandon()
    try:
        wait_for(lambda: not everstep_actors(), f"the end of {everstep_actors()}")
        wait_for(lambda: not everstep_groups(), f"the end of {everstep_groups()}")
    finally:
        ray_cluster.clear()


@pytest.fixture(autouse=True)
def nothing_is_left_over() -> Iterator[None]:
    """Of Ray's own processes we can't tell; of ours none may be left."""
    yield

    def left() -> list[str]:
        return [command for command in ours().values() if "everstep.agent" in command]

    wait_for(lambda: not left(), "the end of our agents, templates and workers")
    assert not left()
