"""A state that is reported is written to storage, as plain files, and comes back from there."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from everstep import ConfigError, RunConfig, ScalingConfig, WorkerGroupError
from everstep.driver.states import StatesDue
from everstep.protocol import worker_messages
from everstep.torch import TorchTrainer
from noted import notes
from processes import wait_for

from .runs import Fit, World
from .training import converts, divided_steps, make_mistake, mistaken, steps

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


def test_the_last_state_is_in_storage_and_loads_without_everstep(world: World) -> None:
    from safetensors.torch import load_file

    world.until.touch()
    result = Fit(world.trainer(steps, every_s=3600.0)).done()
    assert result.metrics == {"step": 1}
    assert result.metrics_history == [{"step": 1}]
    assert result.checkpoint is not None
    assert result.best_checkpoints == [(result.checkpoint, {"step": 1})]
    folder = Path(result.checkpoint.path)
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == [
        "state-00000.json",
        "state-00000.safetensors",
        "state-00001.json",
        "state-00001.safetensors",
        "state-shared.safetensors",
    ]
    shared = load_file(folder / "state-shared.safetensors")
    assert list(shared["model/module.first.weight"].shape) == [8, 4]
    assert shared["optimizer/state/0/step"].item() == 1
    assert load_file(folder / "state-00001.safetensors")["own"].tolist() == [1001]
    index = json.loads((folder / "state-00001.json").read_text())
    assert (index["step"], index["rank"], index["world_size"]) == (1, 1, 2)
    assert index["tensors"]["own"]["global_shape"] == [1]
    assert index["tensors"]["model/module.first.weight"]["file"] == "state-shared.safetensors"
    assert len(index["tree"]["losses"]) == 1


def test_a_killed_worker_comes_back_with_the_state_that_was_saved(world: World) -> None:
    fit = Fit(world.trainer(steps))
    world.wait_for_step(1, 3)
    wait_for(world.checkpoints, "a checkpoint")
    victim = world.of_epoch(1)[1][-1]["pid"]
    os.kill(victim, signal.SIGKILL)
    world.wait_for_step(2, 1)
    assert world.check_restored(2) > 0
    world.until.touch()
    fit.done()


def test_the_agent_writes_a_state_to_storage_while_its_worker_stands_still(world: World) -> None:
    fit = Fit(world.trainer(steps, 1, every_s=0.2, config={"floats": 1 << 20}))
    run = world.folder / "runs" / "run"

    def unfinished() -> set[Path]:
        return {*run.glob("checkpoint_*")} - {*world.checkpoints()}

    wait_for(unfinished, "a checkpoint that is being written")
    folder = max(unfinished() or world.checkpoints())
    # The agent writes before the worker reports. A worker that is stopped in between has it committed later.
    world.wait_for_step(1, int(folder.name.rpartition("_")[2]), ranks=1)
    worker = world.of_epoch(1)[0][-1]["pid"]
    os.kill(worker, signal.SIGSTOP)
    try:
        wait_for(lambda: folder in world.checkpoints(), "its commit")
    finally:
        os.kill(worker, signal.SIGCONT)
    world.until.touch()
    fit.done()


def test_a_state_is_due_again_if_a_restart_came_before_it_was_written() -> None:
    turns: list[worker_messages.AnyValue] = []
    states = StatesDue(10.0, turns.append)
    states.restart(0.0)
    for now in (9.0, 10.0, 12.0):
        states.look(now)
    assert len(turns) == 1
    states.restart(13.0)
    states.look(13.0)
    states.saved()
    states.restart(15.0)
    states.look(22.0)
    assert len(turns) == 2
    states.look(23.0)
    assert len(turns) == 3


def test_a_state_that_cannot_be_saved_when_training_ends_does_not_fail_the_run(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    result = Fit(world.trainer(converts, 1, every_s=3600.0, memory=None)).done()
    assert (result.return_value, result.checkpoint, result.unsaved_reports) == ("done", None, [2])
    assert "own in the state is a tensor that can't be saved: torch.complex128" in capfd.readouterr().err


def test_a_run_that_is_continued_starts_from_its_last_state(world: World) -> None:
    world.until.touch()
    for expected in (1, 2):
        trainer = world.trainer(steps, every_s=3600.0, run={"if_finished": "continue"})
        assert Fit(trainer).done().metrics == {"step": expected}
    assert world.check_restored(2) == 1


def test_a_process_without_workers_saves_its_state_too(world: World) -> None:
    config = {"notes": str(world.notes), "steps": 3}
    trainer = TorchTrainer(
        divided_steps,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(world.folder / "runs"), if_finished="continue"),
    )
    trainer.fit()
    trainer.fit()
    assert [n["step"] for n in notes(world.notes)[0] if n.get("restored")] == [0, 3]


def test_what_was_divided_among_four_is_restored_at_two_and_at_four_again(world: World) -> None:
    def run(workers: int, until: int) -> Any:
        more: dict[str, Any] = {"config": {"steps": until}, "run": {"if_finished": "continue"}}
        return Fit(world.trainer(divided_steps, workers, 3600.0, **more)).done().return_value

    at_once = World(world.folder / "at once")
    more: dict[str, Any] = {"config": {"steps": 6}}
    expected = Fit(at_once.trainer(divided_steps, 1, 3600.0, **more)).done().return_value
    run(4, 2)
    run(2, 4)
    assert run(4, 6) == pytest.approx(expected, rel=1e-6)
    restored = [[n["step"] for n in each] for each in notes(world.notes).values()]
    assert restored == [[0, 2, 4], [0, 2, 4], [0, 4], [0, 4]]


MISTAKES = {
    "no state_dict": "State(lock=…) got a TextIOWrapper, which has no state_dict()",
    "no step": "report(state=…) got step=None. Give the number of the step that is done, or",
    "no state": "report(state=…) got a Linear. Give it an everstep.torch.State(model=…, optimizer=…)",
    "sparse": "tensor in the state is a tensor that can't be saved: torch.float32, torch.sparse_coo",
    "other tree": "optimizer/state/0/exp_avg was not there in the first snapshot, and is F32 [2, 2]",
    "late restore": "State.restore() was called after report(). Call it once, before the first step",
}


def test_mistaken_states_are_refused_with_a_remedy(world: World) -> None:
    config = {"mistakes": list(MISTAKES)}
    told = Fit(world.trainer(mistaken, 1, config=config)).done().return_value
    assert {name: text for name, text in told.items() if MISTAKES[name] not in text} == {}
    assert told.keys() == MISTAKES.keys()


def test_states_that_differ_between_ranks_are_refused_with_a_remedy(world: World) -> None:
    trainer = TorchTrainer(
        make_mistake,
        train_loop_config={"mistake": "another rank's"},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(world.folder / "runs")),
    )
    with pytest.raises(WorkerGroupError) as caught:
        trainer.fit()
    expected = "tensor is F32 [3] at rank 1, and F32 [2] at rank 0. Make the State of the same"
    assert expected in str(caught.value)


def test_a_state_that_is_never_written_is_refused() -> None:
    from everstep import CheckpointConfig

    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(storage_every_s=0)
    assert caught.value.field == "CheckpointConfig.storage_every_s"
