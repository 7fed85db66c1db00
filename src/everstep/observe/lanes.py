"""What every worker of a run did when, for a timeline.

Thousands of workers mostly do what the run does: so there is one track of states for the run, one for each
replica group that went its own way for a while, and for each worker only where it was, and when.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from everstep.control import commands as c
from everstep.control.table import Phase
from everstep.journal import records
from everstep.topology.slices import natural_key

STATE_OF: dict[str, str] = {
    Phase.NEW: "starting",
    Phase.PLACING: "starting",
    Phase.STARTING: "starting",
    Phase.RUNNING: "training",
    Phase.SETTLING: "restarting",
    Phase.STOPPING: "restarting",
    Phase.BACKOFF: "restarting",
    Phase.WAITING: "waiting",
    Phase.ENDING: "ending",
    Phase.ENDED: "",
}
"""What a phase looks like from outside. Empty: there are no workers."""
AWAY = "driver away"

Track = list[tuple[float, str]]
"""States, each from when."""


@dataclass
class WorkerLane:
    """One rank in one place."""

    place: records.Place
    spans: list[tuple[float, float | None]] = field(default_factory=list)
    """From when to when it was there; ``None``: it still is."""

    def end(self, now: float) -> None:
        if self.spans and self.spans[-1][1] is None:
            self.spans[-1] = (self.spans[-1][0], now)


class Lanes:
    """``take`` takes one record in."""

    def __init__(self) -> None:
        self.run: Track = []
        self.groups: dict[int, Track] = {}
        """Of replica groups, where it isn't what the run did; an empty state: from here on it is."""
        self.group_of: dict[int, int] = {}
        """Of the ranks that there are."""
        self._lanes: dict[records.Place, WorkerLane] = {}
        self._here: dict[int, WorkerLane] = {}
        self._now: float | None = None
        self._before_opened: int | None = None
        """How long the run's track was before this driver came, if that isn't known to have been an end."""

    def take(self, record: records.AnyRecord, when: float | None) -> None:
        if when is None:
            return
        before = self._now
        now = self._now = max(when, before if before is not None else when)
        match record:
            case records.Opened():
                self._opened(before, now)
                if record.workers_max == 0:  # the driver's process trains
                    self._place([records.Place(0, record.owner.host, "", 0)], now)
            case records.TakenOver():
                self._taken_over()
            case records.Placed():
                self._leave([*record.gone, *(place.rank for place in record.places)], now)
                self._place(record.places, now)
            case records.Closed():
                self._turn("", now)
            case c.PhaseChanged():
                self._before_opened = None
                self._turn(STATE_OF.get(record.phase, ""), now)
            case c.FailureSeen():
                self._failed(record, now)
            case c.GroupsStarting():
                for group, _ in record.generations:
                    self._turn_group(group, "starting", now)
            case c.GroupStarted():
                self._started(record, now)
            case _:
                pass

    def at_host(self, host: str) -> list[int]:
        """The ranks that are there."""
        return [rank for rank, lane in self._here.items() if lane.place.host == host]

    # ------------------------------------------------------------------ the run

    def _opened(self, before: float | None, now: float) -> None:
        self._before_opened = None
        if before is not None and self.run and self.run[-1][1]:
            self._before_opened = len(self.run)
            self._turn(AWAY, before)
        self._turn("starting", now)

    def _taken_over(self) -> None:
        """Workers did what they did, while nobody drove."""
        if self._before_opened is not None:
            del self.run[self._before_opened :]
            self._before_opened = None

    def _turn(self, state: str, now: float) -> None:
        _turn(self.run, state, now)

    # ------------------------------------------------------------------ replica groups

    def _failed(self, record: c.FailureSeen, now: float) -> None:
        failure = record.failure
        if failure.rank is not None:
            concerned = {self.group_of.get(failure.rank, 0)}
        else:
            concerned = {self.group_of.get(rank, 0) for rank in self.at_host(failure.host or "")}
        if len({*self.group_of.values()}) > 1:
            for group in concerned:
                self._turn_group(group, "restarting", now)

    def _started(self, record: c.GroupStarted, now: float) -> None:
        partial = record.rung.is_partial
        started = {group for group, _ in record.generations} if partial else {*self.groups}
        for group in started:
            self._turn_group(group, "", now)
        if not self._here:  # written before journals had places
            self._place([records.Place(rank, "", "", 0) for rank in range(record.world_size)], now)

    def _turn_group(self, group: int, state: str, now: float) -> None:
        _turn(self.groups.setdefault(group, []), state, now)

    # ------------------------------------------------------------------ places

    def _leave(self, ranks: Iterable[int], now: float) -> None:
        for rank in ranks:
            if rank in self._here:
                self._here.pop(rank).end(now)
                self.group_of.pop(rank, None)

    def _place(self, places: Iterable[records.Place], now: float) -> None:
        for place in places:
            lane = self._lanes.setdefault(place, WorkerLane(place))
            if not lane.spans or lane.spans[-1][1] is not None:
                lane.spans.append((now, None))
            self._here[place.rank] = lane
            self.group_of[place.rank] = place.group

    # ------------------------------------------------------------------ as JSON

    def as_plain(self) -> dict[str, Any]:
        lanes = sorted(
            self._lanes.values(),
            key=lambda lane: (natural_key(lane.place.slice), natural_key(lane.place.host), lane.place.rank),
        )
        return {
            "run": self.run,
            "groups": {str(group): track for group, track in self.groups.items()},
            "lanes": [
                {
                    "rank": lane.place.rank,
                    "host": lane.place.host,
                    "slice": lane.place.slice,
                    "group": lane.place.group,
                    "spans": lane.spans,
                }
                for lane in lanes
            ],
        }


def _turn(track: Track, state: str, now: float) -> None:
    if track and track[-1][0] >= now:  # a state that took no time is left out
        track.pop()
    if not track or track[-1][1] != state:
        track.append((now, state))
