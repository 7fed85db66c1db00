"""What a forecast is about: a cluster, a job, how it recovers, and how long each phase of that takes.

Questions with published figures are in ``presets``; where outages come from is in ``outages``.
"""

from __future__ import annotations

import msgspec


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """How long each phase of a recovery takes, in seconds."""

    detect_s: float
    """From a worker's death until it is noticed."""
    detect_host_s: float
    """The same for a host that vanishes."""
    stop_s: float
    prepare_s: float
    """On a host that wasn't in use: starting the agent, importing."""
    start_s: float
    """From the command to start workers until all are ready, on prepared hosts."""
    restore_s: float
    """From ready to the first new step: loading the checkpoint."""
    restore_memory_s: float = 1.0
    """The same where the state comes from memory: 4.4 GB on an H200 took 0.4 s for CUDA, 0.5 s to register
    the memory, and 0.1 s to copy.
    """


MEASURED = Phases(
    detect_s=0.0004, detect_host_s=1.5, stop_s=0.022, prepare_s=2.2, start_s=0.07, restore_s=0.062
)
"""Everstep's, by `make bench`: 4 torch workers on one machine. Heartbeats show that a host is lost."""

MEASURED_FULL_RESTART = Phases(
    detect_s=1.0, detect_host_s=1.5, stop_s=0.1, prepare_s=0.0, start_s=11.3, restore_s=0.062
)
"""Ray Train's 12.4 s from a kill to the first step, by the same benchmark; its controller polls every 2 s.
Workers are fresh processes on every host, so that preparing one takes no time of its own.
"""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phases: Phases
    heeds_notices: bool = True
    """Whether a preemption notice leads to a checkpoint and a move; otherwise it is ignored."""
    checkpoints_on_demand: bool = True
    """Whether workers make a checkpoint when asked before a move; otherwise that waits for the next one."""
    snapshots: bool = True
    """Whether snapshots in memory are taken, if the question has any."""


EVERSTEP = Policy(name="everstep", phases=MEASURED)
FULL_RESTART = Policy(
    name="full-restart",
    phases=MEASURED_FULL_RESTART,
    heeds_notices=False,
    checkpoints_on_demand=False,
    snapshots=False,
)
POLICIES = {policy.name: policy for policy in (EVERSTEP, FULL_RESTART)}


class ForecastQuestion(msgspec.Struct, frozen=True, kw_only=True):
    slices: int
    """How many the job wants. Each host of these is accounted for, also while it is missing."""
    hosts_per_slice: int = 1
    spares: int = 0
    """How many there are beyond those."""
    min_slices: int | None = None
    """The fewest that the job trains with; None: all of them."""
    replica_groups: bool = False
    """Each slice holds a copy of the model, and is replaced while the others train on."""
    days: float = 30.0
    step_s: float = 1.0
    checkpoint_every_s: float = 600.0
    """Of training, between the end of one checkpoint and the start of the next."""
    checkpoint_cost_s: float = 5.0
    """Seconds that training pauses per checkpoint."""
    snapshot_every_s: float | None = None
    """Of training, between two snapshots of the state in the hosts' memory; None: none are taken."""
    snapshot_cost_s: float = 0.1
    """Seconds that training pauses per snapshot."""
    snapshot_copies: int = 1
    """How many other hosts have a copy of each host's part."""
    replicated: bool = False
    """Every host has the whole state, as with DDP: nothing has to be copied to others."""
    mtbf_h: float | None = 5000.0
    """Mean time between failures of one host; None: no failures. Not used with a trace."""
    host_share: float = 0.78
    """The share of failures that cost the host; the others kill a worker."""
    repair_h: float = 4.0
    """Hours until a lost host is back."""
    notice_s: float = 0.0
    """Seconds of warning before a host of the trace leaves; 0: none."""
    trace: str | None = None
    """A file, or the name of a trace that is shipped."""
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
