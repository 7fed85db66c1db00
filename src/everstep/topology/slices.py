"""Hosts, slices, and which slices are whole.

A slice is hosts that are wired together and live and die as one; a lone host is a slice of one. Whether a
slice may be used is decided here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

HostId = str
SliceName = str

_DIGITS = re.compile(r"([0-9]+)")

_TELL = 8
"""How many broken slices are described, of perhaps thousands."""


@lru_cache(maxsize=1 << 18)
def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Sort key under which ``slice-2`` comes before ``slice-10``. Different names never compare equal."""
    parts = _DIGITS.split(name)  # text and numbers alternate, beginning with text
    key = tuple((0, int(part), "") if i % 2 else (1, 0, part) for i, part in enumerate(parts) if part)
    return key, name


class HostView(msgspec.Struct, frozen=True):
    """A host as the engine sees it at one time."""

    id: HostId
    slice: SliceName
    index: int
    """Place in its slice, from 0."""
    slots: int
    """How many workers of this run fit on it."""
    hosts_in_slice: int = 1
    """How many hosts the slice has when it is whole."""
    alive: bool = True
    free: bool = True
    """Whether this run may use it: nothing that it needs there is held by others."""


class Slice(msgspec.Struct, frozen=True):
    """A whole slice: every host of it, in order."""

    name: SliceName
    hosts: tuple[HostView, ...]

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def divisible(self) -> bool:
        """A lone host may be filled in part; hosts that are wired together are used together."""
        return len(self.hosts) == 1


def by_slice(hosts: Iterable[HostView]) -> Mapping[SliceName, list[HostView]]:
    """Hosts by slice, slices in natural order, hosts by index."""
    grouped: dict[SliceName, list[HostView]] = {}
    for host in hosts:
        grouped.setdefault(host.slice, []).append(host)
    for members in grouped.values():
        members.sort(key=lambda host: (host.index, host.id))
    return dict(sorted(grouped.items(), key=lambda item: natural_key(item[0])))


def is_whole(members: Sequence[HostView]) -> bool:
    """Every place of the slice filled by one host that is alive, free and has room.

    A dead host that is still listed beside the one that took its place does no harm.
    """
    living = [host for host in members if host.alive]
    if not living:
        return False
    expected = living[0].hosts_in_slice
    return [host.index for host in living] == list(range(expected)) and all(
        host.hosts_in_slice == expected and host.free and host.slots > 0 for host in living
    )


def whole_slices(hosts: Iterable[HostView]) -> list[Slice]:
    """The slices that may be used now, in natural order."""
    return [
        Slice(name, tuple(host for host in members if host.alive))
        for name, members in by_slice(hosts).items()
        if is_whole(members)
    ]


def describe_shortage(hosts: Iterable[HostView], besides: Collection[SliceName] = ()) -> str:
    """What there is besides these slices, and what is missing in those that are not whole."""
    grouped = {name: members for name, members in by_slice(hosts).items() if name not in besides}
    if not grouped:
        return "no other host is known" if besides else "no host is known"
    broken = [f"{name}: {_describe(members)}" for name, members in grouped.items() if not is_whole(members)]
    whole = [members for members in grouped.values() if is_whole(members)]
    slots = sum(host.slots for members in whole for host in members if host.alive)
    found = f"{len(whole)} whole {'slice is' if len(whole) == 1 else 'slices are'} free"
    said = [f"{found}, with room for {slots}" if whole else found, *broken[:_TELL]]
    if len(broken) > _TELL:
        said.append(f"and {len(broken) - _TELL} more that are not whole")
    return "; ".join(said)


def _describe(members: Sequence[HostView]) -> str:
    living = [host for host in members if host.alive]
    expected = members[0].hosts_in_slice
    lost = [host.id for host in members if not host.alive]
    busy = [host.id for host in living if not host.free]
    small = [host.id for host in living if host.free and host.slots <= 0]
    why = []
    if len(living) < expected:
        why.append(f"{len(living)} of {expected} hosts there")
    if lost:
        why.append(f"lost: {', '.join(lost)}")
    if busy:
        why.append(f"in use by others: {', '.join(busy)}")
    if small:
        why.append(f"too small for a worker: {', '.join(small)}")
    return f"not whole ({'; '.join(why) or 'host indices are incomplete'})"
