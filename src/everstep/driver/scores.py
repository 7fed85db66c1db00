"""Checkpoints and the metric that ranks them: which are kept no longer, and whether they have it at all. With
a name that no metric has, retention keeps the newest instead of the best.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.config import CheckpointConfig
from everstep.journal.history import History, KeptCheckpoint
from everstep.protocol.metrics import find_metric
from everstep.saved import retention

_SHOWN = 8


def no_longer_kept(history: History, config: CheckpointConfig) -> list[str]:
    """Folders of the checkpoints that retention removes now."""
    return retention.to_remove(
        history.scored(config.checkpoint_score_attribute),
        history.let_go.values(),
        num_to_keep=config.num_to_keep,
        order=config.checkpoint_score_order,
    )


class Scores:
    def __init__(self, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self._attribute = config.checkpoint_score_attribute
        self._say = say
        self._warned = False

    def warn_without_score(self, kept: KeptCheckpoint) -> None:
        """Say, once a run, that one has no score."""
        attribute = self._attribute
        if attribute is None or self._warned or find_metric(kept.metrics, attribute) is not None:
            return
        self._warned = True
        names = sorted(map(str, kept.metrics))
        known = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "") or "none"
        self._say(
            f"checkpoint {kept.ref.folder} was reported without a number {attribute!r}, so it counts as the "
            f"worst: CheckpointConfig(checkpoint_score_attribute={attribute!r}) must name a metric that rank "
            f"0 reports with each checkpoint. Its metrics: {known}"
        )
