"""Slices, read off the labels of a cluster's hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.topology.discovery import Machine, matches, views
from everstep.topology.slices import describe_shortage, whole_slices
from everstep.topology.wanted import Wanted

ON_V6E = Wanted({"TPU": 4, "CPU": 1}, topology="2x4", accelerator_type="TPU-V6E")


def tpu(slice_name: str, index: int, chips: float = 4, **changes: object) -> Machine:
    labels = {
        "ray.io/tpu-slice-name": slice_name,
        "ray.io/tpu-worker-id": str(index),
        "ray.io/tpu-topology": "2x4",
        "ray.io/tpu-pod-type": "v6e-8",
        "ray.io/accelerator-type": "TPU-V6E",
    }
    has = {"TPU": chips, "CPU": 8}
    return replace(Machine(f"{slice_name}/{index}", labels, has, has), **changes)


def gpu(domain: str, index: int, **changes: object) -> Machine:
    has = {"GPU": 8, "CPU": 64}
    return replace(Machine(f"{domain}/{index}", {"domain": domain}, has, has), **changes)


def whole(machines: list[Machine], wanted: Wanted = ON_V6E) -> list[tuple[str, int]]:
    return [(s.name, s.slots) for s in whole_slices(views(machines, wanted))]


def test_a_slice_is_whole_when_all_its_hosts_are_there():
    assert whole([tpu("a", 0)]) == []
    assert whole([tpu("a", 1), tpu("a", 0)]) == [("a", 2)]
    assert [h.id for h in whole_slices(views([tpu("a", 1), tpu("a", 0)], ON_V6E))[0].hosts] == ["a/0", "a/1"]


def test_the_clusters_own_chip_counts_win_over_the_table():
    eight = Wanted({"TPU": 8}, topology="2x4", accelerator_type="TPU-V6E")
    assert whole([tpu("a", 0, chips=8)], eight) == [("a", 1)]
    assert whole([tpu("a", 0, chips=8)]) == [("a", 2)]


def test_four_slices_with_a_dead_host_each_and_two_that_others_hold_are_no_slices():
    broken = [tpu(f"s{i}", h, alive=h == 0) for i in range(4) for h in range(2)]
    held = [tpu(f"t{i}", h, available={"CPU": 8, "TPU": 0}) for i in range(2) for h in range(2)]
    assert whole(broken + held) == []
    shortage = describe_shortage(views(broken + held, ON_V6E))
    assert "s0: not whole (1 of 2 hosts there; lost: s0/1)" in shortage
    assert "t1: not whole (in use by others: t1/0, t1/1)" in shortage


def test_what_others_use_of_a_host_and_we_do_not_ask_for_does_no_harm():
    assert whole([tpu("a", h, available={"CPU": 3, "TPU": 4}) for h in range(2)]) == [("a", 2)]
    assert whole([tpu("a", h, available={"CPU": 0, "TPU": 4}) for h in range(2)]) == []


@pytest.mark.parametrize(
    "second",
    [
        tpu("a", 0, id="other"),
        tpu("a", 2),
        tpu("a", 1, chips=3),
        tpu("a", 1, alive=False),
        tpu("a", 1, labels={**tpu("a", 1).labels, "ray.io/tpu-worker-id": "x"}),
    ],
    ids=["index twice", "index too high", "chips missing", "dead", "no index"],
)
def test_a_slice_that_does_not_add_up_is_not_whole(second):
    assert whole([tpu("a", 0), second]) == []


def test_a_host_that_took_a_dead_ones_place_completes_the_slice():
    assert whole([tpu("a", 0), tpu("a", 1, alive=False), tpu("a", 1, id="new")]) == [("a", 2)]


def test_hosts_of_another_kind_or_shape_do_not_count():
    other = {**tpu("b", 0).labels, "ray.io/accelerator-type": "TPU-V5LITEPOD"}
    shape = {**tpu("c", 0).labels, "ray.io/tpu-topology": "4x4"}
    machines = [tpu("b", h, labels={**other, "ray.io/tpu-worker-id": str(h)}) for h in range(2)]
    machines += [tpu("c", h, labels={**shape, "ray.io/tpu-worker-id": str(h)}) for h in range(2)]
    assert views(machines, ON_V6E) == ()


def test_without_a_topology_label_the_pod_type_says_how_many_chips_there_are():
    wanted = Wanted({"TPU": 4})
    machines = [tpu("a", h) for h in range(2)]
    bare = [
        replace(m, labels={k: v for k, v in m.labels.items() if k != "ray.io/tpu-topology"}) for m in machines
    ]
    assert whole(bare[:1], wanted) == []
    assert whole(bare, wanted) == [("a", 2)]


def test_a_domain_of_the_users_choice_is_a_slice():
    wanted = Wanted({"GPU": 1}, slice_label="domain", hosts_per_slice=2)
    assert whole([gpu("d1", 0), gpu("d1", 1), gpu("d2", 0)], wanted) == [("d1", 16)]
    assert whole([gpu("d1", 0), gpu("d1", 1, alive=False)], wanted) == []
    unsized = Wanted({"GPU": 1}, slice_label="domain")
    assert whole([gpu("d1", 0), gpu("d1", 1), gpu("d2", 0)], unsized) == [("d1", 16), ("d2", 8)]


def made_by_the_operator(slice_name: str, index: int, **changes: object) -> Machine:
    """A GPU host with the labels that the operator gives to what is not a TPU. Node ids say nothing."""
    labels = {"everstep.dev/slice": slice_name, "everstep.dev/slice-host": str(index), "rack": "r1"}
    return gpu("", 0, **{"id": f"{(7 * index + 5) % 11}-{slice_name}", "labels": labels} | changes)


def order(machines: list[Machine], wanted: Wanted) -> list[list[str]]:
    names = {m.id: f"{m.labels.get('everstep.dev/slice', m.hostname)}/{i}" for i, m in enumerate(machines)}
    return [[names[host.id] for host in found.hosts] for found in whole_slices(views(machines, wanted))]


OF_THE_OPERATOR = Wanted({"GPU": 8}, slice_label="everstep.dev/slice")


def test_hosts_of_any_slice_are_in_the_order_in_which_the_operator_numbered_them():
    machines = [made_by_the_operator("gpu-0", index) for index in range(4)]
    assert order(machines, OF_THE_OPERATOR) == [[f"gpu-0/{index}" for index in range(4)]]
    assert order(machines[::-1], OF_THE_OPERATOR) == [[f"gpu-0/{index}" for index in (3, 2, 1, 0)]]


def test_a_slice_in_which_a_numbered_host_is_missing_is_not_whole():
    without = [made_by_the_operator("gpu-0", index) for index in (0, 2, 3)]
    assert whole(without, OF_THE_OPERATOR) == []
    assert "gpu-0: not whole (3 of 4 hosts there)" in describe_shortage(views(without, OF_THE_OPERATOR))
    twice = [*without, made_by_the_operator("gpu-0", 2, id="other")]
    assert whole(twice, replace(OF_THE_OPERATOR, hosts_per_slice=4)) == []
    dead = [*without, made_by_the_operator("gpu-0", 1, alive=False)]
    assert whole(dead, OF_THE_OPERATOR) == []
    assert whole([*dead, made_by_the_operator("gpu-0", 1, id="new")], OF_THE_OPERATOR) == [("gpu-0", 4)]


def test_a_domain_around_several_slices_of_the_operators_keeps_each_of_them_together():
    machines = [made_by_the_operator(f"gpu-{s}", index) for s in (10, 2) for index in (1, 0)]
    wanted = Wanted({"GPU": 8}, slice_label="rack")
    assert order(machines, wanted) == [["gpu-2/3", "gpu-2/2", "gpu-10/1", "gpu-10/0"]]


def test_hosts_that_nobody_numbered_are_in_the_order_of_their_names():
    machines = [gpu("d", i, id=f"{9 - i}", hostname=f"node-{n}") for i, n in enumerate((10, 9, 1))]
    assert order(machines, Wanted({"GPU": 8}, slice_label="domain")) == [
        ["node-1/2", "node-9/1", "node-10/0"]
    ]


def named_only(slice_name: str, index: int, pod_type: str = "v6e-8", **labels: str) -> Machine:
    """As a TPU VM is known to Ray without GKE."""
    known = {"ray.io/tpu-slice-name": slice_name, "ray.io/tpu-pod-type": pod_type, **labels}
    return tpu(slice_name, index, labels=known, id=f"{slice_name}/{9 - index}", hostname=f"w-{index}")


def test_slices_that_are_known_by_name_and_pod_type_only_are_found():
    numbered = [named_only("a", h, **{"ray.io/tpu-worker-id": str(h)}) for h in range(2)]
    assert whole(numbered[:1]) == []
    assert whole(numbered) == [("a", 2)]
    bare = [named_only("a", h) for h in range(2)]
    assert [h.id for h in whole_slices(views(bare, ON_V6E))[0].hosts] == ["a/9", "a/8"], "by host name"
    assert whole(bare[:1]) == []


def test_a_pod_type_of_other_chips_or_another_kind_does_not_count():
    for other in ("v6e-16", "v5litepod-8", "v4-16", "nonsense"):
        assert views([named_only("a", h, other) for h in range(2)], ON_V6E) == ()


def test_a_lone_host_is_a_slice_and_may_serve_others_beside_us():
    busy = gpu("d", 0, available={"GPU": 3, "CPU": 1})
    assert whole([busy], Wanted({"GPU": 1})) == [("d/0", 3)]
    assert whole([busy], Wanted({"GPU": 1}, at_most=2)) == [("d/0", 2)]
    assert whole([gpu("d", 0, available={"GPU": 0})], Wanted({"GPU": 1})) == []


def test_label_selectors_follow_rays_rules():
    labels = {"zone": "a", "tier": "spot"}
    assert matches(labels, {"zone": "a"})
    assert not matches(labels, {"zone": "b"})
    assert matches(labels, {"zone": "in(a, b)", "tier": "!on-demand"})
    assert not matches(labels, {"tier": "!in(spot,preemptible)"})
    assert matches(labels, {"rack": "!7"})
