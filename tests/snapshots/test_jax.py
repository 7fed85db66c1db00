"""The state of JAX programs: saved in memory and in storage, and restored onto its template's devices."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("jax") is None:
    pytest.skip("needs jax", allow_module_level=True)

from everstep import (
    CheckpointConfig,
    FailureConfig,
    MemoryConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from everstep.jax import JaxTrainer
from noted import notes

from .runs import Fit, World

NEVER_S = 3600.0


def trainer(world: World, workers: int, until: int | None = None) -> JaxTrainer:
    from .jax_training import steps  # imports JAX, which most processes that read this file never need

    config: dict[str, Any] = {"notes": str(world.notes), "until": str(world.until)}
    return JaxTrainer(
        steps,
        train_loop_config=config | ({} if until is None else {"steps": until}),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(world.folder / "runs"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(storage_every_s=NEVER_S, memory=MemoryConfig(every_s=0)),
            if_finished="continue",
        ),
    )


def run(world: World, workers: int, until: int) -> Result:
    return Fit(trainer(world, workers, until)).done()


def test_a_killed_worker_loses_at_most_one_step_without_any_checkpoint(world: World) -> None:
    fit = Fit(trainer(world, 2))
    for epoch in (1, 2):
        world.wait_for_step(epoch, 4 * epoch)
        os.kill(world.of_epoch(epoch)[epoch - 1][-1]["pid"], signal.SIGKILL)
        world.wait_for_step(epoch + 1, 1)
        step = world.check_restored(epoch + 1)
        reported = min(
            max(n["step"] for n in each if n.get("reported")) for each in world.of_epoch(epoch).values()
        )
        assert step >= reported > 0, "older than the newest that was whole"
    assert world.checkpoints() == []
    world.until.touch()
    fit.done()


def test_what_was_divided_among_four_is_restored_at_two_and_at_four_again(world: World) -> None:
    at_once = World(world.folder / "at once")
    expected = run(at_once, 1, 6).return_value
    run(world, 4, 2)
    folder = world.checkpoints()[-1]
    index = json.loads((folder / "state-00001.json").read_text())
    assert index["tensors"]["params/weight"]["offset"] == [2, 0]
    assert index["tensors"]["params/weight"]["global_shape"] == [8, 2]
    assert index["tensors"]["params/bias"]["file"] == "state-shared.safetensors"
    assert index["tensors"]["moments/mean/weight"]["shape"] == [2, 2]
    run(world, 2, 4)
    assert run(world, 4, 6).return_value == pytest.approx(expected, rel=1e-6)
    restored = [[n["step"] for n in each if n.get("restored")] for each in notes(world.notes).values()]
    assert restored == [[0, 2, 4], [0, 2, 4], [0, 4], [0, 4]]


def test_the_files_load_without_everstep(world: World) -> None:
    from safetensors.numpy import load_file

    result = run(world, 1, 3)
    assert result.checkpoint is not None
    found = load_file(Path(result.checkpoint.path) / "state-00000.safetensors")
    assert found["params/weight"].shape == (8, 2)
    assert found["moments/count"].item() == 3
    assert found["own"].tolist() == [3000]


MISTAKES = {
    "not an array": "State(params=…): params/a/0 is a builtins.object, which can't be saved. Give trees",
    "donated": "params was donated to a call, and is gone. Assign what the call returned to the state",
    "only a shape": "params is a jax.ShapeDtypeStruct. Where restore() returns 0, there is nothing to fill",
}


def test_mistaken_states_are_refused_with_a_remedy(world: World) -> None:
    from .jax_training import mistaken

    result = JaxTrainer(
        mistaken,
        train_loop_config={"mistakes": list(MISTAKES)},
        run_config=RunConfig(name="run", storage_path=str(world.folder / "runs")),
    ).fit()
    assert {name: told for name, told in result.return_value.items() if MISTAKES[name] not in told} == {}
    assert result.return_value.keys() == MISTAKES.keys()
