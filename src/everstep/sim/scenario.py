"""What a schedule is made of: a cluster, a job, what the user asked for, and which kinds of faults there are.

Everything is drawn from the seed, so that the seed alone replays it.
"""

from __future__ import annotations

import enum
import random

import msgspec

from everstep.control.settings import Settings
from everstep.control.table import Phase
from everstep.deadlines import Deadlines

_STOPPED_IN = tuple(phase for phase in Phase if phase not in (Phase.ENDING, Phase.ENDED))


class FaultKind(enum.StrEnum):
    """Kinds of faults that a schedule may mix."""

    CRASH = "worker crashes"
    TEMPLATE = "template deaths"
    LOSS = "host losses"
    RACK = "losses of hosts that share a rack"
    FREEZE = "frozen hosts"
    STUCK = "workers that can't be killed"
    START = "failing starts"
    RESERVE = "reservations refused, slow, too late, granted in part"
    PREEMPT = "preemption notices that come true or are cancelled"
    NOTICE = "notices that are late, or empty threats"
    FLAP = "capacity that comes and goes"
    STORAGE = "storage errors, lost answers, damaged checkpoints"
    CUT = "a driver that is cut off from storage"
    DISK = "storage that is full, or slow"
    JOURNAL = "damage to the journal"
    DRIVER = "driver take-over"
    POWER = "power cuts"
    DUPLICATE = "messages that come again"
    CLOCK = "a driver that is suspended, or whose clock is another"
    STOP = "the user stops"
    HANG = "workers that hang"
    RETURN = "lost hosts that are back at a take-over"
    LISTING = "listings that lag behind"


class TimedFault(msgspec.Struct, frozen=True):
    """One fault: when, of which kind, and the seed of all else that it draws.

    Each has a seed of its own, so that leaving one out leaves the others as they were.
    """

    at: float
    family: FaultKind
    seed: int


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    slices: int
    hosts_per_slice: int
    slots: int
    settings: Settings
    families: frozenset[FaultKind]
    strikes: tuple[TimedFault, ...]
    """The faults that are injected, besides those that happen with a probability."""
    fault_s: float
    """When the faults stop."""
    steps: int
    step_s: float
    checkpoint_every: int
    asynchronous: float
    """Share of checkpoint parts that are uploaded in the background."""
    partless: float
    """How often a rank adds nothing to a checkpoint."""
    keep: int | None
    """How many checkpoints retention keeps."""
    scored: bool = False
    """It keeps the best, not the newest."""
    validates: bool = False
    """Checkpoints are validated beside training."""
    compact_after: int = 10
    """Objects of the journal that are put into an archive."""
    stop_in: Phase | None = None
    """The user stops the run as soon as it is in this phase."""
    unloadable: bool = False
    slow_reservation: float = 0.0
    refused_reservation: float = 0.0
    partial_reservation: float = 0.0
    failed_preparation: float = 0.0
    hung_preparation: float = 0.0
    failed_spawn: float = 0.0
    failed_rendezvous: float = 0.0
    failed_upload: float = 0.0
    lost_answers: float = 0.0
    """How often a request of the driver's to the store gets no answer."""
    duplicates: float = 0.0
    new_code: float = 0.0
    """How often a later driver comes with another training function."""
    clock_apart: float = 0.0
    """By how much each driver's clock is ahead of the one before it."""
    snapshots: bool = False
    """Workers keep snapshots in their hosts' memory."""
    one_machine: bool = False
    """Drivers are where the hosts are: a driver that takes over sees that an agent lives, however silent."""

    @property
    def deadlines(self) -> Deadlines:
        return self.settings.deadlines

    @property
    def slots_in_slice(self) -> int:
        return self.hosts_per_slice * self.slots


_PROBABLE = frozenset({FaultKind.START, FaultKind.RESERVE, FaultKind.DUPLICATE})
"""These happen with a probability whenever something is tried; all others strike at a time."""


_APART = frozenset({FaultKind.HANG, FaultKind.RETURN, FaultKind.LISTING})
"""These are drawn by themselves, so that the rest of a seed's schedule stays."""


def _strikes(rng: random.Random, families: frozenset[FaultKind], until: float) -> tuple[TimedFault, ...]:
    striking = sorted(families - _PROBABLE)
    strikes: list[TimedFault] = []
    for _ in range(rng.randint(1, 8) if striking else 0):
        family = rng.choice(striking)
        when = rng.uniform(0.0, until)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            strikes.append(TimedFault(when, family, rng.getrandbits(32)))
            when += rng.choice((0.0, 0.02, 0.5, 5.0)) * rng.random()
    return tuple(sorted(strikes, key=lambda strike: strike.at))


def _more(rng: random.Random, family: FaultKind, most: int, until: float) -> list[TimedFault]:
    return [
        TimedFault(rng.uniform(0.0, until), family, rng.getrandbits(32)) for _ in range(rng.randint(1, most))
    ]


def draw(seed: int, only: FaultKind | None = None) -> Scenario:
    """The scenario of a seed; or one with a single kind of fault."""
    rng = random.Random(seed)
    hosts_per_slice = rng.choice((1, 1, 2, 2, 3))
    slots = rng.choice((1, 1, 2))
    per_slice = hosts_per_slice * slots
    wanted = rng.randint(1, 3)
    slices = wanted + rng.randint(0, 2)
    workers_max = wanted * per_slice
    elastic = rng.random() < 0.5
    workers_min = rng.randint(1, wanted) * per_slice if elastic else workers_max
    group_size = None
    if rng.random() < 0.5:
        group_size = rng.choice([n for n in range(1, per_slice + 1) if per_slice % n == 0] + [per_slice])
    everything = sorted(set(FaultKind) - _APART)
    families = frozenset(rng.sample(everything, rng.choice((1, 1, 2, 3, 5, len(everything)))))
    hangs = random.Random(f"hangs of {seed}")  # of its own, so that the rest of a seed's schedule stays
    if hangs.random() < 0.2:
        families |= {FaultKind.HANG}
    returns = random.Random(f"swapped in {seed}")
    if returns.random() < 0.15:
        families |= {FaultKind.RETURN}
    lists = random.Random(f"lists of {seed}")
    if lists.random() < 0.15:
        families |= {FaultKind.LISTING}
    if only is not None:
        families = frozenset({only})
    limits = (-1, -1, -1, 0, 1, 3)
    replicas = random.Random(f"replicas of {seed}")
    settings = Settings(
        workers_min=workers_min,
        workers_max=workers_max,
        group_size=group_size,
        groups_min=workers_min // group_size if group_size is not None and elastic else 1,
        max_replica_failures=replicas.choice((None, None, 0, 2)) if group_size is not None else None,
        max_failures=rng.choice(limits),
        controller_failure_limit=rng.choice(limits),
        max_preemption_failures=rng.choice(limits),
        spread=rng.random() < 0.3,
        resize_interval_s=rng.choice((5.0, 60.0)),
        migrate_margin_s=rng.choice((2.0, 10.0)),
        snapshot_copies=replicas.choice((0, 1, 1, 2)) if group_size is None else 0,
        deadlines=Deadlines(
            # Each fault here is drawn by itself: several that look alike don't have one cause.
            first_start_attempts=1_000_000,
            reserve_s=rng.choice((20.0, 60.0)),
            prepare_s=rng.choice((20.0, 60.0)),
            start_s=rng.choice((10.0, 60.0)),
            healthy_s=rng.choice((10.0, 60.0)),
            upload_wait_s=rng.choice((0.0, 5.0, 30.0)),
            orphan_s=120.0,
            storage_s=random.Random(f"patience of {seed}").choice((5.0, 15.0, 60.0)),
            take_over_s=random.Random(f"take-overs of {seed}").choice((5.0, 30.0)),
        ),
    )

    fault_s = rng.choice((20.0, 60.0, 150.0))
    steps = rng.choice((3, 6, 15))
    # A step that is slower than a hang is noticed must not be taken for one.
    slower = random.Random(f"slow steps of {seed}").choice((1.0, 4.0)) if FaultKind.HANG in families else 1.0
    extra = random.Random(f"storage of {seed}")
    keep = rng.choice((None, None, 1, 2, 5))

    strikes = [*_strikes(rng, families - _APART, fault_s)]
    if FaultKind.HANG in families:
        strikes += _more(hangs, FaultKind.HANG, 3, fault_s)
    if FaultKind.RETURN in families:
        strikes += _more(returns, FaultKind.RETURN, 2, fault_s / 2)
    if FaultKind.LISTING in families:
        strikes += _more(lists, FaultKind.LISTING, 4, fault_s)

    def if_any(family: FaultKind, *choices: float) -> float:
        drawn = rng.choice(choices)
        return drawn if family in families else 0.0

    return Scenario(
        seed=seed,
        slices=slices,
        hosts_per_slice=hosts_per_slice,
        slots=slots,
        settings=settings,
        families=families,
        strikes=tuple(sorted(strikes, key=lambda strike: strike.at)),
        fault_s=fault_s,
        steps=steps,
        step_s=slower * fault_s * rng.choice((0.1, 0.6, 1.2)) / steps,
        checkpoint_every=rng.choice((1, 3, 10)),
        asynchronous=rng.choice((0.0, 0.0, 0.5, 1.0)),
        partless=rng.choice((0.0, 0.3)),
        keep=keep,
        scored=keep is not None and extra.random() < 0.3,
        validates=extra.random() < 0.2,
        compact_after=extra.choice((3, 5, 10)),
        stop_in=rng.choice(_STOPPED_IN) if FaultKind.STOP in families and rng.random() < 0.5 else None,
        unloadable=FaultKind.START in families and rng.random() < 0.02,
        slow_reservation=if_any(FaultKind.RESERVE, 0.0, 0.3),
        refused_reservation=if_any(FaultKind.RESERVE, 0.1, 0.5),
        partial_reservation=if_any(FaultKind.RESERVE, 0.0, 0.2),
        failed_preparation=if_any(FaultKind.START, 0.0, 0.1, 0.4),
        hung_preparation=if_any(FaultKind.START, 0.0, 0.05),
        failed_spawn=if_any(FaultKind.START, 0.0, 0.1),
        failed_rendezvous=if_any(FaultKind.START, 0.0, 0.1, 0.3),
        failed_upload=if_any(FaultKind.STORAGE, 0.0, 0.2),
        lost_answers=if_any(FaultKind.STORAGE, 0.0, 0.02, 0.1),
        duplicates=if_any(FaultKind.DUPLICATE, 0.1, 0.5),
        new_code=if_any(FaultKind.DRIVER, 0.0, 0.3),
        clock_apart=if_any(FaultKind.CLOCK, 0.0, 86_400.0, -3_600.0),
        snapshots=rng.random() < 0.5 and settings.group_size is None,
        one_machine=random.Random(f"machines of {seed}").random() < 0.5,
    )
