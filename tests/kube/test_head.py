"""A head that isn't a single point: its state in Redis, and a token for whoever wants something of it."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.ray.cluster import notes_in
from everstep.kube import pods
from everstep.kube.spec import parse
from everstep.kube.validation import problems
from everstep.testing.kube import ApiServer, ProcessKubelet, ray_cluster, ray_group
from everstep.testing.kube.server import free_ports
from kube.live import Namespace, operating
from kube.test_demand import training, world
from kube.test_pods import environment
from kube.test_slices import cluster
from kube.world import group, manifest, template
from processes import LIMIT_S, wait_for

REDIS = {
    "redisAddress": "redis:6379",
    "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "r", "key": "p"}}},
}


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


def test_the_head_keeps_its_state_in_redis_and_workers_wait_for_the_next_one() -> None:
    made = parse(manifest(group(), gcsFaultToleranceOptions=REDIS))
    pod = pods.head_pod(made, "a-head")
    told = environment(pod["spec"]["containers"][0])
    assert told["RAY_REDIS_ADDRESS"] == "redis:6379"
    assert told["REDIS_PASSWORD"] == {"secretKeyRef": {"name": "r", "key": "p"}}
    assert told["RAY_external_storage_namespace"] == "cluster-uid"
    assert "--redis-password=$REDIS_PASSWORD" in pod["spec"]["containers"][0]["args"][0]
    assert pod["metadata"]["annotations"]["ray.io/ft-enabled"] == "true"
    worker = pods.worker_pod(made, made.groups[0], "a-name", "tpu-xxxxx", 0, 0)
    told = environment(worker["spec"]["containers"][0])
    assert told["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"


def test_the_annotation_from_before_the_field_is_honoured() -> None:
    raw = manifest(group())
    raw["metadata"]["annotations"].update(
        {"ray.io/ft-enabled": "true", "ray.io/external-storage-namespace": "mine"}
    )
    told = environment(pods.head_pod(parse(raw), "a-head")["spec"]["containers"][0])
    assert told["RAY_external_storage_namespace"] == "mine"
    assert "RAY_REDIS_ADDRESS" not in told


def test_what_is_said_twice_or_not_at_all_is_refused() -> None:
    head = {"template": template(), "rayStartParams": {"redis-password": "x"}}
    head["template"]["spec"]["containers"][0]["env"] = [{"name": "RAY_REDIS_ADDRESS", "value": "x"}]
    found = problems(manifest(group(), headGroupSpec=head, gcsFaultToleranceOptions={}))
    assert [p.path for p in found] == [
        "spec.gcsFaultToleranceOptions.redisAddress",
        "spec.headGroupSpec.template.spec.containers[0].env",
        "spec.headGroupSpec.rayStartParams.redis-password",
    ]
    assert problems(manifest(group(), gcsFaultToleranceOptions={**REDIS, "storage": {}}))
    assert problems(manifest(group(), authOptions={"mode": "token"}, rayVersion="2.51.0"))


def test_tokens_are_shown_and_wanted_by_all_that_is_ray() -> None:
    made = parse(manifest(group(), authOptions={"mode": "token"}, enableInTreeAutoscaling=True))
    head = pods.head_pod(made, "a-head")
    worker = pods.worker_pod(made, made.groups[0], "a-name", "tpu-xxxxx", 0, 0)
    for container in (
        *head["spec"]["containers"],
        *worker["spec"]["containers"],
        *worker["spec"]["initContainers"],
    ):
        told = environment(container)
        assert told["RAY_AUTH_MODE"] == "token"
        assert told["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": "demo", "key": "auth_token"}}
    theirs = parse(manifest(group(), authOptions={"mode": "token", "enableK8sTokenAuth": True}))
    worker = pods.worker_pod(theirs, theirs.groups[0], "a-name", "tpu-xxxxx", 0, 0)
    assert environment(worker["spec"]["containers"][0])["RAY_ENABLE_K8S_TOKEN_AUTH"] == "true"
    assert [v["name"] for v in worker["spec"]["volumes"] if "projected" in v] == ["ray-token"]


def test_a_cluster_that_wants_a_token_gets_one_and_the_users_own_stays(
    space: Namespace, tmp_path: Path
) -> None:
    def token(name: str) -> str:
        return base64.b64decode(space.get("secrets", name)["data"]["auth_token"]).decode()

    own = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "theirs"},
        "stringData": {"auth_token": "x"},
    }
    space.create(own)
    with operating(space.server, tmp_path, "--namespace", space.name):
        for name in ("ours", "theirs"):
            space.create(cluster(group(replicas=0), name=name, authOptions={"mode": "token"}))
        space.see(lambda: len(space.pods()) == 2, "both heads")
    assert len(token("ours")) > 30
    assert token("theirs") == "x"


def test_a_cluster_that_kuberay_holds_for_its_redis_is_let_go(space: Namespace, tmp_path: Path) -> None:
    made = cluster(group(replicas=0), gcsFaultToleranceOptions=REDIS)
    made["metadata"]["finalizers"] = ["ray.io/gcs-ft-redis-cleanup-finalizer"]
    space.create(made)
    with operating(space.server, tmp_path, "--namespace", space.name):
        space.see(lambda: len(space.pods()) == 1, "the head")
        space.server.kubectl("-n", space.name, "delete", "raycluster", "demo", "--wait=false")
        space.see(lambda: not space.get("rayclusters", group="/apis/ray.io/v1")["items"], "its end")
        assert "RedisNotCleaned" in space.events()


@pytest.fixture
def redis() -> Iterator[tuple[str, str]]:
    """A real one, and its password."""
    program = shutil.which("redis-server")
    if program is None:
        assert not os.environ.get("EVERSTEP_CI"), "there is no redis-server: scripts/setup.sh installs it"
        pytest.skip("there is no redis-server: scripts/setup.sh installs it")
    [port], password = free_ports(1), secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        settings = ("--bind", "127.0.0.1", "--port", str(port), "--requirepass", password, "--save", "")
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen([program, *settings], cwd=folder, stdout=log, stderr=log)
        try:
            wait_for(lambda: b"Ready to accept" in Path(folder, "log").read_bytes(), "Redis")
            yield f"127.0.0.1:{port}", password
        finally:
            process.terminate()
            process.wait()


_ASK = """
import ray, sys
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[1].partition(":")[0], log_to_driver=False)
print("nodes", sorted(n["NodeName"] for n in ray.nodes() if n["Alive"]), flush=True)
"""


@pytest.mark.timeout(900)
def test_a_run_outlives_the_head_and_nobody_gets_in_without_the_token(
    space: Namespace, tmp_path: Path, short_folder: str, redis: tuple[str, str]
) -> None:
    see = space.see
    address, password = redis
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "redis"},
        "stringData": {"p": password},
    }
    space.create(secret)
    reference = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "p"}}}
    made = ray_cluster(
        short_folder,
        ray_group("w", 1, 2, rayStartParams={"num-cpus": "1"}),
        gcsFaultToleranceOptions={"redisAddress": address, "redisPassword": reference},
        authOptions={"mode": "token"},
    )
    # A head finds nodes of its predecessor on its own machine only here: it must not take them for its own.
    made["spec"]["headGroupSpec"]["rayStartParams"]["temp-dir"] = f"{short_folder}/$HOSTNAME"

    def address_of(head: dict[str, Any]) -> str:
        return f"{head['status']['podIP']}:{made['spec']['headGroupSpec']['rayStartParams']['port']}"

    def ask(token: str) -> str:
        environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        environment.pop("RAY_ADDRESS", None)
        [head] = space.pods(group="headgroup")
        done = subprocess.run(
            [sys.executable, "-c", _ASK, address_of(head)],
            capture_output=True, text=True, timeout=LIMIT_S, env=environment,
        )  # fmt: skip
        return done.stdout if done.returncode == 0 else ""

    def newest() -> int:
        return max((note["step"] for note in notes_in(tmp_path)), default=0)

    kubelets = ProcessKubelet(space.server, namespace=space.name)
    with kubelets as kubelet, operating(space.server, tmp_path, "--namespace", space.name):
        space.create(made)
        see(lambda: space.status().get("slices") == "1/1", "a slice of real Ray nodes")
        token = base64.b64decode(space.get("secrets", "demo")["data"]["auth_token"]).decode()
        assert not ask("wrong" * 8)
        [head] = space.pods(group="headgroup")
        with training(address_of(head), tmp_path, kubelet.logs, token, num_workers=[2, 2]) as driver:
            see(lambda: world(tmp_path) == 2, "training on both workers")
            before, pids = space.uids(), kubelet.pids("worker")
            # SIGKILL, without a word to anybody.
            kubelet.lose(kubelet.node_of(head["metadata"]["name"]))
            see(
                lambda: [
                    p
                    for p in space.pods(group="headgroup")
                    if p["metadata"]["uid"] != head["metadata"]["uid"] and is_ready(p)
                ],
                "another head",
            )
            see(lambda: ask(token).count("'") == 6, "it to know the head and both workers")
            step = newest()
            see(lambda: newest() > step + 5, "the run to go on")
            assert space.uids() == before
            assert kubelet.pids("worker") == pids, "no process of a worker was started again"
            (tmp_path / "until").touch()
            assert driver.wait(LIMIT_S) == 0, (tmp_path / "train.log").read_text()[-3000:]
        assert {note["epoch"] for note in notes_in(tmp_path)} == {1}, "nor one of the run's"


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
