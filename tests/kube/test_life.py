"""Operators that are killed, doubled, frozen and locked out."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everstep.kube.crd import custom_resource_definition
from everstep.testing.kube import ApiServer
from kube import live
from kube.killer import Killer
from kube.live import MERGE, Namespace, OperatorProcess, install, operating, outlast
from kube.quick import everstep
from kube.test_slices import cluster
from kube.world import group, template

WHOLE = [(i, h) for i in range(2) for h in range(2)]


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


@pytest.fixture
def killer(server: ApiServer, tmp_path: Path) -> Iterator[Killer]:
    with Killer(server, tmp_path).serving() as serving:
        yield serving


def is_as_it_should_be(space: Namespace, name: str) -> bool:
    pods = [p for p in space.get("pods")["items"] if p["metadata"]["labels"]["ray.io/cluster"] == name]
    places = sorted(
        (
            int(p["metadata"]["labels"]["ray.io/worker-group-replica-index"]),
            int(p["metadata"]["labels"]["ray.io/replica-host-index"]),
        )
        for p in pods
        if p["metadata"]["labels"]["ray.io/node-type"] == "worker"
    )
    heads = [p for p in pods if p["metadata"]["labels"]["ray.io/node-type"] == "head"]
    services = {s["metadata"]["name"] for s in space.get("services")["items"]}
    said = space.status(name).get("groups", [{}])[0]
    return (
        places == WHOLE
        and len(heads) == 1
        and {f"{name}-head-svc", f"{name}-headless"} <= services
        and len({p["metadata"]["labels"].get("ray.io/worker-group-replica-name") for p in pods}) == 3
        and [r["state"] for r in said.get("replicas", ())] == ["Pending", "Pending"]
    )


@pytest.mark.parametrize("answered", [False, True], ids=["before it is passed on", "before it is answered"])
@pytest.mark.parametrize("healing", [False, True], ids=["creating", "healing"])
def test_killed_at_any_call_the_next_operator_gets_to_the_same_end(
    space: Namespace, killer: Killer, tmp_path: Path, answered: bool, healing: bool
) -> None:
    log = tmp_path / "operators.log"
    call = 0
    while True:
        call += 1
        name = f"c{call}" if not healing else "demo"
        if not healing or call == 1:
            space.create(cluster(group("a", 2, 2), name=name))
        if healing and call == 1:
            first = OperatorProcess(space.server.kubeconfig, "--namespace", space.name, log=log).start()
            space.see(lambda: is_as_it_should_be(space, "demo"), "a cluster to break")
            first.stop()
        if healing:
            space.delete_pod(space.workers(index=call % 2)[0])
        killer.aim(call, answered)
        victim = OperatorProcess(killer.kubeconfig, "--namespace", space.name, log=log).start()
        killer.at(victim.pid)
        done = partial(is_as_it_should_be, space, name)
        space.see(lambda: killer.killed.is_set() or done(), f"call {call}, or the end")  # noqa: B023
        if not killer.killed.is_set():
            victim.stop()
            break
        victim.wait()
        heir = OperatorProcess(space.server.kubeconfig, "--namespace", space.name, log=log).start()
        space.see(done, f"the end, after call {call}: {killer.calls[-1]}")
        heir.stop()
        if not healing:
            space.clear()
            space.see(lambda: not space.get("pods")["items"], "a clean slate")
    # The lease, what is broken or two Services and the head, the Pods of one replica or two, the status.
    writes = 1 + 1 + 2 + 1 if healing else 1 + 3 + 4 + 1
    assert call >= writes, f"there were fewer writes than there must be: {killer.calls}"


def test_the_second_operator_waits_and_takes_over_when_the_first_goes(
    space: Namespace, tmp_path: Path
) -> None:
    with operating(space.server, tmp_path, "--namespace", space.name) as first:
        second = OperatorProcess(
            space.server.kubeconfig, "-n", space.name, log=tmp_path / "second.log"
        ).start()
        try:
            second.hear("waiting for the lease")
            space.create(cluster(group(replicas=1)))
            space.see(lambda: len(space.workers()) == 4, "the first to work")
            first.kill()
            gone = space.uids()
            space.delete_pod(space.workers()[0])
            space.see(lambda: space.anew(4, gone), "the second to work")
            assert second.said("holding the lease")
        finally:
            assert second.stop() == 0


@pytest.mark.parametrize("asleep_s", [0, pytest.param(60, marks=pytest.mark.soak)])
def test_an_operator_that_slept_through_its_lease_writes_nothing_until_it_has_it_again(
    space: Namespace, tmp_path: Path, asleep_s: float
) -> None:
    short = ("--namespace", space.name, "--lease-seconds", "10")
    with operating(space.server, tmp_path, *short) as first:
        space.create(cluster(group(replicas=1)))
        space.see(lambda: len(space.workers()) == 4, "the first to work")
        first.signal(signal.SIGSTOP)
        second = OperatorProcess(space.server.kubeconfig, *short, log=tmp_path / "second.log").start()
        try:
            second.hear("holding the lease")
            gone = space.uids()
            space.delete_pod(space.workers()[0])
            space.see(lambda: space.anew(4, gone), "the second to work")
            kept = space.uids()
            outlast(asleep_s)
            first.signal(signal.SIGCONT)
            first.hear("nothing more is written until it is back")
            first.hear("waiting for the lease")
            assert space.uids() == kept
            # It stands by, and takes over in its turn.
            second.kill()
            gone = space.uids()
            space.delete_pod(space.workers()[0])
            space.see(lambda: space.anew(4, gone), "the first to work again")
        finally:
            first.signal(signal.SIGCONT)
            second.stop()


@pytest.fixture
def account(space: Namespace, tmp_path: Path) -> Iterator[Path]:
    with live.account(space, tmp_path) as kubeconfig:
        yield kubeconfig


def test_what_may_not_be_deleted_holds_up_nothing_else(
    space: Namespace, account: Path, tmp_path: Path
) -> None:
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/roles/everstep-operator"
    rules = space.server.request("GET", role)["rules"]
    for rule in rules:
        rule["verbs"] = [verb for verb in rule["verbs"] if verb != "delete"]
    space.server.request("PATCH", role, {"rules": rules}, MERGE)
    operator = OperatorProcess(account, "--namespace", space.name, log=tmp_path / "operator.log").start()
    try:
        operator.hear("looking after")
        space.create(cluster(group("a", 1, 2), group("b", 1, 2)))
        space.see(lambda: len(space.workers()) == 4, "both groups")
        space.say(space.workers(group="a")[0], phase="Failed")
        space.see(lambda: "the end of" in space.events(), "an event")
        space.patch_group(1, replicas=2)
        space.see(lambda: space.places("b") == WHOLE, "the other group to grow nevertheless")
        space.see(
            lambda: "Failed" in space.status()["groups"][0]["replicas"][0]["reason"], "the status to say why"
        )
    finally:
        operator.stop()


def test_the_rights_in_the_manifests_are_enough(
    server: ApiServer, space: Namespace, account: Path, tmp_path: Path
) -> None:
    operator = OperatorProcess(account, "--namespace", space.name, log=tmp_path / "operator.log").start()
    try:
        operator.hear("looking after")
        scaled = group(replicas=1, hosts=2, rayStartParams={"num-cpus": "1"})
        head = {"template": template(), "rayStartParams": {"num-cpus": "1"}}
        # An earlier cluster of this name has left its account, which will be collected with it.
        owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "demo", "uid": "earlier"}
        left = {"name": "demo", "ownerReferences": [owner]}
        space.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": left})
        space.create(cluster(scaled, enableInTreeAutoscaling=True, headGroupSpec=head))
        operator.hear("of an earlier cluster of this name")
        assert not space.pods(group="headgroup")
        server.kubectl("-n", space.name, "delete", "serviceaccount", "demo")
        space.see(lambda: len(space.pods()) == 3, f"its Pods: {operator.log.read_text()}")
        gone = space.uids()
        space.delete_pod(space.workers()[0])
        space.see(lambda: space.anew(2, gone), "a heal")
        space.see(lambda: space.status().get("slices") == "0/1", "a status")
        roles = space.get("roles", group="/apis/rbac.authorization.k8s.io/v1")["items"]
        assert {r["metadata"]["name"] for r in roles} == {"demo", "everstep-operator"}
        assert not operator.said("forbidden"), operator.log.read_text()
    finally:
        operator.stop()


@pytest.mark.usefixtures("programs")
def test_an_operator_of_all_namespaces_leaves_those_that_another_one_holds(tmp_path: Path) -> None:
    with ApiServer() as server:
        install(server)
        theirs, free = Namespace(server), Namespace(server)
        single, everywhere = tmp_path / "single", tmp_path / "everywhere"
        single.mkdir()
        everywhere.mkdir()
        with (
            operating(server, single, "--namespace", theirs.name) as first,
            operating(server, everywhere) as second,
        ):
            for space in (theirs, free):
                space.create(cluster(group(replicas=1)))
            waiting = f"waiting for the lease in {theirs.name}"
            second.hear(waiting)
            for space in (theirs, free):
                space.see(lambda space=space: len(space.workers()) == 4, "the one that looks after it")  # type: ignore[misc]
            assert first.said(f"{theirs.name}/demo: creating")
            assert second.said(f"{free.name}/demo: creating")
            assert not second.said(f"{theirs.name}/demo: creating")
            first.stop()
            gone = theirs.uids()
            theirs.delete_pod(theirs.workers()[0])
            theirs.see(lambda: theirs.anew(4, gone), "the second to take over")
            third = OperatorProcess(
                server.kubeconfig, "--namespace", theirs.name, log=tmp_path / "third.log"
            ).start()
            try:
                third.hear(waiting)
            finally:
                third.stop()
            # A namespace that is being deleted takes its lease along: no reason to leave the others.
            server.kubectl("delete", "namespace", theirs.name, "--wait=false")
            server.kubectl("-n", theirs.name, "delete", "lease", "everstep-operator")
            second.hear(f"the lease in {theirs.name} is gone")
            theirs.delete_pod(theirs.workers()[0])
            second.hear("because it is being terminated")
            gone = free.uids()
            free.delete_pod(free.workers()[0])
            free.see(lambda: free.anew(4, gone), "a heal in the other one")


def kuberay(namespace: str, *arguments: str, replicas: int = 1) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "kuberay-operator"}
    container = {"name": "kuberay-operator", "image": "kuberay/operator", "args": list(arguments)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "kuberay-operator", "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def test_it_never_fights_kuberay(tmp_path: Path) -> None:
    with ApiServer() as server:
        # There is none: it says how to get one.
        refused = everstep("run", kubeconfig=server.kubeconfig, folder=tmp_path)
        assert refused.returncode == 2
        assert "everstep operator manifests --crd-only | kubectl apply -f -" in refused.stderr
        made = everstep("manifests", "--crd-only", kubeconfig=server.kubeconfig, folder=tmp_path)
        assert json.loads(made.stdout)["items"] == [custom_resource_definition()]

        # KubeRay's is there: it isn't written over unless that is said.
        foreign = custom_resource_definition()
        foreign["metadata"]["labels"] = {}
        foreign["metadata"]["annotations"] = {"controller-gen.kubebuilder.io/version": "v0.16.0"}
        # As in KubeRay's, what its schema doesn't know in the status is pruned.
        version = foreign["spec"]["versions"][0]
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
        del status["x-kubernetes-preserve-unknown-fields"]
        del status["properties"]["groups"]
        del status["properties"]["slices"]
        version["additionalPrinterColumns"] = []
        server.define(foreign)
        only = everstep("manifests", "--crd-only", kubeconfig=server.kubeconfig, folder=tmp_path)
        assert only.returncode == 1
        assert "KubeRay's" in only.stderr
        assert "--replace-crd" in only.stderr
        some = everstep("manifests", "--image", "x", kubeconfig=server.kubeconfig, folder=tmp_path)
        kinds = [item["kind"] for item in json.loads(some.stdout)["items"]]
        assert "CustomResourceDefinition" not in kinds
        assert "Deployment" in kinds
        forced = everstep(
            "manifests", "--crd-only", "--replace-crd", kubeconfig=server.kubeconfig, folder=tmp_path
        )
        assert [i["kind"] for i in json.loads(forced.stdout)["items"]] == ["CustomResourceDefinition"]

        # KubeRay's operator is there: it watches everything, then something else, then nothing.
        space = Namespace(server)
        server.kubectl("apply", "-f", "-", stdin=json.dumps(kuberay("default")))
        for arguments in ((), ("--namespace", space.name)):
            refused = everstep("run", *arguments, kubeconfig=server.kubeconfig, folder=tmp_path)
            assert refused.returncode == 2
            assert "default/kuberay-operator" in refused.stderr
            assert "--replicas=0" in refused.stderr
        server.kubectl("apply", "-f", "-", stdin=json.dumps(kuberay("default", "--watch-namespace", "a,b")))
        refused = everstep("run", "--namespace", "b", kubeconfig=server.kubeconfig, folder=tmp_path)
        assert refused.returncode == 2
        with operating(server, tmp_path, "--namespace", space.name):
            space.create(cluster(group(replicas=1)))
            space.see(lambda: len(space.workers()) == 4, "slices beside KubeRay's definition")
            space.delete_pod(space.workers()[0])
            space.see(lambda: "ReplicaReplaced" in space.events(), "a heal")
            space.see(lambda: len(space.workers()) == 4, "four again")
            calls = [call for call in server.calls() if call["verb"] == "patch"]
            written = [call for call in calls if call["objectRef"]["resource"] == "rayclusters"]
            assert len(written) < 8, "what the definition doesn't keep isn't written again and again"
        server.kubectl("apply", "-f", "-", stdin=json.dumps(kuberay("default", replicas=0)))
        with operating(server, tmp_path):
            pass


def test_a_heal_is_a_handful_of_calls_and_peace_is_none(space: Namespace, tmp_path: Path) -> None:
    with operating(space.server, tmp_path, "--namespace", space.name):
        space.create(cluster())
        space.see(lambda: len(space.workers()) == 12, "3 replicas")
        space.run(*space.pods())
        space.see(lambda: space.status().get("slices") == "3/3", "all ready")

        def calls() -> list[tuple[str, str]]:
            return [
                (c["verb"], c["objectRef"]["resource"])
                for c in space.server.calls()
                if c.get("objectRef", {}).get("namespace") == space.name
                and c["objectRef"]["resource"] != "leases"
            ]

        before = len(calls())
        gone = space.uids(index=1)
        space.say(space.workers(index=1)[0], phase="Failed")
        space.see(lambda: space.anew(12, gone), "a heal", kubelet=True)
        space.see(lambda: space.status()["groups"][0]["replicas"][0]["state"] == "Pending", "a status")
        made = calls()[before:]
        assert made.count(("delete", "pods")) == 4
        assert made.count(("create", "pods")) == 4
        assert made.count(("create", "events")) == 1, "what was replaced"
        assert made.count(("patch", "events")) == 1, "what was created, once more"
        assert len(made) - 10 == made.count(("patch", "rayclusters"))
        assert made.count(("patch", "rayclusters")) <= 5
