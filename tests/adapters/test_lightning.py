"""The real Lightning: killed in the middle of a pass, and gone on with there."""

from __future__ import annotations

from pathlib import Path

import pytest

from .notes import SAMPLES, first_step, fit, trained_on


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_trainer_goes_on_in_the_middle_of_a_pass_as_if_nothing_had_happened(
    tmp_path: Path, workers: int
) -> None:
    from .module import train  # and not where tests are collected: it takes seconds

    steps = 3 * SAMPLES // 4 // workers
    fit(train, tmp_path / "whole", workers=workers)
    kill_at = steps // 2 + 1
    killed = fit(train, tmp_path / "killed", workers=workers, kill_at=kill_at)
    assert killed.metrics is not None
    assert killed.metrics["step"] == steps
    whole = trained_on(tmp_path / "whole")
    assert trained_on(tmp_path / "killed") == whole
    seen = [number for _, numbers in whole.values() for number in numbers]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 3), "each sample once in each pass"
    assert first_step(tmp_path / "killed", attempt=2) == kill_at // 2 * 2, "saved last before the kill"


def test_with_ray_trains_names_it_goes_on_at_the_beginning_of_a_pass(tmp_path: Path) -> None:
    from .module import train

    fit(train, tmp_path / "whole", ray=True)
    fit(train, tmp_path / "killed", kill_at=9, ray=True)
    assert {numbers for _, numbers in trained_on(tmp_path / "killed").values()} == {
        numbers for _, numbers in trained_on(tmp_path / "whole").values()
    }
    assert first_step(tmp_path / "killed", attempt=2) == 6


def test_bad_input_is_named_with_its_remedy() -> None:
    import lightning.pytorch as pl
    from torch.utils.data import ChainDataset

    from everstep import ConfigError
    from everstep.cadence import SaveCadence
    from everstep.lightning import RayTrainReportCallback, ResumableLoader, prepare_trainer

    with pytest.raises(ConfigError, match="strategy is a SingleDeviceStrategy.*RayDDPStrategy"):
        prepare_trainer(pl.Trainer(accelerator="cpu", devices=1, logger=False))
    with pytest.raises(ConfigError, match="IterableDataset.*Stream"):
        ResumableLoader(ChainDataset([]))
    with pytest.raises(ConfigError, match="validation"):
        RayTrainReportCallback(validation=True)
    for steps, seconds in [(None, None), (1, 1.0), (0, None), (None, -1.0)]:
        with pytest.raises(ConfigError, match="every_s"):
            SaveCadence(steps, seconds)
