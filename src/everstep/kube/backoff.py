"""What went wrong before, and so how long to wait before it is tried again. The status remembers it.

Each object waits by itself, so that one that can't be written or deleted holds up no other.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.backoff import pause_s

_FIRST_S = 1.0
_FIRST_GROWTH_S = 30.0
_FIRST_FAILED_S = 10.0
_LONGEST_S = 300.0
_LONGEST_PASSING_S = 30.0
_TOLD_AFTER = 3
STEADY_S = 600.0
"""After this long without a failure, earlier ones are forgotten."""

HEAD = "Head"


def of_service(name: str) -> str:
    return f"Service/{name}"


def of_pod(name: str) -> str:
    """Of a Pod that is to be deleted or labelled."""
    return f"Pod/{name}"


def of_pod_group(name: str) -> str:
    return f"PodGroup/{name}"


def of_replica(group: str, index: int) -> str:
    """Of a replica that was there before."""
    return f"Replica/{group}/{index}"


def of_growth(group: str) -> str:
    """Of replicas in addition to those that a group has had."""
    return f"Group/{group}"


class ApiRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """The API server wouldn't have it, or didn't answer."""

    reason: str
    message: str
    attempts: int
    at: float
    generation: int
    """Of the cluster's spec: a change is a reason to try at once."""
    growth: bool = False
    """Nothing is broken while it waits, so it may wait longer from the start."""
    passing: bool = False
    """The same may well work in a moment."""

    @property
    def retry_at(self) -> float:
        first = _FIRST_GROWTH_S if self.growth and not self.passing else _FIRST_S
        longest = _LONGEST_PASSING_S if self.passing else _LONGEST_S
        return self.at + pause_s(self.attempts, first, longest)

    @property
    def lasts(self) -> bool:
        """Whether it is worth an event: trouble that passes in a moment isn't."""
        return not self.passing or self.attempts >= _TOLD_AFTER


class ReplicaFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A replica whose containers failed: replaced at once the first time, and later each time after that."""

    group: str
    index: int
    replica: str
    """The last one that failed there, by its name."""
    reason: str
    attempts: int
    at: float
    generation: int
    """As for a refusal."""

    @property
    def retry_at(self) -> float:
        return self.at + pause_s(self.attempts - 1, _FIRST_FAILED_S, _LONGEST_S)

    @property
    def forgotten_at(self) -> float:
        return self.at + STEADY_S


Failures = Mapping[tuple[str, int], ReplicaFailure]
"""By group and index."""


def remembered(failures: Failures, now: float) -> dict[tuple[str, int], ReplicaFailure]:
    return {place: failure for place, failure in failures.items() if now < failure.forgotten_at}
