"""A ``ray.data.Dataset`` is divided by Ray, once for each incarnation of the worker group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.training import note
from everstep import ConfigError, RunConfig, ScalingConfig, Trainer

from .cluster import LONE, RayCluster, Running, notes_in


def see(config: dict[str, Any]) -> None:
    import everstep as train

    shard = train.get_dataset_shard("train")
    for turn in range(2):
        ids = [int(n) for batch in shard.iter_batches(batch_size=4) for n in batch["id"]]
        note(config, ids=ids, turn=turn)
        train.collective.barrier()
    if train.get_context().get_attempt() == 1:
        raise RuntimeError("once more")


def test_workers_share_a_dataset_of_rays_and_after_a_failure_again(
    cluster: RayCluster, tmp_path: Path
) -> None:
    import ray

    for number in range(2):
        cluster.add_lone_host(f"slice-{number}", cpus=3)
    dataset = ray.data.range(40).map(lambda row: {"id": row["id"]})
    run = Running(
        tmp_path, see, 2, scaling=LONE, max_failures=1, trainer=lambda *given, **more: Trainer(
            *given, **more, datasets={"train": dataset}
        ),
    )  # fmt: skip
    run.wait()
    seen = {(n["epoch"], n["turn"], n["rank"]): n["ids"] for n in notes_in(tmp_path)}
    for epoch, turn in ((1, 0), (1, 1), (2, 0), (2, 1)):
        first, second = seen[epoch, turn, 0], seen[epoch, turn, 1]
        assert sorted(first + second) == list(range(40))
        assert len(first) == len(second)


def test_without_ray_under_the_workers_it_is_refused_by_name(cluster: RayCluster, tmp_path: Path) -> None:
    import ray

    trainer = Trainer(
        see,
        train_loop_config={},
        datasets={"train": ray.data.range(4)},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(tmp_path)),
        engine="local",
    )
    with pytest.raises(ConfigError, match=r"datasets\['train'\] is a ray.data.Dataset"):
        trainer.fit()
