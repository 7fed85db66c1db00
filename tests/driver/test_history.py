"""What a later driver reads back: retention keeps what it should, and notices outlive their driver."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from everstep import CheckpointConfig
from everstep.control.commands import PreemptionSeen
from everstep.control.events import CheckpointRef, Notice
from everstep.driver import records
from everstep.driver.history import History, Kept, to_delete

scores = st.lists(st.one_of(st.floats(), st.none()), max_size=12)


@given(scores, st.integers(1, 5), st.sampled_from(["max", "min"]))
def test_retention_never_removes_the_newest_and_never_something_better_than_what_it_keeps(
    values: list[float | None], keep: int, order: str
) -> None:
    history = History()
    for n, value in enumerate(values):
        ref = CheckpointRef(f"c{n}", 1, n)
        history.checkpoints[ref.folder] = Kept(ref, {} if value is None else {"s": value}, None)
    config = CheckpointConfig(num_to_keep=keep, checkpoint_score_attribute="s", checkpoint_score_order=order)  # type: ignore[arg-type]
    gone = to_delete(history, config)
    assert len(gone) == max(0, len(values) - keep)
    if not values:
        return
    newest = f"c{len(values) - 1}"
    assert newest not in gone
    sign = 1 if order == "max" else -1

    def worth(folder: str) -> float:
        value = history.checkpoints[folder].metrics.get("s", math.nan)
        return -math.inf if math.isnan(value) else sign * value

    kept = [folder for folder in history.checkpoints if folder not in gone and folder != newest]
    assert all(worth(k) >= worth(g) for k in kept for g in gone)


def opened(lease: int, at: float, wall: float) -> records.Opened:
    owner = records.Owner(host="h", boot="b", pid=1, started=0)
    return records.Opened(1, lease, owner, at, wall, "0", "run", 1, 1, "", "", "n")


def test_notices_are_kept_across_drivers_whose_clocks_differ_until_they_are_taken_back() -> None:
    history = History.of(
        [
            opened(1, at=50.0, wall=1050.0),
            PreemptionSeen(60.0, "a", 90.0, ("a.0",)),
            PreemptionSeen(61.0, "b", 95.0, ("b.0",)),
            PreemptionSeen(70.0, "b", None),
            opened(2, at=7.0, wall=1080.0),
        ]
    )
    assert history.notices_by(wall_ahead=1073.0) == (Notice("a", 17.0, ("a.0",)),)
