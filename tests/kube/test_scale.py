"""Many slices and three standing troubles: what heals elsewhere waits for none of them, at a known price."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.kube.conditions import stamp
from everstep.testing.kube import ApiServer
from kube.live import MERGE, Namespace, operating
from kube.test_backoff_of_objects import keeping
from kube.test_slices import cluster
from kube.world import group

HOSTS = 4
CHIP = "example.com/chip"


def refuse_chips(space: Namespace) -> None:
    """A quota for one chip. There is no controller here that would say what was used so far: nothing."""
    hard = {f"requests.{CHIP}": "1"}
    space.create(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "chips"}, "spec": {"hard": hard}}
    )
    path = f"/api/v1/namespaces/{space.name}/resourcequotas/chips/status"
    counted = {"hard": hard, "used": {f"requests.{CHIP}": "0"}}
    space.server.request("PATCH", path, {"status": counted}, MERGE)


def over_quota() -> dict[str, Any]:
    """A replica of two hosts, and the quota has room for one."""
    made = group("chips", 1, 2)
    made["template"]["spec"]["containers"][0]["resources"] = {"limits": {CHIP: "1"}}
    return made


@contextlib.contextmanager
def flapping(space: Namespace, pod: dict[str, Any]) -> Iterator[threading.Event]:
    """The Pod's node is silent and back, again and again. The event says that it has been so for a while."""
    node = f"{space.name}-node"
    space.server.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
    space.bind(pod, node)
    stop, flapped = threading.Event(), threading.Event()

    def flap() -> None:
        for turn in range(1_000_000):
            if stop.wait(0.2):
                return
            status = "Unknown" if turn % 2 == 0 else "True"
            ready = {"type": "Ready", "status": status, "lastTransitionTime": stamp(time.time())}
            path = f"/api/v1/nodes/{node}/status"
            space.server.request("PATCH", path, {"status": {"conditions": [ready]}}, MERGE)
            if turn == 10:
                flapped.set()

    thread = threading.Thread(target=flap)
    thread.start()
    try:
        yield flapped
    finally:
        stop.set()
        thread.join()
        space.server.request("DELETE", f"/api/v1/nodes/{node}")


def calls(space: Namespace) -> Counter[tuple[str, str]]:
    """What the operator has asked for, but for its lease and what it watches."""
    return Counter(
        (call["verb"], call["objectRef"]["resource"])
        for call in space.server.calls()
        if call.get("objectRef", {}).get("namespace") == space.name
        and call["objectRef"]["resource"] != "leases"
        and call["verb"] not in ("list", "watch")
    )


def replica(space: Namespace, index: int) -> list[dict[str, Any]]:
    """Asked for by its label: the server has thousands of others."""
    selector = f"ray.io/group%3Dtpu,ray.io/worker-group-replica-index%3D{index}"
    found: list[dict[str, Any]] = space.get(f"pods?labelSelector={selector}")["items"]
    return found


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


@pytest.mark.parametrize("size", [6, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_what_breaks_beside_standing_troubles_is_healed_at_its_own_price(
    server: ApiServer, tmp_path: Path, size: int
) -> None:
    space = Namespace(server)
    with (
        operating(server, tmp_path, "--namespace", space.name) as operator,
        keeping(space) as keeper,
        contextlib.ExitStack() as around,
    ):
        refuse_chips(space)
        space.create(cluster(group("tpu", size, HOSTS, maxReplicas=size), over_quota()))
        # Not by asking the server, which would have to look through thousands of Pods each time.
        operator.hear(f"creating replica {size - 1} of tpu")
        space.see(lambda: len(replica(space, size - 1)) == HOSTS, "the last slice")

        # A group is over its quota, one Pod fails and can't be deleted, a node flaps.
        [stuck, *_] = replica(space, 0)
        path = f"/api/v1/namespaces/{space.name}/pods/{stuck['metadata']['name']}"
        server.request("PATCH", path, {"metadata": {"labels": {keeper: "true"}}}, MERGE)
        space.say(stuck, phase="Failed")
        [on_the_node, *_] = replica(space, size - 1)
        flapped = around.enter_context(flapping(space, on_the_node))
        refused = f"the end of {stuck['metadata']['name']} is refused"
        space.see(lambda: operator.log.read_text().count(refused) >= 4, "some refusals")
        space.see(lambda: space.condition("ReplicaFailure").get("status") == "True", "the quota to be spent")
        space.see(flapped.is_set, "the node to have flapped")

        over = "replica 0 of chips is refused"
        troubled = Counter({text: operator.log.read_text().count(text) for text in (refused, over)})
        before, kept = calls(space), names(replica(space, size - 1))
        broken = range(1, 4)
        began = time.monotonic()
        for index in broken:
            gone = replica(space, index)
            space.delete_pod(gone[0])
            space.see(
                lambda index=index, gone=gone: (  # type: ignore[misc]
                    len(now := replica(space, index)) == HOSTS and not names(now) & names(gone)
                ),
                "the slice anew",
            )
        took = (time.monotonic() - began) / len(broken)
        spent = calls(space) - before
        print(f"{size} slices: healed in {took:.2f} s each; calls: {dict(spent)}")

        # Each of the two troubles may have had its turn meanwhile, and nobody has waited for it.
        def turns() -> tuple[int, int]:
            said = operator.log.read_text()
            return said.count(refused) - troubled[refused], said.count(over) - troubled[over]

        assert max(turns()) <= 1, "they didn't wait for the Pod that can't be deleted, nor for the quota"

        # A try of the two hosts of which the quota has room for one: that one is given back, a little later.
        def adds_up() -> bool:
            now, (tries, chips) = calls(space) - before, turns()
            pods, gone_already = HOSTS * len(broken), len(broken)
            return (now["create", "pods"], now["delete", "pods"]) == (
                pods + 2 * chips,
                pods - gone_already + tries + chips,
            )

        space.see(adds_up, "every call for a Pod to be one of these")
        tries, chips = turns()
        assert spent["create", "events"] + spent["patch", "events"] <= 2 * len(broken) + tries + chips
        assert spent["patch", "rayclusters"] <= 5 * len(broken) + tries + chips
        assert names(replica(space, size - 1)) == kept, "and the node's slice is where it was"
        space.server.request("PATCH", path, {"metadata": {"labels": {keeper: None}}}, MERGE)
