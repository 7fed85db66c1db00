"""The ``ray start`` command: what KubeRay would start, word for word."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.kube import pods
from everstep.kube.raystart import spelled, with_container
from everstep.kube.spec import parse
from kube.world import group, manifest, template

GPU, TPU, NEURON = "nvidia.com/gpu", "google.com/tpu", "aws.amazon.com/neuroncore"

COMMANDS: dict[str, tuple[bool, dict[str, str], dict[str, Any], str]] = {
    "a worker with a GPU": (False, {}, {"limits": {GPU: "1"}}, "ray start --num-gpus=1"),
    "a worker with TPUs": (False, {}, {"limits": {TPU: "4"}}, "ray start --resources='{\"TPU\":4}'"),
    "a head with Neuron cores": (
        True, {}, {"limits": {NEURON: "4"}}, "ray start --head --resources='{\"neuron_cores\":4}'",
    ),
    "GPUs beside Neuron cores": (
        True, {}, {"limits": {NEURON: "4", GPU: "1"}},
        "ray start --head --num-gpus=1 --resources='{\"neuron_cores\":4}'",
    ),
    "one kind of accelerator a node": (
        True, {}, {"limits": {TPU: "8", NEURON: "4", GPU: "1"}},
        "ray start --head --num-gpus=1 --resources='{\"neuron_cores\":4}'",
    ),
    "resources of the user's own are kept": (
        True, {"resources": '"{"custom_resource":2}"'}, {"limits": {NEURON: "4"}},
        'ray start --head --resources=\'{"custom_resource":2,"neuron_cores":4}\'',
    ),
    "Neuron cores that the user counts": (
        True, {"resources": '\'{"custom_resource":2,"neuron_cores":3}\''}, {"limits": {NEURON: "4"}},
        'ray start --head --resources=\'{"custom_resource":2,"neuron_cores":3}\'',
    ),
    "TPUs that the user counts": (
        True, {"resources": '\'{"custom_resource":2,"TPU":4}\''}, {"limits": {TPU: "8"}},
        'ray start --head --resources=\'{"custom_resource":2,"TPU":4}\'',
    ),
    "resources that are no JSON are left to ray start": (
        True, {"resources": "{"}, {"limits": {NEURON: "4"}}, "ray start --head --resources={",
    ),
    "CPUs by the request where there is no limit, memory only by the limit": (
        False, {}, {"requests": {"cpu": "1500m", "memory": "1Gi"}}, "ray start --num-cpus=2",
    ),
    "part of a GPU": (False, {}, {"limits": {"nvidia.com/mig-2g.32gb": "3"}}, "ray start --num-gpus=3"),
    "none of it": (False, {}, {"limits": {GPU: "0", "cpu": "0"}}, "ray start"),
}  # fmt: skip


@pytest.mark.parametrize("what", COMMANDS)
def test_the_command_is_kuberays(what: str) -> None:
    is_head, params, resources, expected = COMMANDS[what]
    assert spelled(with_container(params, resources), is_head=is_head) == expected


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("include-dashboard", "true", "--include-dashboard=true"),
        ("include-dashboard", "false", "--include-dashboard=false"),
        ("include-log-monitor", "False", "--include-log-monitor=False"),
        ("log-color", "auto", "--log-color=auto"),
        ("no-monitor", "True", "--no-monitor"),
        ("no-monitor", "TRUE", "--no-monitor"),
        ("disable-usage-stats", "false", ""),
        ("num-cpus", "0", "--num-cpus=0"),
    ],
)
def test_what_is_true_or_false_is_spelled_as_ray_start_wants_it(flag: str, value: str, said: str) -> None:
    assert spelled({flag: value}, is_head=False) == f"ray start {said}".strip()


def started(**member: Any) -> str:
    cluster = parse(manifest(group(hosts=1, **member)))
    made = pods.worker_pod(cluster, cluster.groups[0], "a-name", "tpu-xxxxx", 0, 0)
    return str(made["spec"]["containers"][0]["args"][0])


def test_resources_of_a_group_are_known_in_any_case_and_may_be_fractions() -> None:
    said = started(resources={"cpu": "1500m", "Memory": "1Gi", "gpu": "2", "special": "0.5"})
    assert "--num-cpus=2 " in said
    assert f"--memory={1 << 30} " in said
    assert "--num-gpus=2 " in said
    assert "--resources='{\"special\":0.5}'" in said


def test_every_command_is_one_that_ray_takes() -> None:
    """Ray's own parser, without starting anything."""
    from ray.scripts.scripts import start

    made = template()
    made["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "2", "memory": "1Gi", TPU: "4"}}
    said = started(
        template=made,
        labels={"zone": "here"},
        rayStartParams={"include-dashboard": "true", "no-monitor": "True", "disable-usage-stats": "false"},
    )
    words = said.partition("ray start ")[2].split()
    start.make_context("start", [word.replace("'", "") for word in words])
