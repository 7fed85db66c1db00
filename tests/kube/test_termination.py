"""A node that is about to be terminated: notice, checkpoint, another slice, and not a step lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.testing.kube import ApiServer, ProcessKubelet, ray_cluster, ray_group
from kube.live import MERGE, Namespace, operating
from processes import LIMIT_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "slices_on_kubernetes.py"


def test_the_hook_that_tells_ray_is_python() -> None:
    from everstep.kube.farewell import say_goodbye

    ray: dict[str, Any] = {"name": "ray"}
    say_goodbye({}, ray)
    command = ray["lifecycle"]["preStop"]["exec"]["command"]
    compile(command[2], "hook", "exec")
    assert "+ 25" in command[2]
    # Where there is no time to say anything, or the user says it, nothing is added.
    for spec, own in (({"terminationGracePeriodSeconds": 3}, {}), ({}, {"lifecycle": {"preStop": {}}})):
        before = dict(own)
        say_goodbye(spec, own)
        assert own == before


def steps(folder: str) -> list[tuple[int, int]]:
    """The steps that were made, in their order, each with how many workers."""
    try:
        lines = Path(folder, "progress").read_text().splitlines()
    except OSError:
        return []
    return [
        (int(step), int(count)) for step, count in (line.split() for line in lines if line.count(" ") == 1)
    ]


@pytest.mark.timeout(900)
def test_a_node_that_gets_a_termination_taint_costs_no_step(
    server: ApiServer, tmp_path: Path, short_folder: str
) -> None:
    space = Namespace(server)
    see = space.see
    nodes = [f"{space.name}-node-{i}" for i in range(8)]
    for name in nodes:
        server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
    selector = {
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    }
    slices = ray_group("tpu", 2, 2, selector, resources={"CPU": "2", "TPU": "4"})
    slices["template"]["spec"]["terminationGracePeriodSeconds"] = 60
    made = ray_cluster(f"{short_folder}/ray", slices)
    kubelets = ProcessKubelet(server, nodes, space.name)
    try:
        with kubelets as kubelet, operating(server, tmp_path, "--namespace", space.name):
            space.apply(made)
            see(lambda: space.status().get("slices") == "2/2", "two slices of real Ray nodes")
            [head] = space.pods(group="headgroup")
            port = made["spec"]["headGroupSpec"]["rayStartParams"]["port"]
            environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": str(kubelet.logs)}
            environment.update(JAX_PLATFORMS="cpu")
            train = [
                sys.executable,
                str(EXAMPLE),
                "--train",
                f"{head['status']['podIP']}:{port}",
                short_folder,
            ]
            with (tmp_path / "train.log").open("wb") as log:
                driver = subprocess.Popen(train, env=environment, stdout=log, stderr=log)
            try:
                see(
                    lambda: steps(short_folder)[-1:] > [(10, 0)] and steps(short_folder)[-1][1] == 4,
                    "training",
                )
                [victim, *_] = space.workers(index=1)
                gone = space.uids(index=1)
                taint = {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}
                where = f"/api/v1/nodes/{kubelet.node_of(victim['metadata']['name'])}"
                server.request("PATCH", where, {"spec": {"taints": [taint]}}, MERGE)
                see(lambda: space.anew(4, gone), "the slice anew")
                see(lambda: [c for _, c in steps(short_folder)].count(2) > 0, "training on the other slice")
                see(lambda: steps(short_folder)[-1][1] == 4, "training on both again")
                Path(short_folder, "stop").touch()
                assert driver.wait(LIMIT_S) == 0, (tmp_path / "train.log").read_text()[-3000:]
            finally:
                driver.kill()
                driver.wait()
        numbers = [step for step, _ in steps(short_folder)]
        said = (tmp_path / "train.log").read_text()[-3000:]
        assert numbers == list(range(len(numbers))), f"each step was made once; the driver said: {said}"
    finally:
        for name in nodes:
            server.request("DELETE", f"/api/v1/nodes/{name}")
