"""The real Lightning: killed in the middle of a pass, and gone on with there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from .notes import LIGHTNING_PACKAGE, SAMPLES, Row, first_step, fit, trained_on

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
def test_a_trainer_killed_at_the_end_and_in_the_middle_of_a_pass_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, workers: int, whole: Callable[[int], Rows]
) -> None:
    from .module import train  # and not where tests are collected: it takes seconds

    steps = 3 * SAMPLES // 4 // workers
    kill_at = (1 + steps // 3, 1 + steps // 2)
    killed = fit(train, tmp_path / "killed", workers=workers, kill_at=kill_at)
    assert killed.metrics is not None
    assert killed.metrics["step"] == steps
    undisturbed = whole(workers)
    assert trained_on(tmp_path / "killed") == undisturbed
    seen = [number for _, numbers in undisturbed.values() for number in numbers]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 3), "each sample once in each pass"
    for attempt, killed_at in enumerate(kill_at, 2):
        saved = killed_at // 2 * 2
        assert first_step(tmp_path / "killed", attempt) == saved, "saved last before the kill"


def test_the_end_of_training_is_saved_however_rarely_it_saves_otherwise(tmp_path: Path) -> None:
    from .module import train

    result = fit(train, tmp_path / "short", every_steps=1000)
    assert result.checkpoint is not None
    assert result.metrics is not None
    assert result.metrics["step"] == 3 * SAMPLES // 4 // 2
    assert len(result.best_checkpoints) == 1, "once"


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
    fit(train, tmp_path / "killed", kill_at=(9,), ray=True)
    assert {numbers for _, numbers in trained_on(tmp_path / "killed").values()} == {
        numbers for _, numbers in trained_on(tmp_path / "whole").values()
    }
    assert first_step(tmp_path / "killed", attempt=2) == 6


def test_either_of_lightnings_packages_will_do(tmp_path: Path, whole: Callable[[int], Rows]) -> None:
    """In an interpreter of its own: one package is imported, and the other isn't."""
    code = (
        "import sys; from pathlib import Path; from tests.adapters.notes import fit;"
        "from tests.adapters.module import adapter, train; folder = Path(sys.argv[1]);"
        "assert adapter.RayDDPStrategy.__mro__[2].__module__ == 'pytorch_lightning.strategies.ddp';"
        "assert 'lightning.pytorch' not in sys.modules;"
        "fit(train, folder, kill_at=(9,))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "killed"],
        env={**os.environ, LIGHTNING_PACKAGE: "pytorch_lightning"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert trained_on(tmp_path / "killed") == whole(2)


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "its own generator"])
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("taken", [2, 4, 5, 8, 11])
def test_a_loader_goes_on_after_any_batch(taken: int, processes: int, own: bool) -> None:
    """Three passes of four batches, and what is drawn between them."""
    import torch

    from everstep.torch.resumable import ResumableLoader

    def loader(seed: int) -> ResumableLoader:
        generator = torch.Generator().manual_seed(seed) if own else None
        return ResumableLoader(range(8), 2, shuffle=True, num_workers=processes, generator=generator)

    def batches(loader: ResumableLoader, passes: int) -> Iterator[tuple[list[int], float]]:
        for _ in range(passes):
            for batch in loader:
                yield batch.tolist(), torch.rand(1).item()

    torch.manual_seed(7)
    first = loader(7)
    whole = batches(first, 3)
    for _ in range(taken):
        next(whole)
    state, drawn = first.state_dict(), torch.get_rng_state()
    expected = [*whole]
    torch.manual_seed(8)
    second = loader(8)
    second.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert [*batches(second, 3 - taken // 4)] == expected


def test_a_pass_that_was_broken_off_is_followed_by_another_one() -> None:
    import torch

    from everstep.torch.resumable import ResumableLoader

    torch.manual_seed(0)
    loader = ResumableLoader(range(1000), 1000, shuffle=True)
    orders = [next(iter(loader)).tolist() for _ in range(2)]
    loader = ResumableLoader(range(1000), 500, shuffle=True)
    orders += [next(iter(loader)).tolist() for _ in range(2)]
    assert len({tuple(order) for order in orders}) == 4


def test_bad_input_is_named_with_its_remedy() -> None:
    import lightning.pytorch as pl
    from torch.utils.data import ChainDataset

    from everstep import ConfigError
    from everstep.lightning import ResumableLoader, prepare_trainer
    from everstep.worker.save_cadence import SaveCadence

    with pytest.raises(ConfigError, match="strategy is a SingleDeviceStrategy.*RayDDPStrategy"):
        prepare_trainer(pl.Trainer(accelerator="cpu", devices=1, logger=False))
    with pytest.raises(ConfigError, match="IterableDataset.*Stream"):
        ResumableLoader(ChainDataset([]))
    for steps, seconds in [(None, None), (1, 1.0), (0, None), (None, -1.0)]:
        with pytest.raises(ConfigError, match="every_s"):
            SaveCadence(steps, seconds)
