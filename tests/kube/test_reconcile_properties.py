"""From whatever has happened, reconcile gets to where it should be, and does no harm on the way."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings, strategies as st

from everstep.kube.actions import CreateReplica, DeletePod, Plan
from kube.world import World, group, manifest

EVENTS = (
    "kubelets", "reconcile", "half a plan", "fail", "delete", "vanish", "lose a node", "restart", "scale",
    "name a worker", "resize", "suspend", "suspend a group", "drop a group", "wait", "unready",
)  # fmt: skip


def live_places(world: World) -> Counter[tuple[str, int | None, int | None]]:
    return Counter((p.group, p.index, p.host) for p in world.workers if p.leaving is None)


def check_plan(world: World, plan: Plan) -> None:
    cluster = world.cluster
    groups = {g.name: g for g in cluster.groups}
    for action in plan.actions:
        if isinstance(action, CreateReplica):
            used = [p for p in world.workers if p.group == action.group and p.index == action.index]
            assert not used, f"index {action.index} is still used by {used}"
            assert len(action.pods) == groups[action.group].num_of_hosts
    deleted = {a.name for a in plan.actions if isinstance(a, DeletePod)}
    by_replica: dict[tuple[str, str | None], list[str]] = {}
    for pod in world.workers:
        if pod.leaving is None:
            by_replica.setdefault((pod.group, pod.replica), []).append(pod.name)
    for names in by_replica.values():
        assert not deleted & set(names) or set(names) <= deleted, "a replica goes whole"
    for spec in cluster.groups:
        healthy, touched = [], []
        for (name, _), pods in by_replica.items():
            members = [world.pods[p] for p in pods]
            if (
                name == spec.name
                and sorted(p.host or 0 for p in members) == list(range(members[0].hosts or 1))
                and not any(p.broken or p.node_lost or (p.restarts and (p.hosts or 1) > 1) for p in members)
                and not any(q.replica == members[0].replica and q.leaving is not None for q in world.workers)
            ):
                healthy.append(members)
                touched += [members] if members[0].name in deleted else []
        if cluster.suspend or spec.suspend:
            continue
        excused = [m for m in touched if any(p.name in spec.workers_to_delete for p in m)]
        idle = [m for m in touched if m[0].hosts != spec.num_of_hosts and not all(p.ready for p in m)]
        others = [m for m in touched if m not in excused and m not in idle]
        at_most_one = any(m[0].hosts != spec.num_of_hosts for m in others)
        surplus = max(0, len(healthy) - len(excused) - spec.desired)
        assert len(others) <= surplus + at_most_one, f"{others} were healthy"


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_it_gets_there_from_anywhere_and_harms_nobody_on_the_way(data: st.DataObject) -> None:
    world = World(manifest(group("a", 2, 2), group("b", 1, 3)))
    if data.draw(st.booleans(), "begun"):
        world.settle()
    hanging: set[str] = set()
    for _ in range(data.draw(st.integers(0, 25), "events")):
        happen(world, data, hanging)
        assert all(count == 1 for count in live_places(world).values()), live_places(world)

    world.raw["spec"].update(suspend=False)
    for spec in world.raw["spec"]["workerGroupSpecs"]:
        spec["suspend"] = False
    stuck = (
        frozenset(hanging & set(world.pods))
        if data.draw(st.booleans(), "some hang for ever")
        else frozenset()
    )
    for _ in range(60):
        plan = world.plan()
        check_plan(world, plan)
        world.carry_out(plan)
        assert all(count == 1 for count in live_places(world).values()), live_places(world)
        world.kubelets(stuck)
        world.now += 60.0
    assert world.plan().actions == ()
    for spec in world.cluster.groups:
        there = [p for p in world.workers if p.group == spec.name and p.leaving is None]
        whole = Counter(p.replica for p in there)
        assert len(whole) == spec.desired
        assert set(whole.values()) <= {spec.num_of_hosts}
    assert {p.group for p in world.workers if p.leaving is None} <= {g.name for g in world.cluster.groups}
    assert sum(p.node_type == "head" and p.leaving is None for p in world.pods.values()) == 1


def happen(world: World, data: st.DataObject, hanging: set[str]) -> None:
    event = data.draw(st.sampled_from(EVENTS))
    specs = world.raw["spec"]["workerGroupSpecs"]
    pods = sorted(world.pods)
    one = data.draw(st.sampled_from(pods)) if pods else None
    match event:
        case "kubelets":
            world.kubelets(frozenset(hanging))
        case "reconcile":
            plan = world.plan()
            check_plan(world, plan)
            world.carry_out(plan)
        case "half a plan":
            plan = world.plan()
            cut = data.draw(st.integers(0, len(plan.actions)))
            world.carry_out(Plan(plan.actions[:cut], None))
            # Killed amid a replica: some of its Pods were made.
            rest = plan.actions[cut] if cut < len(plan.actions) else None
            if isinstance(rest, CreateReplica):
                for pod in rest.manifests(world.cluster)[: data.draw(st.integers(0, 3))]:
                    world.add(pod)
        case "wait":
            world.now += data.draw(st.sampled_from([1.0, 40.0, 400.0]))
        case "suspend":
            world.raw["spec"]["suspend"] = data.draw(st.booleans())
        case "drop a group":
            if len(specs) > 1 and data.draw(st.integers(0, 3)) == 0:
                specs.pop()
        case "scale" | "resize" | "suspend a group" | "name a worker":
            spec = data.draw(st.sampled_from(specs))
            if event == "scale":
                spec["replicas"] = data.draw(st.integers(0, 4))
            elif event == "resize":
                spec["numOfHosts"] = data.draw(st.integers(1, 3))
            elif event == "suspend a group":
                spec["suspend"] = data.draw(st.booleans())
            elif one is not None:
                spec["scaleStrategy"] = {"workersToDelete": [one]}
        case _ if one is None:
            return
        case "fail":
            world.change(one, broken="Failed", ready=False)
        case "unready":
            world.change(one, ready=False)
        case "delete":
            world.delete(one)
            if data.draw(st.booleans()):
                hanging.add(one)
        case "vanish":
            del world.pods[one]
        case "lose a node":
            world.change(one, node_lost=True, ready=False)
        case "restart":
            world.change(one, restarts=1)
