"""The real Lightning: killed in the middle of a pass, and gone on with there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from .notes import SAMPLES, Row, first_step, fit, trained_on

Rows = dict[tuple[int, int], Row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Rows]:
    """What an undisturbed run of so many workers has trained on."""

    @cache
    def rows(workers: int) -> Rows:
        from .module import train

        folder = tmp_path_factory.mktemp("undisturbed") / "whole"
        fit(train, folder, workers=workers)
        return trained_on(folder)

    return rows


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_trainer_goes_on_in_the_middle_of_a_pass_as_if_nothing_had_happened(
    tmp_path: Path, workers: int, whole: Callable[[int], Rows]
) -> None:
    from .module import train  # and not where tests are collected: it takes seconds

    steps = 3 * SAMPLES // 4 // workers
    kill_at = steps // 2 + 1
    killed = fit(train, tmp_path / "killed", workers=workers, kill_at=kill_at)
    assert killed.metrics is not None
    assert killed.metrics["step"] == steps
    undisturbed = whole(workers)
    assert trained_on(tmp_path / "killed") == undisturbed
    seen = [number for _, numbers in undisturbed.values() for number in numbers]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 3), "each sample once in each pass"
    assert first_step(tmp_path / "killed", attempt=2) == kill_at // 2 * 2, "saved last before the kill"


def test_a_save_that_is_killed_or_finds_the_disk_full_costs_only_itself(
    tmp_path: Path, whole: Callable[[int], Rows]
) -> None:
    from .module import train

    result = fit(train, tmp_path / "disturbed", disturb_saves=True)
    assert result.checkpoint is not None
    assert trained_on(tmp_path / "disturbed") == whole(2)
    assert first_step(tmp_path / "disturbed", attempt=2) == 2, "the save of step 4 was killed"
    assert first_step(tmp_path / "disturbed", attempt=3) == 4, "the disk was full at step 6"


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
    from everstep.lightning import ResumableLoader, prepare_trainer

    with pytest.raises(ConfigError, match="strategy is a SingleDeviceStrategy.*RayDDPStrategy"):
        prepare_trainer(pl.Trainer(accelerator="cpu", devices=1, logger=False))
    with pytest.raises(ConfigError, match="IterableDataset.*Stream"):
        ResumableLoader(ChainDataset([]))
    for steps, seconds in [(None, None), (1, 1.0), (0, None), (None, -1.0)]:
        with pytest.raises(ConfigError, match="every_s"):
            SaveCadence(steps, seconds)
