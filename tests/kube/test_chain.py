"""The whole chain on one machine: kubectl, the operator, a kubelet, real Ray nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.testing.kube import ApiServer, ProcessKubelet, ray_cluster, ray_group
from kube.live import Namespace, operating
from processes import LIMIT_S

_NODES = """
import json, ray, sys
# Beside the head, whose node stays.
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[1].partition(":")[0], log_to_driver=False)
for line in sys.stdin:
    nodes = [[n["Labels"], n["Resources"]] for n in ray.nodes() if n["Alive"]]
    print("nodes", json.dumps(nodes), flush=True)
"""


class Driver:
    """Something that is connected to the Ray cluster, and says which nodes there are."""

    def __init__(self, address: str, home: Path) -> None:
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": str(home)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NODES, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def slices(self) -> list[tuple[str, str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        # Ray, too, says things.
        line = next((line for line in self._process.stdout if line.startswith("nodes ")), None)
        assert line is not None, f"the driver ended with {self._process.wait(LIMIT_S)}"
        nodes: list[Any] = json.loads(line.removeprefix("nodes "))
        return sorted(
            (labels["ray.io/tpu-slice-name"], labels["ray.io/tpu-worker-id"])
            for labels, resources in nodes
            if resources.get("TPU") == 4
        )

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("programs")
def test_from_kubectl_apply_to_elastic_training_and_back() -> None:
    """The example, as `make demo-kube` runs it, with an API server of its own: a Pod that is deleted, and a
    node that is about to be terminated.
    """
    example = Path(__file__).parents[2] / "examples" / "slices_on_kubernetes.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    seen = [line for line in done.stdout.splitlines() if "SLICES" in line or "step" in line]
    told = (
        "4 workers on 2 slices",
        "2 workers: training goes on",
        "replaced whole, 2 new Pods",
        "4 workers again",
        "slice 1 has moved",
        "were made once each",
        "trained",
    )
    assert [word for word in told if any(word in line for line in seen)] == list(told), done.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_slices_of_real_ray_nodes_are_replaced_whole(
    server: ApiServer, tmp_path: Path, short_folder: str
) -> None:
    space = Namespace(server)
    selector = {
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    }
    tpus = ray_group("tpu", 2, 2, selector, resources={"CPU": "1", "TPU": "4"})
    see = space.see
    whole = [("tpu-0", "0"), ("tpu-0", "1"), ("tpu-1", "0"), ("tpu-1", "1")]
    # A node for each Pod, so that one that is lost takes one Pod along.
    kubelets = ProcessKubelet(server, [f"node-{n}" for n in range(12)], space.name)
    with kubelets as kubelet, operating(server, tmp_path, "--namespace", space.name):
        made = ray_cluster(short_folder, tpus)
        space.create(made)
        see(lambda: space.status().get("slices") == "2/2", "two slices of real Ray nodes")
        [head] = space.pods(group="headgroup")
        port = made["spec"]["headGroupSpec"]["rayStartParams"]["port"]
        driver = Driver(f"{head['status']['podIP']}:{port}", kubelet.logs)
        try:
            see(lambda: driver.slices() == whole, "Ray to know them by their labels")
            # One host's Ray dies.
            gone, kept = space.uids(index=1), space.uids(index=0)
            kubelet.fail(space.workers(index=1)[0]["metadata"]["name"])
            see(lambda: space.anew(4, gone), "slice 1 anew")
            assert kept < space.uids()
            see(lambda: driver.slices() == whole, "Ray to see it")
            # A node is lost, and its Pod hangs in Terminating: the slice comes back under another index.
            lost = space.workers(index=0)[0]
            kubelet.lose(kubelet.node_of(lost["metadata"]["name"]))
            see(lambda: {i for i, _ in space.places()} == {1, 2}, "another slice in its place")
            there = [("tpu-1", "0"), ("tpu-1", "1"), ("tpu-2", "0"), ("tpu-2", "1")]
            see(lambda: driver.slices() == there and space.status()["slices"] == "2/2", "Ray to see it")
        finally:
            driver.stop()
        space.server.kubectl("-n", space.name, "delete", "raycluster", "demo")
        see(lambda: not space.pods(), "nothing to be left over")
