"""The driver process of one side: what a user's script would be. ``python -m bench.drive '{"side": …}'``.

It writes ``outcome.json`` into the folder that it was given: when ``fit()`` was called, and what came of it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    module, _, name = order["loop"].partition(":")
    loop = getattr(importlib.import_module(f"bench.{module}"), name)
    folder = Path(order["folder"])
    fit = _everstep if order["side"] == "everstep" else _ray
    fit(loop, order, folder)


def _everstep(loop: Any, order: dict[str, Any], folder: Path) -> None:
    if not order["nodes"]:
        _fit_everstep(loop, order, folder, "local")
        return
    with _cluster(order, folder):
        _fit_everstep(loop, order, folder, "ray")


@contextmanager
def _cluster(order: dict[str, Any], folder: Path) -> Iterator[None]:
    """A Ray cluster of several nodes, with room for the workers and no more, that this process drives."""
    import ray
    from ray.cluster_utils import Cluster

    store, address = 80 << 20, "127.0.0.1"
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": store,
        "node_ip_address": address,
        "temp_dir": order["ray_folder"],
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        share = order["workers"] // order["nodes"]
        nodes = [
            cluster.add_node(num_cpus=share, object_store_memory=store, node_ip_address=address)
            for _ in range(order["nodes"])
        ]
        pids = [node.all_processes["raylet"][0].process.pid for node in nodes]
        (folder / "raylets.json").write_text(json.dumps(pids))
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def _workers(order: dict[str, Any]) -> Any:
    workers = order["workers"]
    return (workers // order["nodes"], workers) if order["elastic"] else workers


def _fit_everstep(loop: Any, order: dict[str, Any], folder: Path, engine: str) -> None:
    import everstep
    from everstep import CheckpointConfig, FailureConfig, MemoryConfig, RunConfig, ScalingConfig
    from everstep.deadlines import Deadlines
    from everstep.jax import JaxTrainer
    from everstep.torch import TorchftConfig, TorchTrainer

    framework = JaxTrainer if order["framework"] == "jax" else TorchTrainer
    every_s = order["every_s"]
    more = {"torch_config": TorchftConfig({"min_replicas": 1}, backend="gloo")} if order["torchft"] else {}
    trainer = (framework if order["torch"] else everstep.Trainer)(
        loop,
        **more,
        train_loop_config=order["config"],
        scaling_config=ScalingConfig(num_workers=_workers(order), use_gpu=order["gpu"]),
        engine=engine,
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(
                num_to_keep=2, memory=None if every_s is None else MemoryConfig(every_s=every_s)
            ),
            # Kills come faster here than failures do in life: let each be the first after a healthy stretch.
            deadlines=Deadlines(healthy_s=0.0),
        ),
    )
    called = time.monotonic()
    result = trainer.fit()
    _write(folder, called, [row.get("k") for row in result.metrics_history])


def _ray(loop: Any, order: dict[str, Any], folder: Path) -> None:
    if order["nodes"]:
        with _cluster(order, folder):
            _fit_ray(loop, order, folder)
        return
    import ray

    ray.init(
        num_cpus=2 * order["workers"],
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=order["ray_folder"],
    )
    try:
        _fit_ray(loop, order, folder)
    finally:
        ray.shutdown()


def _fit_ray(loop: Any, order: dict[str, Any], folder: Path) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.torch.torchft_config import TorchftConfig

    more = {"torch_config": TorchftConfig({"min_replicas": 1}, backend="gloo")} if order["torchft"] else {}
    trainer = (TorchTrainer if order["torch"] else DataParallelTrainer)(
        loop,
        **more,
        train_loop_config=order["config"],
        scaling_config=ScalingConfig(num_workers=_workers(order)),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    called = time.monotonic()
    trainer.fit()
    _write(folder, called, [])


def _write(folder: Path, called: float, history: list[Any]) -> None:
    outcome = {"called": called, "returned": time.monotonic(), "history": history}
    (folder / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
