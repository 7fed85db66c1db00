"""Random schedules of kills and resizes: what was committed is what an undisturbed run would have seen.

The state of a run is modelled as it is saved in a real one: the cursor and what was trained on go into one
commit, at some steps, after the optimizer's. A kill at any instant loses what came after the last commit. The
ranks of the next attempt, as many as there happen to be, begin from that.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from data.ranks import all_ids, streams
from everstep.data import Step, Stream


@dataclass
class Run:
    """A run over several attempts. ``committed`` is what storage holds."""

    source: int
    options: dict[str, Any]
    chance: random.Random
    committed: tuple[dict[str, Any] | None, tuple[int, ...]] = (None, ())
    attempts: int = 0
    kills: dict[str, int] = field(default_factory=dict)

    def attempt(self, kill: bool) -> bool:
        """Train with some number of ranks until the end (true), or until it is killed (false)."""
        self.attempts += 1
        cursor, seen = self.committed
        group = streams(self.chance.randint(1, 16), self.source, **self.options)
        if cursor is not None:
            for stream in group:
                stream.load_state_dict(cursor)
        killed_at = self.chance.randint(0, 8) if kill else None
        for number, steps in enumerate(zip(*group, strict=True)):
            if number == killed_at and self.chance.random() < 0.3:
                return self._killed("between steps")
            ids = self._trained(steps, number == killed_at)
            if ids is None:
                return self._killed("inside of a step")
            seen += ids
            if number == killed_at and self.chance.random() < 0.5:
                return self._killed("before the commit")
            self._commit(group, seen)
            if number == killed_at:
                return self._killed("after the commit")
        self.committed = (group[0].state_dict(), seen)
        return True

    def _trained(self, steps: tuple[Step, ...], kill: bool) -> tuple[int, ...] | None:
        """Go through a step's micro-batches on all ranks, which aren't equally fast."""
        dealt: list[list[list[int]]] = [[] for _ in steps]
        running = [(rank, iter(step)) for rank, step in enumerate(steps)]
        left = self.chance.randint(0, sum(map(len, steps)) - 1) if kill and self.chance.random() < 0.5 else -1
        while running:
            if left == 0:
                return None
            left -= 1
            at = self.chance.randrange(len(running))
            rank, micros = running[at]
            micro = next(micros, None)
            if micro is None:
                del running[at]
            else:
                dealt[rank].append(micro.ids)
        most = max(map(len, dealt))
        return tuple(n for at in range(most) for rank in dealt if at < len(rank) for n in rank[at])

    def _commit(self, group: list[Stream], seen: tuple[int, ...]) -> None:
        cursors = [stream.state_dict() for stream in group]
        assert all(cursor == cursors[0] for cursor in cursors)
        if self.chance.random() < 0.5:  # a checkpoint isn't made at every step
            self.committed = (cursors[0], seen)

    def _killed(self, when: str) -> bool:
        self.kills[when] = self.kills.get(when, 0) + 1
        return False


def digest(ids: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(ids).encode()).hexdigest()


@pytest.mark.parametrize("batch", range(10))
def test_a_hundred_schedules_end_as_an_undisturbed_run(batch):
    kills: dict[str, int] = {}
    for schedule in range(100):
        chance = random.Random(f"{batch} {schedule}")
        source = chance.randint(1, 100)
        options = {
            "global_batch": chance.randint(1, 24),
            "micro_batch": chance.randint(1, 6),
            "seed": chance.randint(0, 99),
            "epochs": chance.randint(1, 2),
            "even": chance.random() < 0.3,
        }
        run = Run(source, options, chance)
        for _ in range(chance.randint(1, 6)):
            if run.attempt(kill=True):
                break
        else:
            assert run.attempt(kill=False)
        undisturbed = tuple(n for step in all_ids(1, source, **options) for n in step)
        assert digest(run.committed[1]) == digest(undisturbed), f"schedule {batch} {schedule}"
        for when, count in run.kills.items():
            kills[when] = kills.get(when, 0) + count
    assert set(kills) == {"between steps", "inside of a step", "before the commit", "after the commit"}


def test_the_model_notices_a_cursor_that_is_one_step_off(monkeypatch):
    """The test above can fail: with a place that moves when a step begins, samples are lost."""
    original = Stream.state_dict

    def too_far(self):
        state = original(self)
        return {**state, "step": state["step"] + 1, "sample": state["sample"] + self.batching.global_batch}

    monkeypatch.setattr(Stream, "state_dict", too_far)
    run = Run(100, {"global_batch": 4, "micro_batch": 2}, random.Random(1))
    while not run.attempt(kill=run.attempts < 3):
        pass
    undisturbed = tuple(n for step in all_ids(1, 100, global_batch=4, micro_batch=2) for n in step)
    assert digest(run.committed[1]) != digest(undisturbed)
