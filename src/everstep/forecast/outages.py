"""The cluster at the start, and what happens to it: drawn from a mean time between failures, or read from a
trace.

What an outage means for the job is in ``hosts``.
"""

from __future__ import annotations

import csv
import heapq
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from everstep.forecast.question import ForecastQuestion
from everstep.topology.slices import HostId, HostView

TRACES = Path(__file__).parent / "traces"

OutageKind = Literal["crash", "lost", "back", "notice"]
"""``crash`` of a worker, ``lost`` or ``back`` of a host, ``notice`` that it will be lost."""


class Outage(msgspec.Struct, frozen=True, order=True):
    at: float
    kind: OutageKind
    host: HostId
    deadline: float = 0.0
    """Of a notice: when the host will be lost."""


class TraceError(ValueError):
    """A trace that can't be read: what was seen, and where."""


def cluster(question: ForecastQuestion) -> tuple[list[HostView], Iterator[Outage]]:
    """The hosts at the start, and what happens to them, in order of time."""
    if question.trace is not None:
        return _traced(load_trace(question.trace), question)
    size = question.hosts_per_slice
    hosts = [
        HostView(f"slice-{number}/{index}", f"slice-{number}", index, 1, size)
        for number in range(question.slices + question.spares)
        for index in range(size)
    ]
    if question.mtbf_h is None:
        return hosts, iter(())
    return hosts, drawn(question, [host.id for host in hosts])


def _traced(trace: list[Outage], question: ForecastQuestion) -> tuple[list[HostView], Iterator[Outage]]:
    assert question.hosts_per_slice == 1, "a trace lists single hosts"
    at_start = [o for o in trace if (o.kind, o.at) == ("back", 0.0)]
    later = [o for o in trace if (o.kind, o.at) != ("back", 0.0)]
    return [lone_host(o.host) for o in at_start], iter(with_notices(later, question.notice_s))


def lone_host(host: HostId) -> HostView:
    return HostView(host, slice=host, index=0, slots=1)


def read_trace(lines: Iterable[str], name: str) -> list[Outage]:
    """Lines ``milliseconds,add|remove,node``, in order of time."""
    found: list[Outage] = []
    kinds: dict[str, OutageKind] = {"add": "back", "remove": "lost"}
    for number, row in enumerate(csv.reader(lines), 1):
        if not row:
            continue
        try:
            at, what, node = float(row[0]) / 1000.0, row[1].strip(), row[2].strip()
            found.append(Outage(at, kinds[what], node))
        except (ValueError, IndexError, KeyError):
            raise TraceError(
                f"{name}, line {number}: expected 'milliseconds,add|remove,node', got {','.join(row)!r}"
            ) from None
        if len(found) > 1 and found[-1].at < found[-2].at:
            raise TraceError(f"{name}, line {number}: its time is before that of the line above")
    if not found:
        raise TraceError(f"{name} is empty: expected lines 'milliseconds,add|remove,node'")
    return found


def load_trace(path: str) -> list[Outage]:
    """From a file, or one that is shipped, by its name."""
    known = TRACES / f"{path}.csv"
    file = known if known.is_file() else Path(path)
    with file.open(newline="") as lines:
        return read_trace(lines, str(path))


def with_notices(outages: Iterable[Outage], notice_s: float) -> list[Outage]:
    """These, and a notice ``notice_s`` before each loss, or when the host came if that is later."""
    found = list(outages)
    came = {o.host: o.at for o in found if o.kind == "back"}
    if notice_s > 0:
        found += [
            Outage(max(o.at - notice_s, came.get(o.host, 0.0)), "notice", o.host, o.at)
            for o in found
            if o.kind == "lost"
        ]
    return sorted(found)


def drawn(question: ForecastQuestion, hosts: list[HostId]) -> Iterator[Outage]:
    """Failures of independent hosts, one after the other, and the return of those that were repaired."""
    assert question.mtbf_h is not None
    rng = random.Random(question.seed)
    rate = len(hosts) / (question.mtbf_h * 3600.0)
    away: list[tuple[float, HostId]] = []
    now = rng.expovariate(rate)
    while now < question.seconds:
        while away and away[0][0] <= now:
            back, host = heapq.heappop(away)
            yield Outage(back, "back", host)
        host = hosts[rng.randrange(len(hosts))]
        if rng.random() >= question.host_share:
            yield Outage(now, "crash", host)
        elif all(host != gone for _, gone in away):
            yield Outage(now, "lost", host)
            heapq.heappush(away, (now + question.repair_h * 3600.0, host))
        now += rng.expovariate(rate)
    for back, host in sorted(away):
        if back < question.seconds:
            yield Outage(back, "back", host)
