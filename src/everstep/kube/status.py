"""A cluster's status, from what there is. Pure; the same for the same facts, so that only a change is
written.

The first fields are KubeRay's. ``slices``, ``groups`` and some conditions are ours: how many replicas are
whole, which aren't, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from everstep.kube import names
from everstep.kube.reconcile import Observed
from everstep.kube.replicas import Members, Replica, State, adopted, members
from everstep.kube.setbacks import Failure, Refusal, remembered
from everstep.kube.spec import Cluster, GroupSpec
from everstep.kube.validation import Problem
from everstep.kube.view import PodView, time_of

MOST_LISTED = 50
"""Replicas that aren't ready, a group. A status that lists thousands helps nobody."""

Status = dict[str, Any]


def describe(
    cluster: Cluster, seen: Observed, unsupported: Sequence[str], before: Mapping[str, Any], now: float
) -> Status:
    ours = [pod for pod in seen.pods if pod.owner == cluster.uid]
    heads = [pod for pod in ours if pod.node_type == names.HEAD and pod.leaving is None]
    head = heads[0] if heads else None
    by_group: dict[str, list[PodView]] = {group.name: [] for group in cluster.groups}
    for pod in ours:
        if pod.node_type == names.WORKER and pod.group in by_group:
            by_group[pod.group].append(pod)
    found = {
        group.name: members(group, _with_adopted(cluster, group, by_group[group.name]), cluster.uid)
        for group in cluster.groups
    }
    groups = [_group(cluster, group, found[group.name], before, now) for group in cluster.groups]
    workers = [pod for pods in by_group.values() for pod in pods if pod.leaving is None]
    desired = 0 if cluster.suspend else sum(group.desired * group.num_of_hosts for group in cluster.groups)
    whole, wanted = sum(group["ready"] for group in groups), sum(group["desired"] for group in groups)
    head_ready = head is not None and head.ready
    status: Status = {
        "observedGeneration": cluster.generation,
        "desiredWorkerReplicas": desired,
        "minWorkerReplicas": sum(group.min_replicas * group.num_of_hosts for group in cluster.groups),
        "maxWorkerReplicas": min(sum(g.max_replicas * g.num_of_hosts for g in cluster.groups), 2**31 - 1),
        "availableWorkerReplicas": sum(pod.ready for pod in workers),
        "readyWorkerReplicas": sum(pod.ready for pod in workers),
        "head": {
            "podName": head.name if head else "",
            "podIP": head.ip if head else "",
            "serviceName": cluster.head_service,
        },
        "slices": f"{whole}/{wanted}",
        "groups": groups,
    }
    refused = [
        {"name": name, **_refusal(refusal)} for name, refusal in seen.refusals.items() if refusal.lasts
    ][:MOST_LISTED]
    if refused:
        status["refused"] = refused
    failing = [_failure(failure) for failure in remembered(seen.failures, now).values()]
    if failing:
        status["failing"] = failing
    if cluster.suspend:
        left = len(workers) + len(heads)
        status["state"] = "suspended" if not left else "suspending"
    elif head_ready and all(group["ready"] >= group["desired"] for group in groups):
        status["state"] = "ready"
    else:
        status["state"] = "degraded" if before.get("state") in ("ready", "degraded") else "creating"
    status["conditions"] = _conditions(cluster, seen, head, found, unsupported, status, before, now)
    return _dated(status, before, now)


def refuse(problems: Sequence[Problem], generation: int, before: Mapping[str, Any], now: float) -> Status:
    """The status of a cluster that can't be read. What it had before is left as it was."""
    message = "; ".join(str(problem) for problem in problems)
    kept = [c for c in before.get("conditions") or () if c["type"] != "InvalidSpec"]
    status = {
        **{key: value for key, value in before.items() if key not in ("conditions", "lastUpdateTime")},
        "observedGeneration": generation,
        "state": "failed",
        "reason": message[:1000],
        "conditions": [
            *kept,
            _condition("InvalidSpec", True, "InvalidField", message[:4000], generation, before, now),
        ],
    }
    return _dated(status, before, now)


def refusals(status: Mapping[str, Any]) -> dict[str, Refusal]:
    """What the API server refused before, as the status remembers it."""
    return {
        refused["name"]: Refusal(
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


def failures(status: Mapping[str, Any]) -> dict[tuple[str, int], Failure]:
    """Which replicas failed before, as the status remembers it."""
    return {
        (failed["group"], failed["index"]): Failure(**{**failed, "at": time_of(failed["at"]) or 0.0})
        for failed in status.get("failing") or ()
    }


def _with_adopted(cluster: Cluster, group: GroupSpec, pods: Sequence[PodView]) -> list[PodView]:
    placed = {pod.uid: pod for pod in adopted(group, pods, cluster.uid)}
    return [placed.get(pod.uid, pod) for pod in pods]


def _group(
    cluster: Cluster,
    group: GroupSpec,
    found: Members,
    before: Mapping[str, Any],
    now: float,
) -> dict[str, Any]:
    was: Mapping[str, Any] = next((g for g in before.get("groups") or () if g.get("name") == group.name), {})
    since = {(r["name"], r["state"]): r["since"] for r in was.get("replicas") or ()}
    unready = [replica for replica in found.replicas if replica.state is not State.READY]
    status: dict[str, Any] = {
        "name": group.name,
        "desired": 0 if cluster.suspend else group.desired,
        "ready": len(found.replicas) - len(unready),
        "hosts": group.num_of_hosts,
        "replicas": [_replica(replica, since, now) for replica in unready[:MOST_LISTED]],
    }
    if len(unready) > MOST_LISTED:
        status["unlisted"] = len(unready) - MOST_LISTED
    if found.strangers:
        status["unlabelledPods"] = len(found.strangers)
    return status


def _replica(replica: Replica, since: Mapping[tuple[str, str], str], now: float) -> dict[str, Any]:
    state = replica.state.value
    return {
        "index": replica.index,
        "name": replica.name,
        "state": state,
        "reason": replica.reason[:300],
        "since": since.get((replica.name, state)) or stamp(now),
    }


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {
        "reason": refusal.reason,
        "message": refusal.message[:1000],
        "attempts": refusal.attempts,
        "at": stamp(refusal.at),
        "generation": refusal.generation,
        **({"growth": True} if refusal.growth else {}),
        **({"passing": True} if refusal.passing else {}),
    }


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "group": failure.group,
        "index": failure.index,
        "replica": failure.replica,
        "reason": failure.reason[:300],
        "attempts": failure.attempts,
        "at": stamp(failure.at),
        "generation": failure.generation,
    }


def _conditions(
    cluster: Cluster,
    seen: Observed,
    head: PodView | None,
    found: Mapping[str, Members],
    unsupported: Sequence[str],
    status: Status,
    before: Mapping[str, Any],
    now: float,
) -> list[dict[str, Any]]:
    def condition(kind: str, holds: bool, reason: str, message: str = "") -> dict[str, Any]:
        return _condition(kind, holds, reason, message, cluster.generation, before, now)

    if head is None:
        head_message = "there is no head Pod"
    else:
        head_message = (
            "" if head.ready else f"{head.name}: {head.broken or head.waiting_for or 'not ready yet'}"
        )
    head_ready = head is not None and head.ready
    provisioned = status["state"] == "ready" or _held("RayClusterProvisioned", before)
    conditions = [
        condition(
            "HeadPodReady",
            head_ready,
            "HeadPodRunningAndReady" if head_ready else "HeadPodNotReady",
            head_message,
        ),
        condition(
            "RayClusterProvisioned",
            provisioned,
            "AllPodRunningAndReadyFirstTime" if provisioned else "RayClusterPodsProvisioning",
        ),
        condition(
            "RayClusterSuspending",
            status["state"] == "suspending",
            "UserRequest" if cluster.suspend else "NotSuspended",
        ),
        condition(
            "RayClusterSuspended",
            status["state"] == "suspended",
            "UserRequest" if cluster.suspend else "NotSuspended",
        ),
    ]
    troubles = _troubles(seen, now)
    conditions.append(
        condition(
            "ReplicaFailure",
            bool(troubles),
            troubles[0][0] if troubles else "NoFailure",
            "; ".join(message for _, message in troubles)[:4000],
        )
    )
    # These are only there where there is, or was, something to say.
    for kind, bad, good, message in (
        ("UnsupportedField", "FieldIgnored", "AllFieldsHonoured", _about_unsupported(unsupported)),
        ("UnlabelledPods", "ReplicaUnknown", "AllPodsLabelled", _about_strangers(found)),
        ("OrphanedPods", "NoOwner", "AllPodsOwned", _about_orphans(seen)),
        ("HeadOutdated", "AutoscalingChanged", "AsInTheSpec", _about_autoscaler(cluster, head)),
        ("InvalidSpec", "InvalidField", "Valid", ""),
    ):
        if message or _known(kind, before):
            conditions.append(condition(kind, bool(message), bad if message else good, message))
    return conditions


def _troubles(seen: Observed, now: float) -> list[tuple[str, str]]:
    """Why replicas that should be there aren't: a word, and the whole of it."""
    refused = [
        (r.reason, f"{name}: {r.message} (tried {r.attempts} times)")
        for name, r in seen.refusals.items()
        if r.lasts
    ]
    failing = [
        ("KeepsFailing", f"{f.group}: replica {f.index} has failed {f.attempts} times, lately by: {f.reason}")
        for f in remembered(seen.failures, now).values()
        if f.attempts > 1
    ]
    return refused + failing


def _about_unsupported(fields: Sequence[str]) -> str:
    return f"this operator does nothing with {_listed(fields)}" if fields else ""


def _about_strangers(found: Mapping[str, Members]) -> str:
    described = "; ".join(
        f"{name}: {_listed(pod.name for pod in group.strangers)}"
        for name, group in found.items()
        if group.strangers
    )
    return described and (
        f"which replica these belong to can't be told: {described}. They count as whole replicas. "
        "Delete them, and labelled ones are made in their place"
    )


def _about_autoscaler(cluster: Cluster, head: PodView | None) -> str:
    if head is None or head.autoscaler == cluster.autoscaling:
        return ""
    return (
        f"enableInTreeAutoscaling is {str(cluster.autoscaling).lower()}, and the head {head.name} was made "
        f"{'with' if head.autoscaler else 'without'} the autoscaler. Delete that Pod when the cluster may "
        "start anew: its successor is as the spec says"
    )


def _about_orphans(seen: Observed) -> str:
    orphans = [pod.name for pod in seen.pods if pod.owner is None and pod.leaving is None]
    if not orphans:
        return ""
    return (
        f"these carry the cluster's label, and no cluster owns them: {_listed(orphans)}. They are left "
        "alone, and others are made beside them: delete them, or take the label off"
    )


def _condition(
    kind: str, holds: bool, reason: str, message: str, generation: int, before: Mapping[str, Any], now: float
) -> dict[str, Any]:
    word = "True" if holds else "False"
    was: Mapping[str, Any] = next((c for c in before.get("conditions") or () if c["type"] == kind), {})
    since = was.get("lastTransitionTime") if was.get("status") == word else None
    return {
        "type": kind,
        "status": word,
        "reason": reason,
        # Kubernetes 1.20 takes an empty text for null.
        "message": message or reason,
        "observedGeneration": generation,
        "lastTransitionTime": since or stamp(now),
    }


def _known(kind: str, before: Mapping[str, Any]) -> bool:
    return any(c["type"] == kind for c in before.get("conditions") or ())


def _held(kind: str, before: Mapping[str, Any]) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in before.get("conditions") or ())


def _listed(items: Iterable[str]) -> str:
    listed = list(items)
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")


def _dated(status: Status, before: Mapping[str, Any], now: float) -> Status:
    same = {key: value for key, value in before.items() if key != "lastUpdateTime"} == status
    status["lastUpdateTime"] = before.get("lastUpdateTime") if same else stamp(now)
    return status


def stamp(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
