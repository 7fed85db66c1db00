"""Ending what is left of a run on the cluster, up to one's own lease.

A driver that ends something may have been replaced, and not know it yet. Names show what a later driver has
made, and an agent that a later one has taken over refuses to end. An agent that doesn't answer can't say
whose it is: the run's sweeper ends it, which every driver pings before it takes anything over.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from everstep.engine.ray import cluster
from everstep.engine.ray.sweeper import name_of

_ANSWER_S = 2.0
"""An actor that lives answers at once."""


class NobodyAnswersError(Exception):
    """An agent doesn't say whose it is, nor does the sweeper."""


class EndAnswers(NamedTuple):
    refusing: list[str]
    """Agents that a driver with a later lease has taken over."""
    silent: list[str]
    """Agents of which that isn't known. All others end."""


def end_slice(tag: str, lease: int, group: str) -> None:
    """Remove the placement group of this name, and with it its agents, unless a later driver has them."""
    answers = _ask_to_end(cluster.actors(f"{group}/"), lease, _ANSWER_S)
    if answers.refusing:
        return
    if answers.silent:
        _end_silent(tag, lease, answers.silent, [group])
    else:
        cluster.remove_named(group)


def end_all(tag: str, lease: int, limit_s: float) -> None:
    """End all that the run has, until nothing is left; or no longer than this. What is left then is the
    sweeper's to end, unless a later driver has it, and the sweeper, too.
    """
    deadline, sweeper = time.monotonic() + limit_s, name_of(tag)
    while True:
        agents = {name: name.rpartition("/")[0] for name in cluster.actors(tag) if name != sweeper}
        reserved = {number: record["name"] for number, record in cluster.groups(tag).items()}
        found = {*agents.values(), *reserved.values()}
        theirs = {group for group in found if cluster.lease_of(tag, group) > lease}
        asked = [name for name, group in agents.items() if group not in theirs]
        answers = _ask_to_end(asked, lease, (deadline - time.monotonic()) / 2)
        theirs |= {agents[name] for name in answers.refusing}
        unknown = {agents[name] for name in answers.silent} - theirs
        if unknown and not _silent_have_ended(tag, lease, answers.silent, unknown):
            theirs |= unknown
        if found <= theirs:
            if not theirs:
                _dismiss(sweeper, lease)
            return
        for name, group in agents.items():
            if group not in theirs | unknown:
                cluster.kill(name)
        for number, group in reserved.items():
            if group not in theirs | unknown:
                cluster.remove_group(number)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _ask_to_end(agents: Collection[str], lease: int, limit_s: float) -> EndAnswers:
    asked: dict[Any, str] = {}
    answers = EndAnswers([], [])
    for name in agents:
        try:
            asked[ray.get_actor(name, namespace=cluster.NAMESPACE).end.remote(lease)] = name
        except ValueError:
            pass  # it is gone already
        except TypeError:
            answers.silent.append(name)  # of a version that knows no leases
    if asked:
        answered, silent = ray.wait([*asked], num_returns=len(asked), timeout=max(0.0, limit_s))
        answers.refusing.extend(asked[one] for one in answered if not _has_ended(one))
        answers.silent.extend(asked[one] for one in silent)
    return answers


def _has_ended(answer: Any) -> bool:
    try:
        return bool(ray.get(answer))
    except RayError:
        return True  # it was ending already


def _end_silent(tag: str, lease: int, agents: list[str], groups: Collection[str]) -> bool:
    """Let the sweeper end them. False: there is a later driver, and they may be its own."""
    try:
        sweeper = ray.get_actor(name_of(tag), namespace=cluster.NAMESPACE)
        return bool(ray.get(sweeper.end.remote(lease, agents, [*groups]), timeout=_ANSWER_S))
    except (RayError, ValueError) as error:
        raise NobodyAnswersError(f"no answer from {', '.join(agents)}, nor from the run's sweeper") from error


def _silent_have_ended(tag: str, lease: int, agents: list[str], groups: Collection[str]) -> bool:
    try:
        return _end_silent(tag, lease, agents, groups)
    except NobodyAnswersError:
        return False  # once no driver pings it any more, the sweeper ends all


def _dismiss(sweeper: str, lease: int) -> None:
    try:
        leaving = ray.get_actor(sweeper, namespace=cluster.NAMESPACE).leave.remote(lease)
        ray.wait([leaving], timeout=_ANSWER_S)
    except ValueError:
        pass  # it is gone already
