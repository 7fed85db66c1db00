"""The whole chain on one machine: kubectl, the operator, a kubelet, real Ray nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from everstep.testing.kube import ApiServer, ProcessKubelet
from kube.live import Namespace, operating
from kube.ray_cluster import ray_cluster, ray_group

_NODES = """
import json, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
for line in sys.stdin:
    print(json.dumps([[n["Labels"], n["Resources"]] for n in ray.nodes() if n["Alive"]]), flush=True)
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
        nodes: list[Any] = json.loads(self._process.stdout.readline())
        return sorted(
            (labels["ray.io/tpu-slice-name"], labels["ray.io/tpu-worker-id"])
            for labels, resources in nodes
            if resources.get("TPU") == 4
        )

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_slices_of_real_ray_nodes_are_replaced_whole(server: ApiServer, tmp_path: Path) -> None:
    space = Namespace(server)
    tpus = ray_group("tpu", 2, 2, resources={"CPU": "1", "TPU": "4"})
    tpus["template"]["spec"]["nodeSelector"] = {
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    }
    see = partial(space.see, timeout_s=180.0)  # real Ray nodes take their time to start
    whole = [("tpu-0", "0"), ("tpu-0", "1"), ("tpu-1", "0"), ("tpu-1", "1")]
    with ProcessKubelet(server) as kubelet, operating(server, tmp_path, "--namespace", space.name):
        made = ray_cluster(tempfile.mkdtemp(prefix="evk", dir="/tmp"), tpus)
        space.apply(made)
        see(lambda: space.status().get("slices") == "2/2", "two slices of real Ray nodes")
        [head] = space.pods(group="headgroup")
        port = made["spec"]["headGroupSpec"]["rayStartParams"]["port"]
        driver = Driver(f"{head['status']['podIP']}:{port}", kubelet.logs)
        try:
            see(lambda: driver.slices() == whole, "Ray to know them by their labels")
            # One host's Ray dies.
            gone, kept = space.uids(index=1), space.uids(index=0)
            kubelet.fail(space.workers(index=1)[0]["metadata"]["name"])
            see(lambda: len(space.uids()) == 4 and not space.uids() & gone, "slice 1 anew")
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
