"""A forked worker is as good as a fresh one: its own random numbers, its own environment, today's code."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everstep import RunConfig, ScalingConfig, Trainer, collective, get_context
from everstep.jax import JaxTrainer
from everstep.testing import LocalCluster

from .training import BareTorch

BARE_TORCH = partial(Trainer, backend_config=BareTorch())


def gather(
    function: Any, tmp_path: Path, workers: int = 3, trainer: Callable[..., Trainer] = Trainer, **kwargs: Any
) -> list[Any]:
    """Each rank's return value."""
    where = tmp_path / "values"
    where.mkdir(exist_ok=True)

    def run(config: dict[str, Any]) -> None:
        import json

        value = function()
        (Path(config["where"]) / str(get_context().get_world_rank())).write_text(json.dumps(value))

    run_config = kwargs.pop("run_config", None) or RunConfig(storage_path=str(tmp_path / "runs"))
    trainer(
        run,
        train_loop_config={"where": str(where)},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=run_config,
        **kwargs,
    ).fit()
    import json

    return [json.loads((where / str(rank)).read_text()) for rank in range(workers)]


def test_ranks_draw_different_random_numbers(tmp_path: Path) -> None:
    def draw() -> list[float]:
        import random

        import numpy
        import torch
        from torch.utils.data import DataLoader

        class Noise(torch.utils.data.Dataset[float]):
            def __len__(self) -> int:
                return 4

            def __getitem__(self, index: int) -> float:
                return random.random() + float(numpy.random.rand()) + float(torch.rand(()))

        loaded = [float(x) for x in DataLoader(Noise(), batch_size=None, num_workers=2)]
        return [random.random(), float(numpy.random.rand()), float(torch.rand(())), *loaded]

    rows = gather(draw, tmp_path, trainer=BARE_TORCH)
    numbers = [number for row in rows for number in row]
    assert len(set(numbers)) == len(numbers)


def test_the_same_seed_in_the_script_gives_the_same_numbers(tmp_path: Path) -> None:
    import random

    def draw() -> float:
        return random.random()

    def with_seed(seed: int) -> list[Any]:
        random.seed(seed)
        return gather(draw, tmp_path)

    assert with_seed(7) == with_seed(7) != with_seed(8)


def test_variables_that_a_framework_reads_at_import_are_set_before_it(tmp_path: Path) -> None:
    def look() -> list[Any]:
        import torch

        return [os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), os.environ["MINE"]]

    run_config = RunConfig(
        storage_path=str(tmp_path / "runs"),
        worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "2", "MINE": "yes"}},
    )
    assert gather(look, tmp_path, trainer=BARE_TORCH, run_config=run_config) == [["2", 2, "yes"]] * 3


def test_jax_platforms_given_by_the_user_reaches_jax(tmp_path: Path) -> None:
    def look() -> str:
        import jax

        return str(jax.config.jax_platforms)

    run_config = RunConfig(
        storage_path=str(tmp_path / "runs"), worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}}
    )
    assert gather(look, tmp_path, 2, JaxTrainer, run_config=run_config) == ["cpu", "cpu"]


def test_a_second_fit_on_the_same_hosts_runs_the_edited_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "edited_module.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with LocalCluster(workers_per_host=2) as cluster:
        values = []
        for version in (1, 2):
            module.write_text(f"def value():\n    return {version}\n")

            def function() -> int:
                import edited_module

                return int(edited_module.value())

            values.append(gather(function, tmp_path, 2, engine=cluster))
    assert values == [[1, 1], [2, 2]]


def test_where_forking_hangs_workers_start_as_fresh_processes_and_the_user_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hasty_module.py").write_text(
        "import torch\nx = torch.rand(2048, 2048) @ torch.rand(2048, 2048)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from everstep import Deadlines

    def function() -> float:
        import hasty_module
        import torch

        return float((hasty_module.x @ torch.rand(2048, 2048)).sum() * 0 + 1)

    run_config = RunConfig(
        storage_path=str(tmp_path / "runs"),
        deadlines=Deadlines(probe_s=3.0),
        worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "2"}},
    )
    assert gather(function, tmp_path, 2, BARE_TORCH, run_config=run_config) == [1.0, 1.0]
    assert "workers start as fresh processes" in capfd.readouterr().err


BUSY_MODULE = """
import threading, time

lock = threading.Lock()

def poll():
    while True:
        with lock:
            time.sleep(0.05)

threading.Thread(target=poll, name="poller", daemon=True).start()
"""


def test_a_module_that_starts_a_thread_when_imported_gets_fresh_processes_and_says_why_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy_module.py").write_text(BUSY_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def function() -> int:
        import busy_module

        with busy_module.lock:  # in a fork, nobody would ever give it back
            return 1

    with LocalCluster(slices=2) as cluster:
        assert gather(function, tmp_path, 2, engine=cluster) == [1, 1]
    errors = capfd.readouterr().err
    assert errors.count("workers start as fresh processes") == 1
    assert "left 1 thread running (poller)" in errors


def test_threads_that_frameworks_start_when_imported_do_not_stand_in_the_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> int:
        import jax
        import numpy
        import pandas
        import scipy.linalg
        import torch
        import torchft

        return len([jax, numpy, pandas, scipy.linalg, torch, torchft])

    run_config = RunConfig(
        storage_path=str(tmp_path / "runs"), worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "4"}}
    )
    assert gather(function, tmp_path, 1, run_config=run_config) == [6]
    assert "fresh processes" not in capfd.readouterr().err


def test_ranks_and_world_are_dense_and_in_topology_order(tmp_path: Path) -> None:
    def place() -> list[int]:
        context = get_context()
        collective.barrier()
        return [
            context.get_world_rank(),
            context.get_world_size(),
            context.get_local_rank(),
            context.get_local_world_size(),
            context.get_node_rank(),
            context.get_slice_id(),
        ]

    with LocalCluster(slices=2, hosts_per_slice=2, workers_per_host=2) as cluster:
        rows = gather(place, tmp_path, 8, engine=cluster)
    assert rows == [[r, 8, r % 2, 2, r // 2, r // 4] for r in range(8)]


def test_broadcast_from_rank_zero_reaches_every_rank(tmp_path: Path) -> None:
    def share() -> list[Any]:
        rank = get_context().get_world_rank()
        first = collective.broadcast_from_rank_zero({"from": rank})
        collective.barrier()
        return [first["from"], collective.broadcast_from_rank_zero(rank + 40)]

    assert gather(share, tmp_path) == [[0, 40]] * 3
