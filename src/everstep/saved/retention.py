"""Which committed checkpoints are removed: the one place where that is decided."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from everstep.saved.checkpoints import CheckpointRef, in_order


class Scored(msgspec.Struct, frozen=True):
    """A committed checkpoint, as retention sees it."""

    ref: CheckpointRef
    score: float | None = None
    """None: it was reported without one, or nothing ranks checkpoints."""
    is_pending: bool = False
    """It waits for its validation, which may change its score."""


def ranked(checkpoints: Iterable[Scored], let_go: Iterable[CheckpointRef], order: str) -> list[Scored]:
    """The best last: that with the highest score (``order="max"``) or the lowest (``"min"``). One without a
    score, or with NaN, is worst; of equal ones the newer is better. ``let_go``: see ``in_order``.
    """
    return _best_last(_oldest_first(checkpoints, let_go), order)


def to_remove(
    checkpoints: Iterable[Scored],
    let_go: Iterable[CheckpointRef],
    *,
    num_to_keep: int | None,
    order: str = "max",
) -> list[str]:
    """Folders of all but the ``num_to_keep`` best, the worst first. Never the newest, nor one that waits for
    its validation. ``None`` keeps all.
    """
    if num_to_keep is None:
        return []
    oldest_first = _oldest_first(checkpoints, let_go)
    newest = oldest_first[-1:]
    worst = _best_last(oldest_first, order)[:-num_to_keep]
    return [one.ref.folder for one in worst if one not in newest and not one.is_pending]


def _oldest_first(checkpoints: Iterable[Scored], let_go: Iterable[CheckpointRef]) -> list[Scored]:
    by_folder = {one.ref.folder: one for one in checkpoints}
    return [by_folder[ref.folder] for ref in in_order((one.ref for one in by_folder.values()), let_go)]


def _best_last(oldest_first: Iterable[Scored], order: str) -> list[Scored]:
    def worth(one: Scored) -> float:
        if one.score is None or math.isnan(one.score):
            return -math.inf
        return one.score if order == "max" else -one.score

    return sorted(oldest_first, key=worth)
