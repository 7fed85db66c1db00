"""The table of phases, and the page that is drawn from it."""

from __future__ import annotations

from pathlib import Path

from everstep.control.table import TRANSITIONS, Phase, page

PAGE = Path(__file__).parents[2] / "docs" / "state-machine.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m everstep.control.table > docs/state-machine.md"


def test_every_phase_can_be_reached_and_left() -> None:
    assert {b for _, b in TRANSITIONS} == set(Phase) - {Phase.NEW}
    assert {a for a, _ in TRANSITIONS} == set(Phase) - {Phase.ENDED}


def test_every_phase_that_is_not_the_end_can_be_stopped() -> None:
    assert {a for a, b in TRANSITIONS if b is Phase.ENDING} == set(Phase) - {Phase.ENDING, Phase.ENDED}
