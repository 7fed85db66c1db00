"""What is asked: a cluster, a job, what a recovery costs, and how the run recovers."""

from __future__ import annotations

import msgspec


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps of a recovery take, in seconds."""

    detect_s: float
    """From a worker's death until it is known."""
    detect_host_s: float
    """The same of a host that vanishes."""
    stop_s: float
    prepare_s: float
    """A host that wasn't in use: agent, imports."""
    start_s: float
    """From the order to start workers until all have met and are ready, on prepared hosts."""
    restore_s: float
    """From ready to the first new step: loading the checkpoint."""


MEASURED = Phases(
    detect_s=0.0004, detect_host_s=1.5, stop_s=0.022, prepare_s=2.2, start_s=0.07, restore_s=0.062
)
"""Everstep's, by `make bench`: 4 torch workers on one machine. A host's silence is noticed by heartbeats."""

MEASURED_FULL_RESTART = Phases(
    detect_s=1.0, detect_host_s=1.5, stop_s=0.1, prepare_s=0.0, start_s=11.3, restore_s=0.062
)
"""Ray Train's 12.4 s from a kill to the first step, by the same benchmark; its controller looks every 2 s.
Workers are fresh processes everywhere, on old hosts and new.
"""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phases: Phases
    hears_notices: bool = True
    """A preemption notice leads to a checkpoint and a move; otherwise hosts just vanish."""
    checkpoints_on_demand: bool = True
    """The workers are asked for a checkpoint before a resize; otherwise it waits for the next one."""


EVERSTEP = Policy(name="everstep", phases=MEASURED)
FULL_RESTART = Policy(
    name="full-restart",
    phases=MEASURED_FULL_RESTART,
    hears_notices=False,
    checkpoints_on_demand=False,
)
POLICIES = {policy.name: policy for policy in (EVERSTEP, FULL_RESTART)}


class ForecastQuestion(msgspec.Struct, frozen=True, kw_only=True):
    slices: int
    """How many the job wants; it is a host's share of this target that is accounted for."""
    hosts_per_slice: int = 1
    spares: int = 0
    """Slices more than that."""
    min_slices: int | None = None
    """With how few the job trains; None: only with all of them."""
    replica_groups: bool = False
    """Each slice holds a copy of the model, and is replaced while the others train on."""
    days: float = 30.0
    step_s: float = 1.0
    checkpoint_every_s: float = 600.0
    """Of training, between the end of one checkpoint and the start of the next."""
    checkpoint_cost_s: float = 5.0
    """How long training stands still for one."""
    mtbf_h: float | None = 5000.0
    """Mean time between failures of one host; None: only what the trace tells."""
    host_share: float = 0.78
    """Of the failures, how many cost the host; the others kill a worker."""
    repair_h: float = 4.0
    """Until a lost host is back."""
    notice_s: float = 0.0
    """How long before a host of the trace is taken away it is told; 0: not at all."""
    trace: str | None = None
    seed: int = 0

    @property
    def hosts(self) -> int:
        return self.slices * self.hosts_per_slice

    @property
    def seconds(self) -> float:
        return self.days * 86_400.0

    @property
    def elastic(self) -> bool:
        return self.min_slices is not None and self.min_slices < self.slices
