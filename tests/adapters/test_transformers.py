"""The real Transformers: killed in the middle of a pass, and gone on with there."""

from __future__ import annotations

from pathlib import Path

import pytest

from .notes import SAMPLES, Row, first_step, fit, trained_on


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Row]:
    """What an undisturbed run has trained on."""
    from .tuned import fine_tune

    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    fit(fine_tune, folder)
    return trained_on(folder)


@pytest.mark.parametrize("ray", [False, True], ids=["our names", "names of Ray Train"])
def test_a_trainer_killed_in_the_middle_and_at_the_end_of_a_pass_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, ray: bool, whole: dict[tuple[int, int], Row]
) -> None:
    from transformers import GPT2LMHeadModel  # not where tests are collected: it takes seconds

    from .tuned import fine_tune

    result = fit(fine_tune, tmp_path / "killed", kill_at=(3, 7), ray=ray)
    assert result.metrics is not None
    assert result.metrics["step"] == 12
    assert trained_on(tmp_path / "killed") == whole
    seen = [number for _, numbers in whole.values() for number in numbers]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 2), "each sample once in each of two passes"
    assert first_step(tmp_path / "killed", attempt=2) == 2, "saved last before the first kill"
    assert first_step(tmp_path / "killed", attempt=3) == 6, "saved last before the second one"
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as saved:
        assert GPT2LMHeadModel.from_pretrained(f"{saved}/checkpoint").config.n_embd == 8


def test_the_end_of_training_is_saved_however_rarely_it_saves_otherwise(tmp_path: Path) -> None:
    from .tuned import fine_tune

    result = fit(fine_tune, tmp_path / "short", every_steps=1000)
    assert result.checkpoint is not None
    assert result.metrics is not None
    assert result.metrics["step"] == 12
    assert len(result.best_checkpoints) == 1, "once"


def test_a_save_that_is_killed_or_finds_the_disk_full_costs_only_itself(
    tmp_path: Path, whole: dict[tuple[int, int], Row]
) -> None:
    from .tuned import fine_tune

    result = fit(fine_tune, tmp_path / "disturbed", disturb_saves=True)
    assert result.checkpoint is not None
    assert trained_on(tmp_path / "disturbed") == whole
    assert first_step(tmp_path / "disturbed", attempt=2) == 2, "the save of step 4 was killed"
    assert first_step(tmp_path / "disturbed", attempt=3) == 4, "the disk was full at step 6"


def test_batches_of_ray_data_are_taken_as_they_come(tmp_path: Path) -> None:
    from ray.data.iterator import _IterableFromIterator  # what iter_torch_batches() of Ray Data's gives
    from transformers import Trainer, TrainingArguments

    from everstep.huggingface.transformers import prepare_trainer

    from .tuned import Words, small_model

    batches = [{"input_ids": [1]}, {"input_ids": [2]}]
    given = _IterableFromIterator(lambda: iter(batches))
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[])
    trainer = Trainer(model=small_model(), args=arguments, train_dataset=given, eval_dataset={"a": given})
    trainer = prepare_trainer(trainer)
    for _ in range(2):
        assert list(trainer.get_train_dataloader()) == batches
    assert list(trainer.get_eval_dataloader("a")) == batches
    assert len(prepare_trainer(trainer).get_eval_dataloader(Words())) > 1, "others as ever"
