"""A run's demand, Ray's unmodified autoscaler, our operator, a kubelet, real Ray nodes: the run grows."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.ray.cluster import notes_in
from everstep.testing.kube import ApiServer, ProcessKubelet, ray_cluster, ray_group
from kube.live import Namespace, operating
from processes import LIMIT_S

pytestmark = [pytest.mark.timeout(900)]

_TRAIN = """
import json, sys
import ray, everstep as train
from everstep import FailureConfig, RunConfig, ScalingConfig, Trainer
from e2e.training import elastic_steps

address, folder, scaling = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
loop = scaling.pop("loop", {})
scaling["num_workers"] = tuple(scaling["num_workers"])
ray.init(address=address, _node_ip_address=address.partition(":")[0], log_to_driver=False)
Trainer(
    elastic_steps,
    train_loop_config={"notes": folder + "/notes", "until": folder + "/until", **loop},
    scaling_config=ScalingConfig(elastic_resize_monitor_interval_s=1, **scaling),
    run_config=RunConfig(
        name="run", storage_path=folder + "/runs", failure_config=FailureConfig(max_failures=-1)
    ),
    engine="ray",
).fit()
"""

TPU = {
    "cloud.google.com/gke-tpu-topology": "2x4",
    "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
}


@contextlib.contextmanager
def training(
    address: str, folder: Path, home: Path, token: str = "", **scaling: Any
) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "notes").mkdir()
    shown = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    environment = {**os.environ, **shown, "HOME": str(home)}
    environment.pop("RAY_ADDRESS", None)
    with (folder / "train.log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", _TRAIN, address, str(folder), json.dumps(scaling)],
            stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    try:
        yield driver
    finally:
        driver.terminate()
        driver.wait()


def world(folder: Path) -> int:
    """How many workers train in the newest attempt, once all of them have stepped."""
    notes = notes_in(folder)
    newest = max((note["epoch"] for note in notes), default=0)
    stepped = {n["rank"]: n["world"] for n in notes if n["epoch"] == newest and not n.get("restored")}
    worlds = set(stepped.values())
    return len(stepped) if worlds == {len(stepped)} else 0


def test_slices_of_tpus_come_from_none_and_again_when_one_is_lost_and_go_when_idle(
    server: ApiServer, tmp_path: Path, short_folder: str
) -> None:
    space = Namespace(server)
    see = space.see
    tpus = ray_group("tpu", 0, 2, TPU, resources={"CPU": "1", "TPU": "4"})
    others = ray_group(
        "other", 0, 4, {**TPU, "cloud.google.com/gke-tpu-topology": "4x4"}, resources={"CPU": "1", "TPU": "4"}
    )
    wants = {
        "use_tpu": True, "topology": "2x4", "accelerator_type": "TPU-V6E", "num_workers": [2, 4],
        "resources_per_worker": {"TPU": 4},
    }  # fmt: skip
    with (
        operating(server, tmp_path, "--namespace", space.name),
        ProcessKubelet(server, [f"node-{n}" for n in range(12)], space.name) as kubelet,
    ):
        space.create(
            ray_cluster(
                short_folder,
                others,
                tpus,
                enableInTreeAutoscaling=True,
                autoscalerOptions={"idleTimeoutSeconds": 10},
            )
        )
        see(lambda: space.condition("HeadPodReady").get("status") == "True", "the head")
        [head] = space.pods()
        assert [c["name"] for c in head["spec"]["containers"]] == ["ray", "autoscaler"]
        port = space.cluster()["spec"]["headGroupSpec"]["rayStartParams"]["port"]
        with training(f"{head['status']['podIP']}:{port}", tmp_path, kubelet.logs, **wants) as driver:
            see(lambda: world(tmp_path) == 4, "training on two slices, where there were none")
            # Ray's autoscaler takes a slice back that is idle for ten seconds before the run has it.
            slices = {index for index, _ in space.places("tpu")}
            assert space.places("tpu") == [(index, host) for index in sorted(slices) for host in (0, 1)]
            assert len(slices) == 2, "as many as were asked for"
            assert space.places("other") == [], "of another topology"
            last = max(slices)
            lost = space.uids(index=last)
            kubelet.fail(space.workers(index=last)[0]["metadata"]["name"])
            see(lambda: world(tmp_path) == 2, "training on the slice that is left")
            see(lambda: world(tmp_path) == 4, "training on two slices again")
            assert not lost & space.uids()
            (tmp_path / "until").touch()
            assert driver.wait(LIMIT_S) == 0, (tmp_path / "train.log").read_text()[-3000:]
        see(lambda: not space.places(), "the slices to go when they are idle")
        assert [g["replicas"] for g in space.cluster()["spec"]["workerGroupSpecs"]] == [0, 0]


def test_hosts_with_an_accelerator_that_is_no_tpu_come_without_any_label(
    server: ApiServer, tmp_path: Path, short_folder: str
) -> None:
    space = Namespace(server)
    see = space.see
    # As Ray finds it out on a host that has one; before there is such a host, nobody knows.
    has = '"{\\"accelerator_type:H100\\": 1}"'
    gpus = ray_group("gpu", 0, 1, rayStartParams={"num-cpus": "1", "num-gpus": "1", "resources": has})
    wants = {"use_gpu": True, "accelerator_type": "H100", "num_workers": [1, 2]}
    with (
        operating(server, tmp_path, "--namespace", space.name),
        ProcessKubelet(server, namespace=space.name) as kubelet,
    ):
        space.create(ray_cluster(short_folder, gpus, enableInTreeAutoscaling=True))
        see(lambda: space.condition("HeadPodReady").get("status") == "True", "the head")
        [head] = space.pods()
        port = space.cluster()["spec"]["headGroupSpec"]["rayStartParams"]["port"]
        with training(f"{head['status']['podIP']}:{port}", tmp_path, kubelet.logs, **wants) as driver:
            see(lambda: world(tmp_path) == 2, "training on two hosts, where there was none")
            assert len(space.places()) == 2
            (tmp_path / "until").touch()
            assert driver.wait(LIMIT_S) == 0, (tmp_path / "train.log").read_text()[-3000:]
