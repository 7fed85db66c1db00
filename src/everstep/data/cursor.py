"""The cursor: the place in a stream, with what the stream was made from, as plain values.

A few numbers and two short texts: ``json``, ``pickle``, ``torch.save`` and Orbax take it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everstep.data.errors import ResumeRefusedError
from everstep.data.plan import Place

VERSION = 1

Fingerprint = Mapping[str, int | bool | str]
"""What decides which sample is the i-th, and how many a step has."""


def encoded(place: Place, fingerprint: Fingerprint) -> dict[str, Any]:
    lanes = {"lanes": [[number, state] for number, state in place.lanes.items()]} if place.lanes else {}
    return {"version": VERSION, "step": place.step, "sample": place.sample, **lanes, "of": dict(fingerprint)}


def decoded(states: Sequence[Mapping[str, Any]], fingerprint: Fingerprint, accepted: Iterable[str]) -> Place:
    """The place that a cursor says; of several, one for each rank, with the lanes of all."""
    for state in states:
        _check_shape(state)
        _check_fingerprint(state, fingerprint, set(accepted))
    first = states[0]
    for state in states:
        if (state["step"], state["sample"]) != (first["step"], first["sample"]):
            raise ResumeRefusedError(
                f"The cursors are of different steps: {first['step']} and {state['step']}.",
                "Give the states that all ranks saved at the same step.",
                "Stream.load_state_dict",
            )
    lanes = {number: lane for state in states for number, lane in state.get("lanes", ())}
    return Place(first["step"], _sample_now(first, fingerprint), lanes)


def _check_shape(state: object) -> None:
    fits = isinstance(state, Mapping) and {"version", "step", "sample", "of"} <= set(state)
    if not fits or not isinstance(state, Mapping):
        raise ResumeRefusedError(
            f"load_state_dict got {type(state).__name__} {str(state)[:80]}, which isn't a stream's state.",
            "Give what state_dict() returned.",
            "Stream.load_state_dict",
        )
    if state["version"] != VERSION:
        raise ResumeRefusedError(
            f"The cursor has version {state['version']}, and this Everstep reads {VERSION}: its order of "
            "samples is another one.",
            "Resume with the version of Everstep that the run began with.",
            "Stream.version",
        )


def _check_fingerprint(state: Mapping[str, Any], now: Fingerprint, accepted: set[str]) -> None:
    before: Fingerprint = state["of"]
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    refused = [name for name in changed if name not in accepted]
    if not refused:
        return
    told = "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in refused)
    names = ", ".join(f'"{name}"' for name in refused)
    raise ResumeRefusedError(
        f"The stream isn't the one that was saved at step {state['step']}: {told}.",
        "Give the same as before, or start a new run. To go on from this place all the same, give the Stream "
        f"accept_changes=[{names}]; if the order is another one, samples of the current pass may then come "
        "twice or not at all.",
        f"Stream.{refused[0]}",
    )


def _sample_now(state: Mapping[str, Any], now: Fingerprint) -> int:
    """The same pass, and as far in it, if the length has changed."""
    sample, before, length = state["sample"], state["of"].get("length"), now.get("length")
    if not isinstance(before, int) or not isinstance(length, int) or before == length:
        return int(sample)
    epoch, index = divmod(sample, before)
    return int(epoch * length + min(index, length))
