"""A changed template: left to what is made from then on, rolled out slice by slice, or all at once."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from e2e.ray.cluster import notes_in
from everstep.kube.validation import problems
from everstep.testing.kube import ApiServer, ProcessKubelet, ray_cluster, ray_group
from kube.live import Namespace, operating
from kube.test_demand import training, world
from kube.test_slices import cluster
from kube.world import World, group, manifest
from processes import LIMIT_S


def changed(world: World, image: str = "rayproject/ray:2.61.0") -> None:
    for member in (world.raw["spec"]["headGroupSpec"], *world.raw["spec"]["workerGroupSpecs"]):
        member["template"]["spec"]["containers"][0]["image"] = image


def four_slices(**more: Any) -> World:
    return World(manifest(group(replicas=4, hosts=2), **more))


def test_without_a_word_about_it_pods_that_run_are_left() -> None:
    world = four_slices()
    world.settle()
    changed(world)
    assert world.plan().actions == ()


def test_it_is_rolled_out_so_many_slices_at_a_time_and_the_head_stays() -> None:
    for at_once in (1, 2):
        world = four_slices()
        world.raw["metadata"]["annotations"]["everstep.dev/max-unavailable"] = str(at_once)
        world.settle()
        before = {p.uid for p in world.workers}
        head = next(p for p in world.pods.values() if p.node_type == "head")
        changed(world)
        most_away = 0
        for _ in range(30):
            world.step()
            ready = {
                i for i in world.indices() if all(p.ready and p.leaving is None for p in world.replica(i))
            }
            most_away = max(most_away, 4 - len(ready))
            world.kubelets()
        assert not before & {p.uid for p in world.workers}
        assert most_away == at_once
        assert world.pods[head.name].uid == head.uid
        assert world.plan().actions == ()


def test_recreated_they_all_go_at_once() -> None:
    world = four_slices(upgradeStrategy={"type": "Recreate"})
    world.settle()
    before = {p.uid for p in world.pods.values()}
    changed(world)
    world.step()
    assert all(pod.leaving is not None for pod in world.pods.values())
    world.settle()
    assert not before & {p.uid for p in world.pods.values()}
    assert world.plan().actions == ()


def test_more_replicas_are_no_upgrade() -> None:
    world = four_slices(upgradeStrategy={"type": "Recreate"})
    world.settle()
    before = {p.uid for p in world.pods.values()}
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 5
    world.settle()
    assert before < {p.uid for p in world.pods.values()}


@pytest.mark.parametrize("name", ["max-unavailable", "placement-timeout-seconds"])
def test_how_many_at_once_and_how_long_are_numbers(name: str) -> None:
    raw = manifest(group())
    raw["metadata"]["annotations"][f"everstep.dev/{name}"] = "half"
    assert [p.path for p in problems(raw)] == [f"metadata.annotations[everstep.dev/{name}]"]


def test_slices_are_rolled_out_on_a_real_server(server: ApiServer, tmp_path: Path) -> None:
    space = Namespace(server)
    made = cluster(group(replicas=2, hosts=2))
    made["metadata"]["annotations"]["everstep.dev/max-unavailable"] = "1"
    with operating(server, tmp_path, "--namespace", space.name):
        space.apply(made)
        space.see(lambda: len(space.workers()) == 4, "two slices")
        space.run(*space.pods())
        space.see(lambda: space.status().get("slices") == "2/2", "both ready")
        before = space.uids()
        made["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["image"] = "other"
        space.apply(made)

        def one_is_new() -> bool:
            now = space.uids()
            return len(now) == 4 and len(now - before) == 2

        space.see(one_is_new, "one slice of the new template", kubelet=True)
        space.run(*space.workers())
        space.see(lambda: space.anew(4, before), "the other one", kubelet=True)
        assert {p["spec"]["containers"][0]["image"] for p in space.workers()} == {"other"}
        # Recreated, they all go at once, the head among them.
        del made["metadata"]["annotations"]["everstep.dev/max-unavailable"]
        made["spec"]["upgradeStrategy"] = {"type": "Recreate"}
        for member in (made["spec"]["headGroupSpec"], *made["spec"]["workerGroupSpecs"]):
            member["template"]["spec"]["containers"][0]["image"] = "third"
        space.run(*space.workers())
        space.apply(made)
        space.see(
            lambda: not space.pods() and len(space.get("pods")["items"]) == 5, "all to be told to leave"
        )
        space.see(lambda: len(space.pods()) == 5, "all anew", kubelet=True)
        assert {p["spec"]["containers"][0]["image"] for p in space.pods()} == {"third"}


_WORK = """
note() { echo "$1 $POD" >> LOG; }
trap 'note ended; exit 0' TERM
note started
while :; do sleep 0.1; done
"""

_HEAD = """
import os, signal, socket
listening = socket.create_server((os.environ["POD_IP"], 6379))
with open("LOG", "a") as log:
    print("started", os.environ["POD"], file=log)
signal.pause()
"""


def test_each_slice_is_told_before_it_ends_and_after_the_one_before_is_back(
    server: ApiServer, tmp_path: Path
) -> None:
    """Real processes and hooks, without Ray."""
    space, log = Namespace(server), tmp_path / "log"
    log.touch()

    def work(release: str, *command: str) -> dict[str, Any]:
        env = [
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "RELEASE", "value": release},
        ]
        told = ["bash", "-c", f'echo "told $POD" >> {log}']
        started = ["bash", "-c", f'grep -q "started $POD" {log}']
        ray = {
            "name": "ray",
            "image": "work",
            "command": [part.replace("LOG", str(log)) for part in command or ("bash", "-c", _WORK)],
            "env": env,
            "readinessProbe": {"exec": {"command": started}},
            "lifecycle": {"preStop": {"exec": {"command": told}}},
        }
        return {"spec": {"containers": [ray], "terminationGracePeriodSeconds": 60}}

    head = work("1", sys.executable, "-c", _HEAD)
    made = cluster(group(replicas=2, hosts=2, template=work("1")), headGroupSpec={"template": head})
    made["metadata"]["annotations"].update(
        {"everstep.dev/max-unavailable": "1", "ray.io/overwrite-container-cmd": "true"}
    )
    kubelets = ProcessKubelet(server, [f"{space.name}-{n}" for n in range(8)], space.name)
    with kubelets, operating(server, tmp_path, "--namespace", space.name):
        space.create(made)
        space.see(lambda: space.status().get("slices") == "2/2", "two slices")
        before = {
            index: {pod["metadata"]["name"] for pod in space.workers(index=index)} for index in range(2)
        }
        old = space.uids()
        space.patch_group(0, template=work("2"))
        space.see(lambda: space.anew(4, old) and space.status()["slices"] == "2/2", "both anew")
        successors = [pod["metadata"]["name"] for pod in space.workers()]
        at = {line: number for number, line in enumerate(log.read_text().splitlines())}
    for pod in before[0] | before[1]:
        assert at[f"told {pod}"] < at[f"ended {pod}"]
    first, second = sorted(before, key=lambda index: min(at[f"told {pod}"] for pod in before[index]))
    _, back, *_ = sorted(at[f"started {pod}"] for pod in successors)
    assert max(at[f"ended {pod}"] for pod in before[first]) < back
    assert back < min(at[f"told {pod}"] for pod in before[second])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_each_slice_is_told_before_it_is_replaced_so_that_no_step_is_made_twice(
    server: ApiServer, tmp_path: Path, short_folder: str
) -> None:
    """Real Ray nodes, and a run that saves only when it is asked to."""
    space = Namespace(server)
    see = space.see
    hosts = ray_group("w", 2, 1, rayStartParams={"num-cpus": "1"})
    hosts["template"]["spec"]["terminationGracePeriodSeconds"] = 60
    made = ray_cluster(short_folder, hosts)
    made["metadata"]["annotations"]["everstep.dev/max-unavailable"] = "1"
    wants = {"num_workers": [1, 2], "loop": {"save_every": "asked"}}
    kubelets = ProcessKubelet(server, [f"{space.name}-{n}" for n in range(6)], space.name)
    with kubelets as kubelet, operating(server, tmp_path, "--namespace", space.name):
        space.create(made)
        see(lambda: space.status().get("slices") == "2/2", "two slices of real Ray nodes")
        [head] = space.pods(group="headgroup")
        address = f"{head['status']['podIP']}:{made['spec']['headGroupSpec']['rayStartParams']['port']}"
        with training(address, tmp_path, kubelet.logs, **wants) as driver:
            see(lambda: world(tmp_path) == 2, "training on both")
            before, trained = space.uids(), len(notes_in(tmp_path))
            changed = space.cluster()["spec"]["workerGroupSpecs"]
            changed[0]["template"]["spec"]["containers"][0]["env"].append({"name": "RELEASE", "value": "2"})
            space.patch({"spec": {"workerGroupSpecs": changed}})
            see(lambda: space.anew(2, before), "both anew, one after the other")
            see(lambda: space.status()["slices"] == "2/2", "both ready")
            see(lambda: world(tmp_path) == 2, "training on both again")
            assert len(notes_in(tmp_path)) > trained
            (tmp_path / "until").touch()
            assert driver.wait(LIMIT_S) == 0, (tmp_path / "train.log").read_text()[-3000:]
        assert space.pods(group="headgroup")[0]["metadata"]["uid"] == head["metadata"]["uid"]
    notes = notes_in(tmp_path)
    steps = Counter((note["rank"], note["step"]) for note in notes if not note.get("restored"))
    assert set(steps.values()) == {1}, "a step was made twice"
    # A rank is ended inside the report that its attempt ends with, and notes that step when it is back.
    known = {step for _, step in steps} | {note["step"] for note in notes if note.get("restored")}
    assert known - {0} == set(range(1, max(known) + 1)), "a step is missing"
    assert len({note["epoch"] for note in notes}) > 2
