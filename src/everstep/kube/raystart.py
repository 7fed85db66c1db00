"""The ``ray start`` command of a node, with KubeRay's defaults and spelling. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from everstep.kube import names, quantities
from everstep.kube.spec import GroupSpec, HeadSpec

AGENT_PORT = "52365"
METRICS_PORT = "8080"

_TAKES_A_BOOLEAN = ("include-dashboard", "include-log-monitor", "log-color")
"""These want ``=true`` or ``=false``; all other flags that are true or false are there or not."""
_ACCELERATORS = {"aws.amazon.com/neuroncore": "neuron_cores", names.TPU_RESOURCE: "TPU"}
"""What Ray calls them. One kind a node."""
_MIG = re.compile(r"^nvidia\.com/mig-\d+g\.\d+gb$")
_QUOTES = "'\"` "

Flags = dict[str, str]


def command(
    member: HeadSpec | GroupSpec,
    defaults: Mapping[str, str],
    labels: Mapping[str, str],
    *,
    monitor: bool = True,
) -> str:
    """What the user says in ``rayStartParams`` wins over defaults; a group's ``resources`` and ``labels`` win
    over ``rayStartParams``. Without ``monitor``, Ray's built-in autoscaler stays off: another one runs.
    """
    flags = {
        "block": "true",
        "dashboard-agent-listen-port": AGENT_PORT,
        "metrics-export-port": METRICS_PORT,
        **defaults,
        **member.ray_start_params,
        **_resources_of_group(member.resources),
        **({} if monitor else {"no-monitor": "true"}),
    }
    container = quantities.ray_container(member.template)
    flags = with_container(flags, container.get("resources") or {})
    every_label = {**dict(sorted(member.labels.items())), **labels}
    if every_label:
        flags["labels"] = shlex.quote(",".join(f"{key}={value}" for key, value in every_label.items()))
    return spelled(flags, is_head=isinstance(member, HeadSpec))


def spelled(flags: Mapping[str, str], *, is_head: bool) -> str:
    words = ["ray start", *(["--head"] if is_head else [])]
    for flag, value in sorted(flags.items()):
        switch = value.lower() if flag not in _TAKES_A_BOOLEAN else ""
        if switch == "true":
            words.append(f"--{flag}")
        elif switch != "false":
            words.append(f"--{flag}={value}")
    return " ".join(words)


def with_container(given: Mapping[str, str], resources: Mapping[str, Any]) -> Flags:
    """The resources that Ray gets for the node by default: what its container may use."""
    flags = dict(given)
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    cpu = _some(limits.get("cpu")) or _some(requests.get("cpu"))
    if cpu:
        flags.setdefault("num-cpus", _count(cpu))
    memory = _some(limits.get("memory"))
    if memory:
        flags.setdefault("memory", _count(memory))
    custom = _parsed(flags.get("resources"))
    if custom is None:
        return flags  # ray start will say what is wrong with it
    for name, amount in sorted(limits.items()):
        if not _some(amount):
            continue
        if is_gpu(name):
            flags.setdefault("num-gpus", _count(amount))
        elif name in _ACCELERATORS and not set(_ACCELERATORS.values()) & set(custom):
            custom[_ACCELERATORS[name]] = _number(amount)
            flags["resources"] = _json(custom)
    return flags


def is_gpu(resource: str) -> bool:
    return resource.endswith("gpu") or _MIG.match(resource) is not None


def _resources_of_group(resources: Mapping[str, str]) -> Flags:
    flags: Flags = {}
    custom: dict[str, Any] = {}
    for name, amount in resources.items():
        known = name.lower()
        if known in ("cpu", "memory"):
            flags["num-cpus" if known == "cpu" else "memory"] = _count(amount)
        elif is_gpu(known):
            flags["num-gpus"] = _count(amount)
        else:
            custom[name] = _number(amount)
    if custom:
        flags["resources"] = _json(custom)
    return flags


def _some(quantity: object) -> object | None:
    return quantity if quantity is not None and quantities.number(quantity) else None


def _count(quantity: object) -> str:
    return str(quantities.rounded_up(quantity))


def _number(quantity: object) -> int | float:
    exact = quantities.number(quantity)
    return int(exact) if exact == exact.to_integral_value() else float(exact)


def _parsed(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return {}
    try:
        found = json.loads(text.strip(_QUOTES))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _json(resources: Mapping[str, Any]) -> str:
    return shlex.quote(json.dumps(resources, separators=(",", ":"), sort_keys=True))
