"""Validations that are left when all ranks have returned, and nobody waits for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.control.events import StopKind
from everstep.driver.validations import Validations


def having(pending: list[str]) -> Validations:
    """Checkpoints that wait for theirs."""
    nothing = cast(Any, None)
    history = cast(Any, SimpleNamespace(pending=lambda: pending))
    return Validations(nothing, nothing, history, nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("pending", "committing", "is_left"),
    [(["c1"], set(), True), ([], {"c1"}, True), ([], set(), False)],
    ids=["a validation", "a commit", "nothing"],
)
def test_what_is_left_when_the_user_stops_is_left_for_the_next_start(
    pending: list[str], committing: set[str], is_left: bool
) -> None:
    validations = having(pending)
    validations.committing = committing
    validations.stop(StopKind.INTERRUPT)
    assert asyncio.run(validations.finish()) is (StopKind.INTERRUPT if is_left else None)


def test_a_driver_that_was_replaced_leaves_them_to_the_one_that_has_the_run() -> None:
    async def finish() -> StopKind | None:
        validations = having(["c1"])
        finishing = asyncio.create_task(validations.finish())
        await asyncio.sleep(0)
        assert not finishing.done()
        validations.replaced()
        return await finishing

    assert asyncio.run(finish()) is None
