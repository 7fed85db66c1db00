"""What a run wants of a cluster's hosts, as ``ScalingConfig`` says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wanted:
    """What a run wants of a host."""

    per_worker: Mapping[str, float]
    """What one worker needs, by resource."""
    topology: str | None = None
    accelerator_type: str | None = None
    slice_label: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """What its labels must be; ``!value`` for anything else, ``in(a,b)`` and ``!in(a,b)`` for lists."""
    hosts_per_slice: int | None = None
    """How many hosts a domain of ``slice_label`` has; None: those that are there."""
    at_most: int | None = None
    """Workers that a host may have at most, even if it has room for more."""
