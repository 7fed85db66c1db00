"""What users are told at the end of checkpoints that were reported and could not be saved."""

from __future__ import annotations

import pytest

from everstep.driver.unsaved import UnsavedReports
from everstep.saved.checkpoints import CheckpointRef

NEWEST = CheckpointRef("checkpoint_0002_000003", 2, 3)


@pytest.mark.parametrize(
    ("reports", "why", "newest", "told"),
    [
        (
            [4],
            "rank 0: no space left",
            NEWEST,
            "1 reported checkpoint was not saved, that of report 4 (rank 0: no space left). The newest that "
            "is saved is checkpoint_0002_000003, of report 3 of attempt 2",
        ),
        (
            [4, 5],
            "",
            NEWEST,
            "2 reported checkpoints were not saved, those of reports 4, 5. The newest that is saved is "
            "checkpoint_0002_000003, of report 3 of attempt 2",
        ),
        (
            [*range(4, 41)],
            "",
            None,
            "37 reported checkpoints were not saved, those of reports 4, 5, … 40. No checkpoint is saved",
        ),
    ],
)
def test_reports_that_are_not_saved_are_named_with_the_newest_that_is(
    reports: list[int], why: str, newest: CheckpointRef | None, told: str
) -> None:
    assert str(UnsavedReports(reports, why, newest)) == told
