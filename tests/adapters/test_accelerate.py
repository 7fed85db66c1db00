"""The real Accelerate, with no adapter: what docs/transformers-and-lightning.md says of it."""

from __future__ import annotations

from pathlib import Path

from .notes import SAMPLES, first_step, fit, trained_on


def test_a_killed_loop_of_accelerates_goes_on_in_the_middle_of_a_pass_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    from .accelerated import train  # not where tests are collected: it takes seconds

    fit(train, tmp_path / "whole")
    result = fit(train, tmp_path / "killed", kill_at=(3,))
    assert result.metrics == {"step": 12}
    whole = trained_on(tmp_path / "whole")
    assert trained_on(tmp_path / "killed") == whole
    seen = [number for _, numbers in whole.values() for number in numbers]
    assert sorted(seen) == sorted([*range(SAMPLES)] * 2), "each sample once in each of two passes"
    assert first_step(tmp_path / "killed", attempt=2) == 2, "saved last before the kill"
