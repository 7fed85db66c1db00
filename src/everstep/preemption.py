"""What a training function can know about hosts that are about to be taken away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PreemptionInfo:
    """A pending preemption. Every rank gets the same one, at the same step."""

    deadline_ms: int | None
    """The earliest deadline, in milliseconds of UNIX time. ``None`` where none was given."""
    preempted_node_to_ranks: Mapping[str, Sequence[int]]
    """The hosts that go, each with the world ranks on it."""

    @property
    def preempted_node_ids(self) -> list[str]:
        """The hosts that go, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The world ranks that go with them, sorted, each once."""
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})
