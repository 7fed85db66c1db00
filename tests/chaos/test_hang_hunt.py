"""Hangs of every kind at random steps of random ranks: the right rank is named, with its line if it has one,
and training goes on.

And each second of each worker is in the run's ledger, once. One by default; ``make soak`` runs 400.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from e2e import hanging
from e2e.test_hangs import BARE_TORCH, QUICK_TO_SAVE, hangs, recoveries
from everstep import FailureConfig, RunConfig, ScalingConfig, Trainer
from everstep.failures import Kind
from everstep.jax import JaxTrainer
from everstep.journal import journal

from .ledgers import check_ledger

_ALONE = ["sleep", "stop_itself", "keep_the_lock", "spin_in_c", "wait_for_a_child"]
_STALLS = [how for how in _ALONE if how != "spin_in_c"]  # what is busy may be unpacking a large state
KINDS: list[tuple[Any, Any, str]] = [
    *((Trainer, hanging.plain, how) for how in _ALONE),
    *((Trainer, hanging.with_barriers, how) for how in _ALONE),
    *((BARE_TORCH, hanging.with_torch, how) for how in [*_ALONE, "skip", "return", "leave"]),
    *((JaxTrainer, hanging.with_jax, how) for how in [*_ALONE, "return", "leave"]),
    *(
        (trainer, function, how)
        for trainer, function in (
            (Trainer, hanging.stalls_in_restore),
            (Trainer, hanging.stalls_in_upload),
            (BARE_TORCH, hanging.stalls_in_restore_with_torch),
            (BARE_TORCH, hanging.stalls_in_upload_with_torch),
        )
        for how in _STALLS
    ),
]


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 400))])
def test_a_hang_of_any_kind_is_blamed_on_its_rank(tmp_path: Path, rng: random.Random, number: int) -> None:
    trainer, function, how = KINDS[number % len(KINDS)] if number else rng.choice(KINDS)
    world = rng.choice([2, 3])
    rank, at = rng.randrange(world), rng.randrange(10, 25)
    print(f"{function.__name__}: {how} of rank {rank} of {world} at step {at}")
    where = tmp_path / "notes"
    where.mkdir()
    trainer(
        function,
        train_loop_config={"steps": 30, "rank": rank, "at": at, "ways": [how], "notes": str(where)},
        scaling_config=ScalingConfig(num_workers=world),
        run_config=RunConfig(
            name="hangs",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=2),  # what stalls in a restore has failed before
            deadlines=QUICK_TO_SAVE,
        ),
    ).fit()
    (hang,) = hangs(tmp_path)
    assert hang.ranks == (rank,)
    assert hanging.explained(how, at, steps=30) in hang.message
    (recovery,) = recoveries(tmp_path)
    assert recovery.cause is not None
    assert recovery.cause.kind is Kind.HANG
    check_ledger([*journal.read(tmp_path / "hangs")])
    print(f"named after {recovery.detect_s:.1f} s")
