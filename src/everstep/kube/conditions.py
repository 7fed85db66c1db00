"""A cluster's conditions, as a table: what each is called, when it holds, and why. Pure.

KubeRay's keep its types and reasons. Ours are only there where there is, or was, something to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from everstep.kube.backoff import remembered
from everstep.kube.facts import ClusterFacts
from everstep.kube.replicas import ReplicaState

Condition = dict[str, Any]


class Standing(msgspec.Struct, frozen=True):
    holds: bool
    reason: str
    message: str = ""


def conditions(facts: ClusterFacts) -> list[Condition]:
    """All of KubeRay's, and of ours those that hold or once held."""
    listed = [_condition(facts, kind, find(facts)) for kind, find in _KUBERAYS.items()]
    for kind, find in _OURS.items():
        finding = find(facts)
        if finding.holds or facts.had(kind):
            listed.append(_condition(facts, kind, finding))
    return listed


def invalid_spec(message: str, generation: int, before: Mapping[str, Any], now: float) -> Condition:
    return _dated("InvalidSpec", Standing(True, "InvalidField", message[:4000]), generation, before, now)


def stamp(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _head_ready(facts: ClusterFacts) -> Standing:
    head = facts.head
    if head is None:
        return Standing(False, "HeadPodNotFound", "there is no head Pod")
    if head.ready:
        return Standing(True, "HeadPodRunningAndReady")
    why = head.broken or head.waiting_for or "not ready yet"
    return Standing(False, head.unready_reason or "Unknown", f"{head.name}: {why}")


def _provisioned(facts: ClusterFacts) -> Standing:
    if facts.suspended:
        return Standing(False, "RayClusterPodsProvisioning", "the cluster is suspended")
    if facts.all_ready or facts.held("RayClusterProvisioned"):
        return Standing(True, "AllPodRunningAndReadyFirstTime")
    return Standing(False, "RayClusterPodsProvisioning")


def _suspending(facts: ClusterFacts) -> Standing:
    return Standing(facts.suspending, "RayClusterSuspending")


def _suspended(facts: ClusterFacts) -> Standing:
    return Standing(facts.suspended, "RayClusterSuspended")


def _replica_failure(facts: ClusterFacts) -> Standing:
    """Why replicas that should be there aren't: a word, and the whole of it."""
    refused = [
        (r.reason, f"{name}: {r.message} (tried {r.attempts} times)")
        for name, r in facts.seen.refusals.items()
        if r.lasts
    ]
    failing = [
        ("KeepsFailing", f"{f.group}: replica {f.index} has failed {f.attempts} times, lately by: {f.reason}")
        for f in remembered(facts.seen.failures, facts.now).values()
        if f.attempts > 1
    ]
    troubles = refused + failing
    message = "; ".join(message for _, message in troubles)
    return Standing(bool(troubles), troubles[0][0] if troubles else "NoFailure", message)


def _degraded(facts: ClusterFacts) -> Standing:
    ready = {
        name: sum(replica.state is ReplicaState.READY for replica in group.replicas)
        for name, group in facts.members.items()
    }
    missing = [
        f"{name}: {count} of {facts.desired(name)} replicas"
        for name, count in ready.items()
        if count < facts.desired(name)
    ]
    if not facts.head_ready:
        missing.insert(0, "the head isn't ready")
    was_ready = facts.before.get("state") == "ready" or facts.held("Degraded")
    holds = bool(missing) and was_ready and not facts.suspending and not facts.suspended
    return Standing(holds, "NotAllReady" if holds else "AllReady", ", ".join(missing) if holds else "")


def _unsupported(facts: ClusterFacts) -> Standing:
    fields = facts.unsupported
    message = f"this operator does nothing with {listed(fields)}" if fields else ""
    return _told(message, "FieldIgnored", "AllFieldsHonoured")


def _unlabelled(facts: ClusterFacts) -> Standing:
    described = "; ".join(
        f"{name}: {listed(pod.name for pod in group.strangers)}"
        for name, group in facts.members.items()
        if group.strangers
    )
    message = described and (
        f"which replica these belong to can't be told: {described}. They count as whole replicas. "
        "Delete them, and labelled ones are made in their place"
    )
    return _told(message, "ReplicaUnknown", "AllPodsLabelled")


def _orphaned(facts: ClusterFacts) -> Standing:
    orphans = [pod.name for pod in facts.seen.pods if pod.owner is None and pod.leaving is None]
    message = orphans and (
        f"these carry the cluster's label, and no cluster owns them: {listed(orphans)}. They are left "
        "alone, and others are made beside them: delete them, or take the label off"
    )
    return _told(message or "", "NoOwner", "AllPodsOwned")


def _outdated_head(facts: ClusterFacts) -> Standing:
    head, autoscaling = facts.head, facts.cluster.autoscaling
    message = ""
    if head is not None and head.autoscaler != autoscaling:
        message = (
            f"enableInTreeAutoscaling is {str(autoscaling).lower()}, and the head {head.name} was made "
            f"{'with' if head.autoscaler else 'without'} the autoscaler. Delete that Pod when the cluster "
            "may start anew: its successor is as the spec says"
        )
    return _told(message, "AutoscalingChanged", "AsInTheSpec")


_KUBERAYS: dict[str, Callable[[ClusterFacts], Standing]] = {
    "HeadPodReady": _head_ready,
    "RayClusterProvisioned": _provisioned,
    "RayClusterSuspending": _suspending,
    "RayClusterSuspended": _suspended,
    "ReplicaFailure": _replica_failure,
}
_OURS: dict[str, Callable[[ClusterFacts], Standing]] = {
    "Degraded": _degraded,
    "UnsupportedField": _unsupported,
    "UnlabelledPods": _unlabelled,
    "OrphanedPods": _orphaned,
    "HeadOutdated": _outdated_head,
    "InvalidSpec": lambda _: _told("", "InvalidField", "Valid"),
}
KINDS = (*_KUBERAYS, *_OURS)


def _told(message: str, bad: str, good: str) -> Standing:
    return Standing(bool(message), bad if message else good, message)


def _condition(facts: ClusterFacts, kind: str, finding: Standing) -> Condition:
    return _dated(kind, finding, facts.cluster.generation, facts.before, facts.now)


def _dated(kind: str, finding: Standing, generation: int, before: Mapping[str, Any], now: float) -> Condition:
    word = "True" if finding.holds else "False"
    was: Mapping[str, Any] = next((c for c in before.get("conditions") or () if c["type"] == kind), {})
    since = was.get("lastTransitionTime") if was.get("status") == word else None
    return {
        "type": kind,
        "status": word,
        "reason": finding.reason,
        # Kubernetes 1.20 takes an empty text for null.
        "message": finding.message[:4000] or finding.reason,
        "observedGeneration": generation,
        "lastTransitionTime": since or stamp(now),
    }


def listed(items: Iterable[str]) -> str:
    found = list(items)
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")
