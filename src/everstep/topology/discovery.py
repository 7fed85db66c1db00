"""Which hosts make which slice, read off their labels: TPU slices, and domains of the user's own choice.

A cluster's own facts win over the table: how many hosts a slice has follows from the chips that its topology
has and the chips that its hosts have. A host without such a label is a slice of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.topology.accelerators import TopologyError, chips_in, chips_in_pod, generation_of
from everstep.topology.slices import HostId, HostView, SliceName, natural_key
from everstep.topology.wanted import Wanted

TPU_SLICE = "ray.io/tpu-slice-name"
TPU_WORKER = "ray.io/tpu-worker-id"
TPU_TOPOLOGY = "ray.io/tpu-topology"
TPU_POD_TYPE = "ray.io/tpu-pod-type"
ACCELERATOR = "ray.io/accelerator-type"
SLICE = "everstep.dev/slice"
"""The label of Everstep's operator for the slice of a node, with any accelerator."""
SLICE_HOST = "everstep.dev/slice-host"
"""The node's place in it, from 0."""


@dataclass(frozen=True)
class Machine:
    """A host of a cluster, before anybody asks what it is good for."""

    id: HostId
    labels: Mapping[str, str]
    total: Mapping[str, float]
    """All that it has, by resource."""
    available: Mapping[str, float]
    """What nobody holds now; what this run holds counts as available."""
    alive: bool = True
    name: str = ""
    hostname: str = ""
    """Only for the order of hosts, where no label gives one."""


def views(machines: Iterable[Machine], wanted: Wanted) -> tuple[HostView, ...]:
    """The machines that this run may use at all, as hosts of slices."""
    fitting = [machine for machine in machines if _may_serve(machine, wanted)]
    by_slice: dict[SliceName, list[Machine]] = {}
    for machine in fitting:
        by_slice.setdefault(_slice_of(machine, wanted), []).append(machine)
    return tuple(view for name, members in by_slice.items() for view in _slice_views(name, members, wanted))


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether labels are what a selector says, by Ray's rules."""
    return all(_matches(labels.get(key), rule) for key, rule in selector.items())


def _matches(value: str | None, rule: str) -> bool:
    if rule.startswith("!"):
        return not _matches(value, rule[1:])
    if rule.startswith("in(") and rule.endswith(")"):
        return value in [choice.strip() for choice in rule[3:-1].split(",")]
    return value == rule


def _may_serve(machine: Machine, wanted: Wanted) -> bool:
    if not matches(machine.labels, wanted.labels):
        return False
    if wanted.per_worker.get("TPU") and not machine.total.get("TPU"):
        return False
    if wanted.topology is not None and not _has_topology(machine, wanted.topology):
        return False
    if wanted.slice_label is not None and wanted.slice_label not in machine.labels:
        return False
    return wanted.accelerator_type is None or _is_kind(machine, wanted.accelerator_type)


def _has_topology(machine: Machine, topology: str) -> bool:
    """As its label says; where there is none, by the chips of its pod type, of which no two shapes are told
    apart.
    """
    given = machine.labels.get(TPU_TOPOLOGY)
    return given == topology if given is not None else _chips_of(machine) == chips_in(topology)


def _is_kind(machine: Machine, kind: str) -> bool:
    given = machine.labels.get(ACCELERATOR)
    if given is None and f"accelerator_type:{kind}" in machine.total:
        return True
    given = given or machine.labels.get(TPU_POD_TYPE)
    if given is None:
        return False
    try:
        return generation_of(given) == generation_of(kind)
    except TopologyError:
        return given.lower() == kind.lower()


def _slice_of(machine: Machine, wanted: Wanted) -> SliceName:
    label = wanted.slice_label or (TPU_SLICE if wanted.per_worker.get("TPU") else None)
    return machine.labels.get(label, machine.name or machine.id) if label else machine.name or machine.id


def _slice_views(name: SliceName, members: Sequence[Machine], wanted: Wanted) -> list[HostView]:
    indices = _indices(members, wanted)
    expected, per_host = _expected_hosts(members, indices, wanted)
    wired = expected > 1 or per_host != 0
    found = []
    for machine in members:
        room = slots_of(machine.total, wanted)
        now = slots_of(machine.available, wanted)
        odd = per_host and machine.total.get("TPU") != per_host
        # Hosts that are wired together are used whole; a lone one may serve others beside us.
        slots, free = (0 if odd else room, now >= room) if wired else (now, now > 0 or room == 0)
        found.append(HostView(machine.id, name, indices[machine.id], slots, expected, machine.alive, free))
    return found


def slots_of(resources: Mapping[str, float], wanted: Wanted) -> int:
    """How many workers fit into this much."""
    needs = {name: amount for name, amount in wanted.per_worker.items() if amount > 0}
    room = min((int(resources.get(name, 0) / amount + 1e-9) for name, amount in needs.items()), default=1)
    return room if wanted.at_most is None else min(room, wanted.at_most)


def _expected_hosts(
    members: Sequence[Machine], indices: Mapping[HostId, int], wanted: Wanted
) -> tuple[int, float]:
    """How many hosts the slice has when it is whole, and the chips of each (0: it isn't counted in chips;
    -1: they don't divide evenly, and no host can be used).
    """
    if wanted.slice_label is not None:
        # Nobody says how many hosts a domain has, unless the user does: as many as are known of.
        places = [indices[m.id] for m in members if m.alive]
        highest = max(places, default=0) if _is_numbered(members) else 0
        return wanted.hosts_per_slice or max(1, len(places), highest + 1), 0
    chips = _chips_of(members[0])
    if not wanted.per_worker.get("TPU") or chips is None or TPU_SLICE not in members[0].labels:
        return 1, 0
    per_host = max(machine.total.get("TPU", 0) for machine in members)
    return max(1, -int(-chips // per_host)), per_host if chips % per_host == 0 else -1


def _chips_of(machine: Machine) -> int | None:
    try:
        if TPU_TOPOLOGY in machine.labels:
            return chips_in(machine.labels[TPU_TOPOLOGY])
        if TPU_POD_TYPE in machine.labels:
            return chips_in_pod(machine.labels[TPU_POD_TYPE])
    except TopologyError:
        pass  # a label that says nothing we know
    return None


def _indices(members: Sequence[Machine], wanted: Wanted) -> dict[HostId, int]:
    """Places in the slice: as the hosts' labels say, or by host name where nothing does."""
    if wanted.slice_label is None:
        if any(TPU_WORKER in m.labels for m in members) or TPU_SLICE not in members[0].labels:
            return {m.id: _number(m, TPU_WORKER, "0") for m in members}
    elif _is_numbered(members):
        return {m.id: _number(m, SLICE_HOST) for m in members}
    return {m.id: i for i, m in enumerate(sorted(members, key=_order))}


def _is_numbered(members: Sequence[Machine]) -> bool:
    """The operator made these hosts as one slice, and numbered them. A domain of the user's own may hold
    several such slices, or none.
    """
    slices = {m.labels.get(SLICE) for m in members}
    return len(slices) == 1 and None not in slices and all(_number(m, SLICE_HOST) >= 0 for m in members)


def _number(machine: Machine, label: str, default: str = "") -> int:
    text = machine.labels.get(label, default)
    return int(text) if text.isdecimal() else -1


def _order(machine: Machine) -> tuple[object, ...]:
    """Those that are gone come last: the places of the living have no holes."""
    return (
        not machine.alive,
        natural_key(machine.labels.get(SLICE, "")),
        _number(machine, SLICE_HOST),
        natural_key(machine.name or machine.hostname),
        machine.id,
    )
