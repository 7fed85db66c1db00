"""What agents hold in memory, seen from outside."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from everstep.saved.snapshots import At
from everstep.snapshots.segments import Segment, Slot
from processes import ours, wait_for


def agents() -> dict[str, int]:
    """By host."""
    found = {}
    for pid, command in ours().items():
        _, is_agent, rest = command.partition("-m everstep.agent ")
        if is_agent:
            found[rest.split()[0]] = pid
    return found


def host_of(pid: int) -> str:
    """Whose agent a process descends from."""
    hosts = {agent: host for host, agent in agents().items()}
    while pid not in hosts:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return hosts[pid]


def held(agent: int) -> Iterator[tuple[int, At]]:
    """(rank, report) of the snapshots that are whole there."""
    for path in Path(f"/proc/{agent}/fd").iterdir():
        try:
            name = os.readlink(path)
            if "memfd:everstep-rank-" not in name or "-notes" not in name or not path.stat().st_size:
                continue  # something else, or just being made
            slot = Slot(Segment(os.open(path, os.O_RDWR)), {})
        except FileNotFoundError:
            continue  # closed just now
        label = slot.label
        slot.close()
        if label is not None:
            yield int(name.split("everstep-rank-")[1].split("-")[0]), label.at


def copied(pids: Collection[int], ranks: int) -> At | None:
    """The newest that two hosts have of every rank."""
    found: dict[int, list[At]] = {rank: [] for rank in range(ranks)}
    for pid in pids:
        newest: dict[int, At] = {}
        for rank, at in held(pid):
            newest[rank] = max(at, newest.get(rank, at))
        for rank, at in newest.items():
            found.setdefault(rank, []).append(at)
    each = [sorted(some, reverse=True) for some in found.values()]
    return min((some[1] for some in each), default=None) if all(len(some) > 1 for some in each) else None


def wait_for_copies(ranks: int, epoch: int) -> At:
    """Until there is a snapshot of this attempt on two hosts each, and the driver knows of it: it has the
    next one copied after that.
    """
    pids = list(agents().values())
    seen: list[At] = []

    def known() -> bool:
        at = copied(pids, ranks)
        if at is not None and at.epoch == epoch and at not in seen:
            seen.append(at)
        return len(seen) > 1

    wait_for(known, f"copies of a snapshot of attempt {epoch}", look_s=0.2)
    return seen[0]
