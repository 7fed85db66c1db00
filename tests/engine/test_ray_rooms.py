"""Rooms of the Ray engine that need no cluster: repeated work, and which nodes are on their way."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from everstep.engine.ray.cluster import Node
from everstep.engine.ray.upkeep import keep_doing
from everstep.engine.ray.watch import ClusterState, ClusterWatch
from everstep.topology.wanted import Wanted

WANTED = Wanted({"TPU": 4}, topology="2x4", accelerator_type="TPU-V6E")


def test_what_is_kept_doing_survives_its_failures_and_says_so_once_each_time() -> None:
    outcomes: list[Exception | None] = [
        None, OSError("away\nfor a while"), KeyError("x"), None, ValueError(), None,
    ]  # fmt: skip
    said: list[str] = []

    async def look() -> None:
        outcome = outcomes.pop(0)
        if not outcomes:
            raise asyncio.CancelledError
        if outcome is not None:
            raise outcome

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(keep_doing("looking", look, lambda: 0.0, said.append))
    assert said == [
        "looking failed (OSError: for a while); it is tried again",
        "looking works again",
        "looking failed (ValueError); it is tried again",
    ]


def node(slice_name: str, index: int, number: str = "", alive: bool = True) -> Node:
    labels = {
        "ray.io/tpu-slice-name": slice_name,
        "ray.io/tpu-worker-id": str(index),
        "ray.io/tpu-topology": "2x4",
        "ray.io/accelerator-type": "TPU-V6E",
    }
    return Node(f"{slice_name}/{index}{number}", "10.0.0.1", alive, labels, {"TPU": 4.0})


def look(*nodes: Node) -> ClusterState:
    return ClusterState(list(nodes), {n.id: dict(n.total) for n in nodes}, {}, {})


def test_hosts_are_on_their_way_until_their_slice_is_whole_and_never_after() -> None:
    watch = ClusterWatch(WANTED)
    watch.take(look(node("a", 0), node("b", 1)), [])
    assert watch.arriving() == {"a/0", "b/1"}
    watch.take(look(node("a", 0), node("a", 1), node("b", 1)), [])
    assert watch.arriving() == {"b/1"}
    watch.take(look(node("a", 0), node("a", 1, alive=False), node("b", 1)), [])
    assert watch.arriving() == {"b/1"}, "what is left of a broken slice waits for nobody"
    watch.take(look(node("a", 0, "new"), node("b", 1)), [])
    assert watch.arriving() == {"a/0new", "b/1"}


def test_hosts_that_others_use_are_not_on_their_way() -> None:
    watch = ClusterWatch(WANTED)
    there = node("a", 0)
    watch.take(ClusterState([there], {there.id: {"TPU": 0.0}}, {}, {}), [])
    assert watch.arriving() == set()


@pytest.mark.parametrize("first", ["import ray", ""], ids=["imported before", "imported later"])
def test_ray_in_a_worker_joins_through_the_workers_own_node(first: str) -> None:
    script = (
        f"{first}\n"
        "from everstep.agent import raynode\n"
        "raynode.join_through('abc')\n"
        "import ray\n"
        "from ray._private import services\n"
        "print(services.find_node_ids(), services.__spec__.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "{'abc'} ray._private.services", done.stderr
