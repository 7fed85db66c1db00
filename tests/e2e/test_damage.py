"""A damaged checkpoint is named, and the one before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import FailureConfig, Result, RunConfig, ScalingConfig, Trainer, TrainingFailedError, report
from everstep.journal import journal, records


def three_checkpoints(config: dict[str, Any]) -> int:
    from e2e.training import restore_step, save_step

    context = everstep.get_context()
    begin = restore_step()
    if begin == 0:
        for step in range(1, 4):
            report({"step": step}, checkpoint=save_step(step) if context.get_world_rank() == 0 else None)
            everstep.collective.barrier()
        assert len(everstep.get_all_reported_checkpoints()) == 3
        everstep.collective.barrier()
        if context.get_world_rank() == 0 and config.get("damage"):
            damage(Path(config["run"]), config["damage"])
        everstep.collective.barrier()
        raise RuntimeError("as asked")
    return begin


def damage(run: Path, how: str) -> None:
    (newest,) = run.glob("checkpoint_*_000003")
    match how:
        case "deleted":
            (newest / "step").unlink()
        case "truncated":
            (newest / "step").write_text("")
        case "corrupted":
            (newest / "step").write_text("9")
        case "without manifest":
            (newest / ".manifest.json").write_text("{")


def fit(tmp_path: Path, config: dict[str, Any], max_failures: int = 0) -> Result:
    return Trainer(
        three_checkpoints,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    ).fit()


@pytest.mark.parametrize("how", ["deleted", "truncated", "corrupted", "without manifest"])
def test_a_damaged_file_is_named_at_the_next_start_and_the_checkpoint_before_is_used(
    tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingFailedError):
        fit(tmp_path, {})
    damage(tmp_path / "run", how)
    assert fit(tmp_path, {}).return_value == 2
    said = capfd.readouterr().err
    assert "checkpoint_0001_000003 is damaged" in said
    assert ("manifest" if how == "without manifest" else "step") in said
    assert sum(isinstance(r, records.Damaged) for r in journal.read(tmp_path / "run")) == 1


@pytest.mark.parametrize("how", ["deleted", "truncated", "corrupted"])
def test_damage_that_a_recovering_worker_meets_leads_to_the_one_before_it(tmp_path: Path, how: str) -> None:
    result = fit(tmp_path, {"damage": how, "run": str(tmp_path / "run")}, max_failures=1)
    assert result.return_value == 2, "the damage itself costs no recovery"
