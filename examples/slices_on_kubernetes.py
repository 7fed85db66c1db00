"""The whole chain on one machine: kubectl → operator → kubelet → Ray nodes → elastic training in JAX.

Two slices of two hosts train together. One Pod is deleted: the operator replaces its slice whole, training
goes on with the slice that is left, and grows back when the new one is there. Then a node is marked for
termination: the slice saves itself first, and no step is made twice. `make demo-kube` runs it.

The API server is real, and so are the Ray nodes; the kubelet's containers are processes, the TPUs CPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GROUP = "tpu"
NODES = [f"node-{n}" for n in range(8)]
TERMINATION = "cloud.google.com/impending-node-termination"
"""The taint of a node that the cloud is about to take."""
LIMIT_S = 600.0


# The training script. It runs on the cluster, and knows nothing of Kubernetes.


def train_fn(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils

    import everstep as train

    w, step = np.zeros(8), 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = np.load(Path(folder) / "state.npz")
            w, step = saved["w"], int(saved["step"]) + 1
    grad = jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w - x.sum(axis=1)) ** 2)))
    context = train.get_context()
    first = context.get_world_rank() == 0
    while not train.collective.broadcast_from_rank_zero(Path(config["stop"]).exists()):
        x = np.random.randn(256, 8)
        w = w - 0.05 * multihost_utils.process_allgather(grad(w, x)).mean(axis=0)
        if first:
            with open(config["progress"], "a") as progress:
                progress.write(f"{step} {context.get_world_size()}\n")
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if first and (step % 10 == 0 or train.should_checkpoint()):
                np.savez(Path(folder) / "state.npz", w=w, step=step)
                kept = train.Checkpoint.from_directory(folder)
            train.report({"step": step, "workers": context.get_world_size()}, checkpoint=kept)
        step += 1
        time.sleep(0.2)  # so small a model would take all of the machine that starts new nodes meanwhile


def train_on(address: str, folder: str) -> None:
    import ray

    import everstep as train
    from everstep.jax import JaxTrainer

    ray.init(address=address, _node_ip_address=address.partition(":")[0], log_to_driver=False)
    result = JaxTrainer(
        train_fn,
        train_loop_config={"stop": f"{folder}/stop", "progress": f"{folder}/progress"},
        scaling_config=train.ScalingConfig(
            use_tpu=True,
            topology="2x4",
            accelerator_type="TPU-V6E",
            num_workers=(2, 4),
            resources_per_worker={"TPU": 4},
            elastic_resize_monitor_interval_s=2,
        ),
        run_config=train.RunConfig(
            name="demo",
            storage_path=f"{folder}/results",
            failure_config=train.FailureConfig(max_failures=-1),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
        ),
        engine="ray",
    ).fit()
    print(f"trained {result.metrics['step'] + 1} steps", flush=True)


# The cluster around it.


def manifest(folder: str) -> dict[str, Any]:
    """Two TPU slices, of which ``ray_group`` makes nodes that fit beside each other on one machine."""
    from everstep.testing.kube import ray_cluster, ray_group

    selector = {
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    }
    group = ray_group(GROUP, 2, 2, selector, resources={"CPU": "2", "TPU": "4"})
    group["template"]["spec"]["terminationGracePeriodSeconds"] = 60  # to take a checkpoint in
    return ray_cluster(folder, group)


def main() -> None:
    folder = tempfile.mkdtemp(prefix="evk", dir="/tmp")  # short: Ray's sockets lie deep in it
    try:
        show(folder)
    except BaseException:
        print(f"what the operator and the training said is in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def show(folder: str) -> None:
    from everstep.kube.crd import custom_resource_definition
    from everstep.testing.kube import ApiServer, ProcessKubelet

    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    say("starting a Kubernetes API server")
    with ApiServer() as server, ProcessKubelet(server, NODES) as kubelet:
        for name in NODES:
            server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        server.kubectl("apply", "-f", "-", stdin=json.dumps(custom_resource_definition()))
        server.wait_until_served("rayclusters.ray.io")
        command = [sys.executable, "-m", "everstep.cli.main", "operator", "run", "--namespace", "default"]
        with running(*command, "--kubeconfig", str(server.kubeconfig), log=Path(folder, "operator.log")):
            raycluster = manifest(f"{folder}/ray")
            say("kubectl apply -f raycluster.json     (2 slices of 2 hosts: 4 Ray nodes and a head)")
            server.kubectl("apply", "-f", "-", stdin=json.dumps(raycluster))
            until(lambda: slices(server) == "2/2", "two whole slices")
            say(f"SLICES {slices(server)}: all Ray nodes are up")
            head = server.kubectl("get", "pods", "-l", "ray.io/node-type=head", "-o", "jsonpath={..podIP}")
            # The driver has no account of its own here, and a home without anybody's Ray token.
            environment = {"RAY_AUTH_MODE": "disabled", "HOME": str(kubelet.logs), "JAX_PLATFORMS": "cpu"}
            port = raycluster["spec"]["headGroupSpec"]["rayStartParams"]["port"]
            train = [sys.executable, __file__, "--train", f"{head}:{port}", folder]
            with running(*train, log=Path(folder, "train.log"), **environment) as driver:
                follow(server, driver, Path(folder), say)
            lines = Path(folder, "train.log").read_text().splitlines()
            say("done: " + next(line for line in lines if line.startswith("trained ")))


def follow(server: Any, driver: subprocess.Popen[bytes], folder: Path, say: Callable[[str], None]) -> None:
    def workers() -> tuple[int, int]:
        """The newest step, and how many workers made it."""
        assert driver.poll() is None, Path(folder, "train.log").read_text()[-3000:]
        with contextlib.suppress(OSError, IndexError, ValueError):
            step, count = Path(folder, "progress").read_text().splitlines()[-1].split()
            return int(step), int(count)
        return -1, 0

    until(lambda: workers()[0] > 10 and workers()[1] == 4, "training on both slices")
    say(f"step {workers()[0]} with 4 workers on 2 slices")
    first = pods_of(server, 0)
    before = pods_of(server) - first
    victim = sorted(before)[0]
    say(f"kubectl delete {victim}")
    server.kubectl("delete", victim, "--wait=false")
    until(lambda: workers()[1] == 2, "training on the slice that is left")
    say(f"step {workers()[0]} with 2 workers: training goes on without slice 1   (SLICES {slices(server)})")
    until(lambda: slices(server) == "2/2", "the slice anew")
    after = pods_of(server) - first
    assert not before & after, "the slice was replaced whole"
    say(f"SLICES 2/2: slice 1 was replaced whole, {len(after)} new Pods")
    until(lambda: workers()[1] == 4, "training on both slices again")
    say(f"step {workers()[0]} with 4 workers again")

    node = server.kubectl("get", sorted(after)[0], "-o", "jsonpath={.spec.nodeName}")
    say(f"kubectl taint node {node} {TERMINATION}=soon:NoSchedule     (the cloud wants the machine back)")
    warned = workers()[0]
    server.kubectl("taint", "node", node, f"{TERMINATION}=soon:NoSchedule")
    until(lambda: workers()[1] == 2, "training on the slice that is left")
    until(lambda: workers()[1] == 4 and slices(server) == "2/2", "training on both slices again")
    assert not after & pods_of(server), "the slice left its nodes"
    step = workers()[0]
    say(f"step {step} with 4 workers: slice 1 has moved")
    until(lambda: workers()[0] > step + 5, "some more steps")
    Path(folder, "stop").touch()
    driver.wait(LIMIT_S)
    assert driver.returncode == 0, Path(folder, "train.log").read_text()[-3000:]
    made = [int(line.split()[0]) for line in Path(folder, "progress").read_text().splitlines()]
    since = made[made.index(warned) :]
    assert since == list(range(warned, warned + len(since))), f"steps were lost: {since}"
    say(f"steps {warned} to {since[-1]} were made once each: a machine with notice costs none")


def pods_of(server: Any, index: int | None = None) -> set[str]:
    """The Pods of a replica, or of all, without those that are leaving. A replica that is replaced has its
    number again, or a new one.
    """
    label = f"ray.io/group={GROUP}"
    if index is not None:
        label += f",ray.io/worker-group-replica-index={index}"
    found = json.loads(server.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]
    return {f"pod/{p['metadata']['name']}" for p in found if "deletionTimestamp" not in p["metadata"]}


def slices(server: Any) -> str:
    """As `kubectl get raycluster demo` shows them. Asked for all the time, so without a process for it."""
    cluster = server.request("GET", "/apis/ray.io/v1/namespaces/default/rayclusters/demo")
    return str(cluster.get("status", {}).get("slices", ""))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not seen within {LIMIT_S:.0f} s: {what}")
        time.sleep(0.5)


@contextlib.contextmanager
def running(*command: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train_on(*sys.argv[2:])
    else:
        main()
