"""Kubernetes quantities (``500m``, ``4Gi``) as numbers, and what a Pod template asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

_QUANTITY = re.compile(r"^([+-]?[0-9.]{1,30})(?:([eE][+-]?[0-9]{1,2})|([numkKMGTPE]i?))?$")
_POWERS = {"n": -3, "u": -2, "m": -1, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def number(quantity: object) -> Decimal:
    """Raises ``ValueError`` where it isn't one."""
    found = _QUANTITY.match(str(quantity))
    if found is None or found[1].count(".") > 1 or not any(c.isdigit() for c in found[1]):
        raise ValueError(f"{quantity!r} isn't a Kubernetes quantity like 2, 500m or 4Gi")
    value = Decimal(found[1])
    if found[2]:
        return value * Decimal(f"1{found[2]}")
    if not found[3]:
        return value
    power = _POWERS[found[3][0]]
    if found[3].endswith("i"):
        if power < 1:
            raise ValueError(f"{quantity!r} has an unknown suffix: use Ki, Mi, Gi, Ti, Pi or Ei")
        return value * Decimal(1024) ** power
    return value * Decimal(1000) ** power


def is_quantity(value: object) -> bool:
    try:
        number(value)
    except ValueError:
        return False
    return True


def rounded_up(quantity: object) -> int:
    return math.ceil(number(quantity))


def asked(container: Mapping[str, Any]) -> dict[str, Any]:
    """What the container may use: its limits, and its requests where it has no limit."""
    resources = container.get("resources") or {}
    return {**(resources.get("requests") or {}), **(resources.get("limits") or {})}


def requested(container: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler finds a node for: a request, and a limit where there is none."""
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def ray_container(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ray's is always the first."""
    container: Mapping[str, Any] = template["spec"]["containers"][0]
    return container


def total(pods: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, str]:
    """What these numbers of Pods of these templates request, by the names in KubeRay's status."""
    sums = dict.fromkeys(("CPU", "Memory", "GPU", "TPU"), Decimal(0))
    for count, template in pods:
        for container in template["spec"]["containers"]:
            for name, amount in requested(container).items():
                kind = _KINDS.get(name) or ("GPU" if name.endswith("gpu") else None)
                if kind is not None:
                    sums[kind] += count * number(amount)
    return {kind: text(amount, binary=kind == "Memory") for kind, amount in sums.items()}


_KINDS = {"cpu": "CPU", "memory": "Memory", "google.com/tpu": "TPU"}


def text(amount: Decimal, *, binary: bool = False) -> str:
    """As Kubernetes writes a quantity."""
    if amount != amount.to_integral_value():
        return f"{math.ceil(amount * 1000)}m"
    whole = int(amount)
    for power, suffix in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")):
        if binary and whole and whole % 1024**power == 0:
            return f"{whole // 1024**power}{suffix}"
    return str(whole)
