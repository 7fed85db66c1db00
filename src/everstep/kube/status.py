"""A cluster's status, from what there is. Pure; the same for the same facts, so that only a change is
written.

The first fields are KubeRay's. ``slices``, ``groups``, ``refused``, ``failing`` and some conditions are ours:
how many replicas are whole, which aren't, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.kube import gangs, quantities
from everstep.kube.backoff import ApiRefusal, ReplicaFailure, remembered
from everstep.kube.conditions import conditions, invalid_spec, stamp
from everstep.kube.facts import ClusterFacts
from everstep.kube.reconcile import Observed
from everstep.kube.replicas import Replica, ReplicaState
from everstep.kube.spec import ClusterSpec, GroupSpec
from everstep.kube.validation import Problem
from everstep.kube.view import time_of

MOST_LISTED = 50
"""How many replicas that aren't ready are listed for a group."""

MOST_REMEMBERED = 500
"""Replicas that have failed, for the next operator. An object that is too large can't be written at all."""

Status = dict[str, Any]


def describe(
    cluster: ClusterSpec, seen: Observed, unsupported: Sequence[str], before: Mapping[str, Any], now: float
) -> Status:
    facts = ClusterFacts(cluster, seen, unsupported, before, now)
    groups = [_group(facts, group) for group in cluster.groups]
    status: Status = {
        "observedGeneration": cluster.generation,
        **_state(facts),
        **_counts(facts),
        **_resources(cluster),
        "head": _head(facts),
        "endpoints": _endpoints(facts),
        **({"gang": gang.name} if (gang := gangs.choose(cluster, seen.served)) is not None else {}),
        "slices": f"{sum(g['ready'] for g in groups)}/{sum(g['desired'] for g in groups)}",
        "groups": groups,
        **_failures(facts),
        "conditions": conditions(facts),
    }
    return _dated(status, before, now)


def refuse(problems: Sequence[Problem], generation: int, before: Mapping[str, Any], now: float) -> Status:
    """The status of a cluster that can't be read. What it had before is left as it was."""
    message = "; ".join(str(problem) for problem in problems)
    kept = [c for c in before.get("conditions") or () if c["type"] != "InvalidSpec"]
    status = {
        **{key: value for key, value in before.items() if key not in ("conditions", "lastUpdateTime")},
        "observedGeneration": generation,
        "state": "failed",
        "stateTransitionTimes": _transitions("failed", before, now),
        "reason": message[:1000],
        "conditions": [*kept, invalid_spec(message, generation, before, now)],
    }
    return _dated(status, before, now)


def refusals(status: Mapping[str, Any]) -> dict[str, ApiRefusal]:
    """What the API server refused before, as the status remembers it."""
    return {
        refused["name"]: ApiRefusal(
            reason=refused["reason"],
            message=refused["message"],
            attempts=refused["attempts"],
            at=time_of(refused["at"]) or 0.0,
            generation=refused["generation"],
            growth=bool(refused.get("growth")),
            passing=bool(refused.get("passing")),
        )
        for refused in status.get("refused") or ()
    }


def failures(status: Mapping[str, Any]) -> dict[tuple[str, int], ReplicaFailure]:
    """Which replicas failed before, as the status remembers it."""
    return {
        (failed["group"], failed["index"]): ReplicaFailure(**{**failed, "at": time_of(failed["at"]) or 0.0})
        for failed in status.get("failing") or ()
    }


def _state(facts: ClusterFacts) -> Status:
    """One of those that KubeRay has, and Kueue reads: ready, suspended, failed, or none yet.

    A cluster that was ready stays so until it is suspended: to Kueue, one that isn't has
    given back its quota. How it is doing meanwhile is what conditions are for.
    """
    was = facts.before.get("state")
    if facts.suspended:
        state = "suspended"
    elif facts.all_ready or was == "ready":
        state = "ready"
    else:
        return {"stateTransitionTimes": dict(facts.before.get("stateTransitionTimes") or {})}
    return {"state": state, "stateTransitionTimes": _transitions(state, facts.before, facts.now)}


def _transitions(state: str, before: Mapping[str, Any], now: float) -> dict[str, str]:
    known = dict(before.get("stateTransitionTimes") or {})
    return known if before.get("state") == state and state in known else {**known, state: stamp(now)}


def _counts(facts: ClusterFacts) -> Status:
    groups = facts.cluster.groups
    workers = [pod for pods in facts.workers.values() for pod in pods if pod.leaving is None]
    most = sum(group.max_replicas * group.num_of_hosts for group in groups)
    return {
        "desiredWorkerReplicas": sum(facts.desired(g.name) * g.num_of_hosts for g in groups),
        "minWorkerReplicas": sum(group.min_replicas * group.num_of_hosts for group in groups),
        "maxWorkerReplicas": min(most, 2**31 - 1),
        "availableWorkerReplicas": sum(pod.running for pod in workers),
        "readyWorkerReplicas": sum(pod.ready for pod in workers),
    }


def _resources(cluster: ClusterSpec) -> Status:
    """What all Pods of the spec ask for, the head's among them."""
    total = quantities.total(
        [
            (1, cluster.head.template),
            *((group.desired * group.num_of_hosts, group.template) for group in cluster.groups),
        ]
    )
    return {f"desired{kind}": amount for kind, amount in total.items()}


def _head(facts: ClusterFacts) -> Status:
    head = facts.head
    service = facts.seen.services.get(facts.cluster.head_service)
    ip = head.ip if head else ""
    # A headless Service has no address of its own: its name leads to the Pod.
    own = service.ip if service is not None and service.ip not in ("", "None") else ip
    return {
        "podName": head.name if head else "",
        "podIP": ip,
        "serviceName": facts.cluster.head_service,
        "serviceIP": own,
    }


def _endpoints(facts: ClusterFacts) -> dict[str, str]:
    service = facts.seen.services.get(facts.cluster.head_service)
    return {
        str(port["name"]): str(port.get("nodePort") or port.get("targetPort") or port["port"])
        for port in (service.ports if service is not None else ())
        if port.get("name")
    }


def _failures(facts: ClusterFacts) -> Status:
    refused = [
        {"name": name, **_refusal(refusal)} for name, refusal in facts.seen.refusals.items() if refusal.lasts
    ]
    newest = sorted(remembered(facts.seen.failures, facts.now).values(), key=lambda failure: -failure.at)
    failing = [_failure(failure) for failure in newest[:MOST_REMEMBERED]]
    return {
        **({"refused": refused[:MOST_LISTED]} if refused else {}),
        **({"failing": failing} if failing else {}),
    }


def _group(facts: ClusterFacts, group: GroupSpec) -> Status:
    found = facts.members[group.name]
    was: Mapping[str, Any] = next(
        (g for g in facts.before.get("groups") or () if g.get("name") == group.name), {}
    )
    since = {(r["name"], r["state"]): r["since"] for r in was.get("replicas") or ()}
    unready = [replica for replica in found.replicas if replica.state is not ReplicaState.READY]
    status: Status = {
        "name": group.name,
        "desired": facts.desired(group.name),
        "ready": len(found.replicas) - len(unready),
        "hosts": group.num_of_hosts,
        "replicas": [_replica(replica, since, facts.now) for replica in unready[:MOST_LISTED]],
    }
    if len(unready) > MOST_LISTED:
        status["unlisted"] = len(unready) - MOST_LISTED
    if found.strangers:
        status["unlabelledPods"] = len(found.strangers)
    return status


def _replica(replica: Replica, since: Mapping[tuple[str, str], str], now: float) -> Status:
    state = replica.state.value
    return {
        "index": replica.index,
        "name": replica.name,
        "state": state,
        "reason": replica.reason[:300],
        "since": since.get((replica.name, state)) or stamp(now),
    }


def _refusal(refusal: ApiRefusal) -> Status:
    return {
        "reason": refusal.reason,
        "message": refusal.message[:1000],
        "attempts": refusal.attempts,
        "at": stamp(refusal.at),
        "generation": refusal.generation,
        **({"growth": True} if refusal.growth else {}),
        **({"passing": True} if refusal.passing else {}),
    }


def _failure(failure: ReplicaFailure) -> Status:
    return {
        "group": failure.group,
        "index": failure.index,
        "replica": failure.replica,
        "reason": failure.reason[:300],
        "attempts": failure.attempts,
        "at": stamp(failure.at),
        "generation": failure.generation,
    }


def _dated(status: Status, before: Mapping[str, Any], now: float) -> Status:
    same = {key: value for key, value in before.items() if key != "lastUpdateTime"} == status
    status["lastUpdateTime"] = before.get("lastUpdateTime") if same else stamp(now)
    return status
