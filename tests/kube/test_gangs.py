"""A gang per slice: all of its hosts get a node, or none does."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.kube import gangs
from everstep.kube.actions import CreateReplica, DeletePod
from everstep.kube.spec import PLACEMENT_TIMEOUT_S, parse
from everstep.testing.kube import ApiServer
from kube import schedulers
from kube.live import MERGE, Namespace, account, install, operating, running
from kube.proxy import Proxy, Request
from kube.test_slices import cluster
from kube.world import World, group, manifest

API = {gang.name: gang.api or "" for gang in gangs.GANGS}
"""Of Kubernetes' own, the version that is documented."""
PLUGINS, VOLCANO, KAI = API["scheduler-plugins"], API["volcano"], API["kai-scheduler"]
ALL = frozenset({PLUGINS, VOLCANO, KAI})


def chosen(served: frozenset[str], scheduler: str | None = None, **meta: dict[str, str]) -> str | None:
    raw = manifest(group())
    raw["metadata"].update(meta)
    if scheduler:
        raw["spec"]["workerGroupSpecs"][0]["template"]["spec"]["schedulerName"] = scheduler
    gang = gangs.choose(parse(raw), served)
    return gang.name if gang else None


def test_a_scheduler_is_found_by_what_is_installed_and_asked_for() -> None:
    assert chosen(frozenset()) is None
    assert chosen(frozenset({PLUGINS})) == "scheduler-plugins"
    assert chosen(frozenset({VOLCANO})) is None, "nobody has asked for another scheduler"
    assert chosen(ALL, labels={"ray.io/scheduler-name": "volcano"}) == "volcano"
    assert chosen(ALL, "kai-scheduler") == "kai-scheduler"
    assert chosen(frozenset({PLUGINS}), labels={"ray.io/scheduler-name": "volcano"}) is None
    assert chosen(ALL, annotations={"everstep.dev/gang": "off"}) is None
    assert chosen(frozenset({API["kubernetes"], PLUGINS})) == "kubernetes"
    assert chosen(frozenset(), labels={"ray.io/scheduler-name": "yunikorn"}) == "yunikorn"


def test_each_schedulers_pods_are_marked_as_it_wants_it() -> None:
    asked = {"limits": {"cpu": "2", "memory": "1Gi"}}
    raw = manifest(group())
    raw["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"] = asked
    raw["metadata"]["labels"] = {"volcano.sh/queue-name": "mine", "kai.scheduler/queue": "theirs"}
    made = parse(raw)
    marks = {}
    for gang in gangs.GANGS:
        action = CreateReplica("tpu", 2, "tpu-abcde", ("a", "b", "c", "d"), gang=gang)
        marks[gang.name] = (action.manifests(made)[0], action.pod_group(made) or {})
    for name in ("scheduler-plugins", "volcano"):
        assert marks[name][1]["metadata"]["name"] == "demo-tpu-abcde"
        assert marks[name][1]["spec"]["minMember"] == 4
    pod, _ = marks["scheduler-plugins"]
    assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "demo-tpu-abcde"
    assert "schedulerName" not in pod["spec"]
    pod, pod_group = marks["volcano"]
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "demo-tpu-abcde"
    assert (pod["spec"]["schedulerName"], pod_group["spec"]["queue"]) == ("volcano", "mine")
    pod, pod_group = marks["kai-scheduler"]
    assert pod["metadata"]["labels"]["kai.scheduler/queue"] == "theirs"
    assert not pod_group, "it would put the Pods in another one"
    pod, pod_group = marks["kubernetes"]
    assert pod["spec"]["schedulingGroup"] == {"podGroupName": "demo-tpu-abcde"}
    assert pod_group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 4}}}
    pod, pod_group = marks["yunikorn"]
    assert not pod_group
    assert (pod["metadata"]["labels"]["applicationId"], pod["spec"]["schedulerName"]) == (
        "demo-tpu-abcde",
        "yunikorn",
    )
    [task] = json.loads(pod["metadata"]["annotations"]["yunikorn.apache.org/task-groups"])
    assert (task["minMember"], task["minResource"]) == (4, {"cpu": "2", "memory": "1073741824"})


def half_bound() -> World:
    world = World(manifest(group(replicas=1)))
    world.step()
    for pod in world.workers[:2]:
        world.change(pod.name, scheduled=True)
    return world


def test_a_replica_that_holds_half_of_its_nodes_gives_them_back_after_a_while() -> None:
    world = half_bound()
    plan = world.plan()
    assert not [a for a in plan.actions if isinstance(a, DeletePod)]
    assert plan.wake_at == world.now + PLACEMENT_TIMEOUT_S
    world.now += PLACEMENT_TIMEOUT_S
    assert len([a for a in world.step().actions if isinstance(a, DeletePod)]) == 4
    assert "waited for a node" in world.failures["tpu", 0].reason, "it comes back later and later"


def test_where_there_is_a_gang_scheduler_that_is_its_business() -> None:
    world = half_bound()
    world.served = frozenset({PLUGINS})
    world.now += PLACEMENT_TIMEOUT_S
    assert not [a for a in world.plan().actions if isinstance(a, DeletePod)]


def test_a_slice_that_got_half_of_its_nodes_gives_them_back_on_a_real_server(
    server: ApiServer, tmp_path: Path
) -> None:
    space = Namespace(server)
    made = cluster(group("a", 1, 2), group("b", 1, 2))
    made["metadata"]["annotations"]["everstep.dev/placement-timeout-seconds"] = "1"
    with operating(server, tmp_path, "--namespace", space.name):
        space.create(made)
        space.see(lambda: len(space.workers()) == 4, "two slices")
        # There is room for one host of the one, and for none of the other, which holds nothing.
        gone, kept = space.uids(group="a"), space.uids(group="b")
        space.bind(space.workers(group="a")[0])
        space.see(lambda: space.anew(4, gone), "the slice anew, on no node", kubelet=True)
        assert kept < space.uids()
        assert "waited for a node" in space.events()


@pytest.fixture(scope="module")
def equipped(programs: None) -> Iterator[ApiServer]:
    """A server that has the definitions of all of them."""
    with ApiServer() as server:
        install(server)
        schedulers.install(server)
        yield server


MARKS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "scheduler-plugins": lambda pod: pod["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group"),
    "volcano": lambda pod: pod["metadata"]["annotations"].get("scheduling.k8s.io/group-name"),
    "kubernetes": lambda pod: pod["spec"].get("schedulingGroup", {}).get("podGroupName"),
}
"""How each scheduler is told of a Pod's group."""
ASKED = {"limits": {"cpu": "2", "memory": "1Gi"}}
WANTED = {
    "scheduler-plugins": {"minMember": 2, "minResources": {"cpu": "4", "memory": "2Gi"}},
    "volcano": {"minMember": 2, "minResources": {"cpu": "4", "memory": "2Gi"}, "queue": "mine"},
    "kubernetes": {"schedulingPolicy": {"gang": {"minCount": 2}}},
}


def asking(scheduler: str, *groups: dict[str, Any], **labels: str) -> dict[str, Any]:
    made = cluster(*groups)
    for one in made["spec"]["workerGroupSpecs"]:
        one["template"]["spec"]["containers"][0]["resources"] = ASKED
    made["metadata"]["labels"] = {gangs.LABEL: scheduler, "volcano.sh/queue-name": "mine", **labels}
    return made


@contextlib.contextmanager
def allowed(space: Namespace, as_in: str, group: str) -> Iterator[None]:
    """The operator's rights in one group of APIs, in another that stands in for it."""
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/roles/everstep-operator"
    rules = space.server.request("GET", role)["rules"]
    for rule in rules:
        rule["apiGroups"] += [group] if as_in in rule["apiGroups"] else []
    space.server.request("PATCH", role, {"rules": rules}, MERGE)
    yield


@pytest.mark.parametrize("scheduler", list(MARKS))
def test_each_slice_has_a_pod_group_of_its_own_for_as_long_as_it_is_there(
    equipped: ApiServer, tmp_path: Path, scheduler: str
) -> None:
    """By an operator with no rights but those in the manifests."""
    space = Namespace(equipped)
    sent: list[dict[str, Any]] = []

    native = scheduler == "kubernetes"
    kept = f"/apis/{schedulers.STAND_IN.decode() if native else API[scheduler]}"

    def groups() -> dict[str, dict[str, Any]]:
        found = space.get("podgroups", group=kept)["items"]
        return {item["metadata"]["name"]: item for item in found}

    def note(request: Request) -> None:
        if request.method == "POST" and request.path.endswith("/pods"):
            sent.append(request.body)

    def groups_of_pods() -> dict[str, int]:
        """How many Pods that are there were made for each PodGroup. As they were sent: this server is older
        than the field that Kubernetes' own scheduler reads.
        """
        there = {pod["metadata"]["name"] for pod in space.get("pods")["items"]}
        marks = (MARKS[scheduler](pod) for pod in sent if pod["metadata"]["name"] in there)
        return dict(Counter(mark for mark in marks if mark is not None))

    def whole(slices: int, hosts: int = 2) -> bool:
        found = groups_of_pods()
        return len(found) == slices and set(found.values()) == {hosts} and set(groups()) == set(found)

    with (
        account(space, tmp_path) as kubeconfig,
        (schedulers.Renaming if native else Proxy)(equipped, tmp_path, kubeconfig, note).serving() as proxy,
        allowed(space, "scheduling.k8s.io", "scheduling.test.io"),
        running(proxy.kubeconfig, tmp_path, "--namespace", space.name) as operator,
    ):
        space.create(asking(scheduler, group("tpu", 2, 2), group("alone", 1, 1)))
        space.see(lambda: len(space.workers()) == 5, "their Pods")
        space.see(lambda: whole(2), "a PodGroup for each slice, and none for a host alone")
        assert all(found["spec"] == WANTED[scheduler] for found in groups().values())
        space.see(lambda: space.status().get("gang") == scheduler, "the status to name it")

        # A slice that is replaced is another gang: schedulers keep what they know of one.
        before, gone = set(groups()), space.uids(index=1)
        space.delete_pod(space.workers(group="tpu", index=1)[0])
        space.see(lambda: space.anew(5, gone) and whole(2), "one of them anew")
        assert len(set(groups()) & before) == 1

        # One that somebody deletes comes back: without it, its Pods would wait for ever.
        [name, *_] = groups()
        path = f"{kept}/namespaces/{space.name}/podgroups/{name}"
        uid = groups()[name]["metadata"]["uid"]
        equipped.request("DELETE", path)
        space.see(lambda: groups().get(name, {}).get("metadata", {}).get("uid", uid) != uid, "it again")
        assert groups()[name]["spec"] == WANTED[scheduler]

        space.patch_group(0, numOfHosts=3)
        space.see(lambda: whole(2, 3), "gangs of three")
        space.patch_group(0, replicas=1)
        space.see(lambda: whole(1, 3), "one slice, one PodGroup")
        space.patch({"spec": {"suspend": True}})
        space.see(lambda: not groups() and not space.pods(), "nothing that holds anything")
        assert not operator.said("forbidden"), operator.log.read_text()


def test_pod_groups_of_others_are_left_alone(equipped: ApiServer, tmp_path: Path) -> None:
    """KubeRay's of a cluster, for one: it has the cluster's label, and no replica."""
    space = Namespace(equipped)
    theirs = {
        "apiVersion": API["volcano"],
        "kind": "PodGroup",
        "metadata": {"name": "ray-demo-pg", "labels": {"ray.io/cluster": "demo"}},
        "spec": {"minMember": 3},
    }
    space.create(theirs)
    with operating(equipped, tmp_path, "--namespace", space.name):
        space.create(asking("volcano", group("tpu", 1, 2)))
        space.see(lambda: len(space.workers()) == 2, "a slice")
        space.patch_group(0, replicas=0)
        space.see(
            lambda: (
                [g["metadata"]["name"] for g in space.get("podgroups", group=f"/apis/{VOLCANO}")["items"]]
                == ["ray-demo-pg"]
            ),
            "only theirs to be left",
        )


def test_a_slice_of_yunikorn_is_an_application_and_its_successor_another(
    equipped: ApiServer, tmp_path: Path
) -> None:
    """An application of YuniKorn is scheduled as one when it begins, and only then."""
    space = Namespace(equipped)

    def applications() -> set[str]:
        return {pod["metadata"]["labels"]["applicationId"] for pod in space.workers()}

    with operating(equipped, tmp_path, "--namespace", space.name):
        space.create(asking("yunikorn", group("tpu", 1, 2), **{"yunikorn.apache.org/queue": "root.mine"}))
        space.see(lambda: len(space.workers()) == 2, "a slice")
        [before] = applications()
        [pod, _] = space.workers()
        [task] = json.loads(pod["metadata"]["annotations"]["yunikorn.apache.org/task-groups"])
        assert task == {"name": before, "minMember": 2, "minResource": {"cpu": "2", "memory": "1073741824"}}
        assert (pod["spec"]["schedulerName"], pod["metadata"]["labels"]["queue"]) == ("yunikorn", "root.mine")
        gone = space.uids()
        space.delete_pod(pod)
        space.see(lambda: space.anew(2, gone), "another slice")
        assert before not in applications()
        assert len(applications()) == 1


def test_kai_makes_its_own_pod_groups_and_is_given_what_it_reads(equipped: ApiServer, tmp_path: Path) -> None:
    space = Namespace(equipped)
    with operating(equipped, tmp_path, "--namespace", space.name):
        space.create(asking("kai-scheduler", group("tpu", 1, 2), **{"kai.scheduler/queue": "mine"}))
        space.see(lambda: len(space.workers()) == 2, "a slice")
        for pod in space.workers():
            assert pod["spec"]["schedulerName"] == "kai-scheduler"
            assert pod["metadata"]["labels"]["kai.scheduler/queue"] == "mine"
        assert not space.get("podgroups", group=f"/apis/{KAI}")["items"]
        space.see(lambda: space.status().get("gang") == "kai-scheduler", "the status to name it")


def test_a_scheduler_whose_pod_groups_may_not_be_seen_is_said_so_and_used(
    equipped: ApiServer, tmp_path: Path
) -> None:
    """As with the rights of an earlier release, which could make them and no more."""
    space = Namespace(equipped)
    with account(space, tmp_path) as kubeconfig:
        role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/roles/everstep-operator"
        rules = equipped.request("GET", role)["rules"]
        for rule in rules:
            if rule["resources"] == ["podgroups"]:
                rule["verbs"] = ["create", "patch"]
        equipped.request("PATCH", role, {"rules": rules}, MERGE)
        with running(kubeconfig, tmp_path, "--namespace", space.name) as operator:
            operator.hear("PodGroups can't be watched")
            space.create(asking("volcano", group("tpu", 1, 2)))
            space.see(lambda: len(space.workers()) == 2, "a slice")
            assert len(space.get("podgroups", group=f"/apis/{VOLCANO}")["items"]) == 1
