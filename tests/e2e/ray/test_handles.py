"""Actors of the user's, and Ray's own view of a worker, from inside a training function."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep as train
from e2e.training import note
from everstep import Deadlines, RunConfig, ScalingConfig, Trainer
from everstep.errors import FunctionLoadError

from .cluster import LONE, RayCluster, Running, notes_in


@pytest.fixture
def counter(cluster: RayCluster) -> Iterator[Any]:
    """An actor without a name: only a handle leads to it."""
    import ray

    @ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def add(self, n: int) -> int:
            self.total += n
            return self.total

    made = Counter.remote()  # type: ignore[attr-defined]
    yield made
    ray.kill(made)


def test_a_handle_in_the_functions_closure_reaches_its_actor(
    cluster: RayCluster, tmp_path: Path, counter: Any
) -> None:
    import ray

    def count(config: dict[str, Any]) -> None:
        import ray

        train.report({"total": ray.get(counter.add.remote(2))})

    cluster.add_lone_host("slice-0")
    result = Running(tmp_path, count, 1, scaling=LONE).wait()
    assert result.metrics == {"total": 2}
    assert ray.get(counter.add.remote(0)) == 2


def count_with(config: dict[str, Any]) -> None:
    import ray

    [counter] = config["actors"]
    train.report({"total": ray.get(counter.add.remote(3))})


def test_a_handle_in_the_config_reaches_its_actor(cluster: RayCluster, tmp_path: Path, counter: Any) -> None:
    cluster.add_lone_host("slice-0")
    result = Running(tmp_path, count_with, 1, scaling=LONE, config={"actors": [counter]}).wait()
    assert result.metrics == {"total": 3}


def test_an_object_of_rays_in_the_config_is_refused_by_name(cluster: RayCluster, tmp_path: Path) -> None:
    import ray

    run = Running(tmp_path, count_with, 1, scaling=LONE, config={"weights": ray.put([1.0])})
    with pytest.raises(FunctionLoadError, match=r"train_loop_config\['weights'\].*ObjectRef"):
        run.wait()


def see_node(config: dict[str, Any]) -> None:
    import ray

    if train.get_context().get_world_rank() == 0:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    # The others leave it to Ray to connect when it is first asked for something.
    note(config, step=1, node=ray.get_runtime_context().get_node_id())
    train.report({"step": 1})


def test_a_worker_is_for_ray_on_the_node_that_it_is_on(cluster: RayCluster, tmp_path: Path) -> None:
    nodes = [cluster.add_lone_host(f"slice-{number}") for number in range(2)]
    run = Running(tmp_path, see_node, 2, scaling=LONE)
    run.wait()
    assert {n["rank"]: n["node"] for n in run.notes()} == dict(enumerate(nodes))


def work_in_folder(config: dict[str, Any]) -> None:
    from brought_along import WORD  # type: ignore[import-not-found]

    note(config, step=1, cwd=str(Path.cwd()), text=Path("text").read_text(), word=WORD)
    train.report({"step": 1})


def fit_in_a_task(folder: str, path: list[str]) -> str:
    """Body of a Ray task: the driver of a run."""
    sys.path[:] = list(dict.fromkeys([*path, *sys.path]))
    from e2e.ray.test_handles import work_in_folder

    here = Path.cwd()
    Trainer(
        work_in_folder,
        train_loop_config={"notes": f"{folder}/notes"},
        scaling_config=ScalingConfig(num_workers=2, **LONE),
        run_config=RunConfig(name="run", storage_path=f"{folder}/runs", deadlines=Deadlines()),
        engine="ray",
    ).fit()
    return str(here)


def test_a_driver_in_a_task_with_a_working_folder_hands_it_on_to_the_workers(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Each host has the folder where its own Ray put it, and the driver's is another host's."""
    import ray

    cluster.add_node({}, {"driver": 1}, cpus=1)
    hosts = [cluster.add_lone_host_with_folder(f"slice-{number}") for number in range(2)]
    (tmp_path / "notes").mkdir()
    brought = tmp_path / "brought"
    brought.mkdir()
    (brought / "text").write_text("here")
    (brought / "brought_along.py").write_text("WORD = 'found'")
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "brought")
    task = ray.remote(num_cpus=0, resources={"driver": 1}, max_retries=0)(fit_in_a_task)
    own = [path for path in sys.path if path]
    drivers = ray.get(
        task.options(runtime_env={"working_dir": f"file://{packed}"}).remote(str(tmp_path), own)
    )
    notes = {n["rank"]: n for n in notes_in(tmp_path)}
    assert {n["text"] for n in notes.values()} == {"here"}
    assert {n["word"] for n in notes.values()} == {"found"}
    for rank, folder in enumerate(hosts):
        assert notes[rank]["cwd"].startswith(folder)
        assert notes[rank]["cwd"] != drivers
