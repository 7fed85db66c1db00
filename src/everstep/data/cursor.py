"""The cursor: the place in a stream, with what the stream was made from, as plain values.

A few numbers and two short texts: ``json``, ``pickle``, ``torch.save`` and Orbax take it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.data.arguments import index_of
from everstep.data.errors import ResumeRefusedError
from everstep.data.plan import StreamPlace

VERSION = 1

Fingerprint = Mapping[str, int | bool | str]
"""What decides which sample is the i-th, and how many a step has."""


def encoded(place: StreamPlace, fingerprint: Fingerprint) -> dict[str, Any]:
    lanes = {"lanes": [[number, state] for number, state in place.lanes.items()]} if place.lanes else {}
    return {"version": VERSION, "step": place.step, "sample": place.sample, **lanes, "of": dict(fingerprint)}


@dataclass(frozen=True)
class _Cursor:
    """A cursor whose parts are what they should be."""

    step: int
    sample: int
    lanes: Mapping[int, Any]
    of: Fingerprint


def decoded(states: Sequence[object], fingerprint: Fingerprint, accepted: Iterable[str]) -> StreamPlace:
    """The place that a cursor says; of several, one for each rank, with the lanes of all."""
    if not states:
        raise _refused("load_state_dict got an empty list.")
    cursors = [_parsed(state) for state in states]
    for cursor in cursors:
        _check_fingerprint(cursor, fingerprint, set(accepted))
    first = cursors[0]
    for cursor in cursors:
        if (cursor.step, cursor.sample) != (first.step, first.sample):
            raise ResumeRefusedError(
                f"The cursors are of different steps: {first.step} and {cursor.step}.",
                "Give the states that all ranks saved at the same step.",
                "Stream.load_state_dict",
            )
    lanes = {number: lane for cursor in cursors for number, lane in cursor.lanes.items()}
    return StreamPlace(first.step, _sample_now(first, fingerprint), _lanes_now(lanes, first.of, fingerprint))


def _parsed(state: object) -> _Cursor:
    if not isinstance(state, Mapping) or not {"version", "step", "sample", "of"} <= set(state):
        raise _refused(
            f"load_state_dict got {type(state).__name__} {str(state)[:80]}, which isn't a stream's state."
        )
    if state["version"] != VERSION:
        raise ResumeRefusedError(
            f"The cursor has version {state['version']!r}, and this Everstep reads {VERSION}: its order of "
            "samples is another one.",
            "Resume with the version of Everstep that the run began with.",
            "Stream.version",
        )
    # A checkpointer for arrays gives numbers back as such; in a cursor they are Python's own.
    of = state["of"]
    if not isinstance(of, Mapping) or not of.get("length", 1):
        raise _refused(f"The cursor is broken: it is that of a stream of {str(of)[:80]}.")
    lanes = _parsed_lanes(state.get("lanes", ()))
    return _Cursor(_count(state, "step"), _count(state, "sample"), lanes, of)


def _count(state: Mapping[str, Any], name: str) -> int:
    count = index_of(state[name])
    if count is None or count < 0:
        raise _refused(f"The cursor is broken: its {name} is {state[name]!r}, expected 0 or more.")
    return count


def _parsed_lanes(lanes: object) -> dict[int, list[Any]]:
    """A lane has its pass, window and shard, its reader's state, and how much of the window is done."""
    try:
        found = {int(number): list(lane) for number, lane in lanes}  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise _refused(f"The cursor is broken: its lanes are {str(lanes)[:80]}.") from None
    for lane in found.values():
        if len(lane) != 5 or any(index_of(lane[at]) is None for at in (0, 1, 2, 4)):
            raise _refused(f"The cursor is broken: it has a lane {str(lane)[:80]}.")
    return found


def _refused(what: str) -> ResumeRefusedError:
    return ResumeRefusedError(what, "Give what state_dict() returned.", "Stream.load_state_dict")


def _check_fingerprint(cursor: _Cursor, now: Fingerprint, accepted: set[str]) -> None:
    before = cursor.of
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    refused = [name for name in changed if name not in accepted]
    if not refused:
        return
    changes = "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in refused)
    names = ", ".join(f'"{name}"' for name in refused)
    raise ResumeRefusedError(
        f"The stream isn't the one that was saved at step {cursor.step}: {changes}.",
        "Give the same as before, or start a new run. To go on from this place all the same, give the Stream "
        f"accept_changes=[{names}]; if the order is another one, samples of the current pass may then come "
        "twice or not at all.",
        f"Stream.{refused[0]}",
    )


def _sample_now(cursor: _Cursor, now: Fingerprint) -> int:
    """The same pass, and as far in it, if the length has changed."""
    before, length = cursor.of.get("length"), now.get("length")
    if not isinstance(before, int) or not isinstance(length, int) or before == length:
        return cursor.sample
    epoch, index = divmod(cursor.sample, before)
    return epoch * length + min(index, length)


def _lanes_now(lanes: Mapping[int, Any], before: Fingerprint, now: Fingerprint) -> dict[int, Any]:
    """With another window, a lane begins its current one anew. With another order of shards, as many shards
    count as done as before, and the next one is read from its beginning: the reader's state was of another
    shard.
    """

    def changed(*names: str) -> bool:
        return any(before.get(name) != now.get(name) for name in names)

    if changed("seed", "shuffle", "shards", "lanes"):
        return {number: [epoch, done, shard, None, 0] for number, (epoch, done, shard, _, _) in lanes.items()}
    if changed("window"):
        return {number: [*lane[:4], 0] for number, lane in lanes.items()}
    return dict(lanes)
