"""What a run asks of Ray's autoscaler, put before the autoscaler's own scheduler, unmodified."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest
from ray.core.generated.common_pb2 import LabelSelectorOperator

from everstep import Deadlines, ScalingConfig
from everstep.engine.base import EngineRequest
from everstep.engine.ray import demand as demands
from everstep.engine.ray.cluster import Node
from everstep.engine.ray.demand import Demand

V6E = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    "cloud.google.com/gke-tpu-topology": "4x4",
}
ON_TPU = ScalingConfig(use_tpu=True, topology="4x4", accelerator_type="TPU-V6E", num_workers=(4, 8))
ON_GPU = ScalingConfig(use_gpu=True, accelerator_type="H100", num_workers=(1, 2))


def group(name: str, hosts: int, limits: dict[str, Any], selector: Any = None, **more: Any) -> dict[str, Any]:
    container = {"name": "ray", "image": "ray", "resources": {"limits": {"cpu": "8", **limits}}}
    template = {"spec": {"nodeSelector": selector or {}, "containers": [container]}}
    counts = {"replicas": 0, "minReplicas": 0, "maxReplicas": 4, "numOfHosts": hosts}
    return {"groupName": name, "rayStartParams": {}, "template": template, **counts, **more}


def tpus(name: str = "tpu", **more: Any) -> dict[str, Any]:
    return group(name, 4, {"google.com/tpu": "4"}, V6E, **more)


def gpus(name: str = "gpu", **more: Any) -> dict[str, Any]:
    return group(name, 1, {"nvidia.com/gpu": "1"}, **more)


def node_types(*groups: dict[str, Any]) -> Any:
    head = {"rayStartParams": {"num-cpus": "0"}, "template": group("head", 1, {})["template"]}
    cluster = {
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {"headGroupSpec": head, "workerGroupSpecs": list(groups)},
    }
    return AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(cluster))


def selector(labels: dict[str, str]) -> list[tuple[str, int, list[str]]]:
    """As Ray's control store tells the autoscaler of it."""
    found = []
    for key, rule in labels.items():
        excluded = rule.startswith("!")
        rule = rule.removeprefix("!")
        values = rule[3:-1].split(",") if rule.startswith("in(") else [rule]
        operator = "LABEL_OPERATOR_NOT_IN" if excluded else "LABEL_OPERATOR_IN"
        found.append((key, LabelSelectorOperator.Value(operator), values))
    return found


def launched(scaling: ScalingConfig, times: int, *groups: dict[str, Any]) -> dict[str, int]:
    """What the autoscaler starts for so many pending placement groups, in a cluster of a head alone."""
    ask = EngineRequest("run", 1, {}, 0, scaling.max_workers, Deadlines(), scaling.wanted)
    head = Node("f" * 56, "10.0.0.1", True, {}, {"CPU": 8.0})
    wish = Demand("everstep/x/", ask).wish([head])
    apart = ResourceRequestUtil.PlacementConstraintType.ANTI_AFFINITY
    gangs = []
    for _ in range(times):
        mark = uuid.uuid4().hex
        constraints = [(apart, mark, "")] if wish.apart else []
        wants = [ResourceRequestUtil.make(b, constraints, [selector(wish.labels)]) for b in wish.bundles]
        gangs.append(GangResourceRequest(requests=wants))
    config = node_types(*groups)
    reply = ResourceDemandScheduler(AutoscalerEventLogger(_Silent())).schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_nodes(),
            gang_resource_requests=gangs,
        )
    )
    return {start.instance_type: start.count for start in reply.to_launch}


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_two_slices_are_started_where_nothing_but_resources_is_known_of_them() -> None:
    assert launched(ON_TPU, 2, tpus()) == {"tpu": 8}


@pytest.mark.parametrize(("hosts", "chips"), [(1, 8), (2, 4)])
@pytest.mark.parametrize("each", [1, 4])
def test_a_topology_that_comes_on_one_host_or_on_several_is_asked_for_as_either(
    hosts: int, chips: int, each: int
) -> None:
    two = 2 * 8 // each
    wants = ScalingConfig(
        use_tpu=True,
        topology="2x4",
        accelerator_type="TPU-V6E",
        num_workers=(two // 2, two),
        resources_per_worker={"TPU": each},
    )
    small = group(
        "tpu", hosts, {"google.com/tpu": str(chips)}, {**V6E, "cloud.google.com/gke-tpu-topology": "2x4"}
    )
    assert launched(wants, 2, small) == {"tpu": 2 * hosts}


def test_a_group_that_is_labelled_as_something_else_is_not_started() -> None:
    right = {"ray.io/tpu-topology": "4x4", "ray.io/accelerator-type": "TPU-V6E"}
    assert launched(ON_TPU, 2, tpus(labels=right)) == {"tpu": 8}
    for wrong in (
        {"ray.io/tpu-topology": "2x8"},
        {"ray.io/accelerator-type": "TPU-V5LITEPOD"},
        {"ray.io/accelerator-type": "TPU-V4", "ray.io/tpu-topology": "4x4"},
    ):
        assert launched(ON_TPU, 2, tpus("other", labels=wrong)) == {}
        assert launched(ON_TPU, 1, tpus("other", labels=wrong), tpus(labels=right)) == {"tpu": 4}


def test_an_accelerator_that_is_no_tpu_is_started_with_and_without_labels() -> None:
    assert launched(ON_GPU, 2, gpus()) == {"gpu": 2}
    assert launched(ON_GPU, 1, gpus(labels={"ray.io/accelerator-type": "H100"})) == {"gpu": 1}
    assert launched(ON_GPU, 1, gpus(labels={"ray.io/accelerator-type": "A100"})) == {}
    assert launched(ON_GPU, 1, tpus()) == {}, "TPUs are no GPUs"


@pytest.mark.parametrize("zone", ["a", "b"])
def test_labels_that_the_user_asks_for_must_be_there(zone: str) -> None:
    scaling = ScalingConfig(num_workers=1, label_selector={"zone": "a"})
    there = launched(scaling, 1, gpus(labels={"zone": zone}))
    assert there == ({"gpu": 1} if zone == "a" else {})


class Groups:
    """The placement groups of a cluster, as the demand makes and removes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table: dict[str, dict[str, Any]] = {}
        monkeypatch.setattr(demands, "placement_group", self._make)
        monkeypatch.setattr(demands.cluster, "remove_group", self.table.pop)
        ask = EngineRequest("run", 1, {}, 0, ON_TPU.max_workers, Deadlines(), ON_TPU.wanted)
        self.demand = Demand("everstep/x/", ask)

    def _make(self, bundles: list[Any], name: str, **_: Any) -> None:
        self.table[name] = {"name": name, "state": "PENDING", "bundles_to_node_id": {0: ""}}

    def meet(self, name: str, *hosts: str) -> None:
        self.table[name].update(state="CREATED", bundles_to_node_id=dict(enumerate(hosts)))

    def look(self, short: int, there: list[str], arriving: set[str]) -> list[str]:
        nodes = [Node(host, "10.0.0.1", True, {}, {"TPU": 4.0}) for host in there]
        self.demand.update(short, nodes, arriving, dict(self.table))
        return sorted(self.table)


def test_what_is_asked_for_stays_while_the_hosts_of_its_slices_come_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Groups(monkeypatch)
    one, two = groups.look(8, ["head"], set())
    assert groups.look(8, ["head", "a0", "b0"], {"a0", "b0"}) == [one, two]
    # Ray has put hosts of two slices together: they are neither, and nothing more is missing than before.
    groups.meet(one, "a0", "b0")
    assert groups.look(8, ["head", "a0", "b0"], {"a0", "b0"}) == [one, two]
    # Slice b is whole. What holds a part of it goes, and the rest is asked for once that is free.
    there = ["head", "a0", "b0", "b1"]
    assert groups.look(4, there, {"a0"}) == []
    [three] = groups.look(4, there, {"a0"})
    assert groups.look(4, there, {"a0"}) == [three]
    assert groups.look(0, [*there, "a1"], set()) == []


def test_what_is_met_by_a_whole_slice_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    [one] = groups.look(4, ["head"], set())
    groups.meet(one, "a0", "a1")
    assert groups.look(0, ["head", "a0", "a1"], set()) == []
