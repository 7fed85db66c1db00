"""Faults of the store, and of the way to it."""

from __future__ import annotations

import random

from everstep.sim.cluster import Cluster
from everstep.sim.disk import Lag
from everstep.sim.rules import RUN
from everstep.sim.scenario import FaultKind
from everstep.sim.seats import Seats
from everstep.sim.time import VirtualTime

_QUICK = 1e12


class StorageFaults:
    def __init__(self, time: VirtualTime, cluster: Cluster, seats: Seats) -> None:
        self._time = time
        self._cluster = cluster
        self._seats = seats
        self._disk = seats.disk
        self._rules = seats.rules

    def strike(self, family: FaultKind, rng: random.Random) -> str:
        self._cluster.fault()
        seconds = rng.choice([rng.uniform(0.0, 3.0), rng.uniform(0.0, 90.0)])
        match family:
            case FaultKind.STORAGE:
                return self._rot(rng)
            case FaultKind.CUT:
                return self._cut(rng, seconds)
            case FaultKind.DISK:
                return self._full(seconds) if rng.random() < 0.5 else self._slow(rng, seconds)
            case FaultKind.JOURNAL:
                return self._damage_journal(rng)
            case FaultKind.LISTING:
                return self._lag(rng, seconds)
            case _:
                raise AssertionError(f"{family} is no fault of the store")

    def calm(self) -> None:
        self._disk.full, self._disk.bytes_per_s = False, _QUICK
        self._catch_up()

    def _rot(self, rng: random.Random) -> str:
        """A bit rots in the newest checkpoint: workers that restore it fail with that error."""
        committed = self._rules.restorable()
        if not committed or rng.random() < 0.7:
            return ""
        folder = committed[-1]
        names = [n for n in self._disk.below(f"{RUN}{folder}/") if n.split("/")[-1][:5] in ("shard", "state")]
        if not names:
            return ""
        self._rules.spoilt.add(folder)
        self._flip(names[0], rng)
        return f"{folder} is damaged"

    def _cut(self, rng: random.Random, seconds: float) -> str:
        living = self._seats.living()
        if not living:
            return ""
        seat = rng.choice(living)
        seat.network.cut_until = self._time.now + seconds
        return f"{seat.name} is cut off from storage for {seconds:.1f} s"

    def _full(self, seconds: float) -> str:
        self._disk.full = True
        self._time.after(seconds, lambda: setattr(self._disk, "full", False))
        return f"storage is full for {seconds:.1f} s"

    def _slow(self, rng: random.Random, seconds: float) -> str:
        self._disk.bytes_per_s = rng.choice([50.0, 1000.0])
        self._time.after(seconds, lambda: setattr(self._disk, "bytes_per_s", _QUICK))
        return f"storage is slow for {seconds:.1f} s"

    def _lag(self, rng: random.Random, seconds: float) -> str:
        """Of what was made, or deleted, or both: as far as a folder on a network may be behind."""
        lag = rng.choice([rng.uniform(0.0, 3.0), rng.uniform(0.0, 60.0)])
        made, gone = rng.choice([(lag, lag), (lag, 0.0), (0.0, lag)])
        self._disk.lag = Lag(made, gone)
        self._time.after(seconds, self._catch_up)
        return f"lists lag behind for {seconds:.1f} s: {made:.1f} s what was made, {gone:.1f} s what is gone"

    def _catch_up(self) -> None:
        self._disk.lag = Lag()
        self._rules.lists_caught_up()

    def _damage_journal(self, rng: random.Random) -> str:
        """One object of the journal is lost, or one of its bits."""
        names = self._disk.below(f"{RUN}journal/")
        if not names:
            return ""
        self._rules.damaged = True
        name = rng.choice(names)
        if rng.random() < 0.5 or not self._disk.objects[name]:
            self._disk.lose(name)
            self._rules.lost(name)
        else:
            self._flip(name, rng)
        return f"{name} is damaged"

    def _flip(self, name: str, rng: random.Random) -> None:
        data = bytearray(self._disk.objects[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        self._disk.objects[name] = bytes(data)


OF_STORAGE = frozenset(
    {FaultKind.STORAGE, FaultKind.CUT, FaultKind.DISK, FaultKind.JOURNAL, FaultKind.LISTING}
)
