"""What went wrong before, and so how long to wait before it is tried again. The status remembers it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_FIRST_REFUSED_S = 30.0
_FIRST_FAILED_S = 10.0
_LONGEST_S = 300.0
STEADY_S = 600.0
"""What has lasted so long isn't failing again and again: earlier failures are forgotten."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The API server wouldn't have the Pods of a group, or a Service."""

    reason: str
    message: str
    attempts: int
    at: float
    generation: int
    """Of the cluster's spec: a change is a reason to try at once."""

    @property
    def retry_at(self) -> float:
        return self.at + min(_FIRST_REFUSED_S * 2.0 ** (self.attempts - 1), _LONGEST_S)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
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
        if self.attempts < 2:
            return self.at
        return self.at + min(_FIRST_FAILED_S * 2.0 ** min(self.attempts - 2, 10), _LONGEST_S)

    @property
    def forgotten_at(self) -> float:
        return self.at + STEADY_S


Failures = Mapping[tuple[str, int], Failure]
"""By group and index."""


def remembered(failures: Failures, now: float) -> dict[tuple[str, int], Failure]:
    return {place: failure for place, failure in failures.items() if now < failure.forgotten_at}
