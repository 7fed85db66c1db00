"""What Ray knows: nodes, which of them drain, what is reserved, which actors and drivers live. No decisions.

Some of this has no public API that works without Ray's dashboard; all private calls are here.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state
from ray.util.client import ray as client

from everstep.errors import ConfigError

NAMESPACE = "everstep"
NODE_ID = "ray.io/node-id"


@dataclass(frozen=True)
class Node:
    """A node of the cluster, as Ray's own control store has it."""

    id: str
    address: str
    alive: bool
    labels: Mapping[str, str]
    total: Mapping[str, float]
    hostname: str = ""


def connect() -> None:
    """Join the cluster as a driver, if that hasn't been done. A ``ray://`` client is not a driver of it."""
    address = os.environ.get("RAY_ADDRESS", "")
    if client.is_connected() or (not ray.is_initialized() and address.startswith("ray://")):
        raise ConfigError(
            "engine='ray' with a ray:// address: such a client sits outside the cluster, and what it started "
            "dies when its connection does.",
            "Run the script on a node of the cluster, for example with `ray job submit`.",
            "Trainer.engine",
        )
    if not ray.is_initialized():
        try:
            ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ConfigError(
                f"engine='ray': no Ray cluster was found ({error}).",
                "Start one (`ray start --head`) or set RAY_ADDRESS; engine='local' needs none.",
                "Trainer.engine",
            ) from error


def driver_name() -> str:
    """This driver, as ``is_dead`` knows it again: the cluster and the number of its job there."""
    context = ray.get_runtime_context()
    return f"{_cluster_id()}/{context.get_job_id()}"


def has_working_folder() -> bool:
    """Whether Ray made a folder for this process to work in, as it does for all that this process starts."""
    return bool(ray.get_runtime_context().runtime_env.get("working_dir"))


def is_dead(driver: str) -> bool:
    """Whether Ray says that this driver has ended. False for a driver of another cluster, of which it can't
    know.
    """
    cluster, _, number = driver.partition("/")
    if not number or cluster != _cluster_id():
        return False
    return any(job["JobID"] == number and job["IsDead"] for job in state.job_table())


def _cluster_id() -> str:
    return str(ray._private.worker.global_worker.gcs_client.cluster_id.hex())


def nodes() -> list[Node]:
    return [
        Node(
            found["NodeID"],
            found["NodeManagerAddress"],
            bool(found["Alive"]),
            found.get("Labels") or {},
            found.get("Resources") or {},
            found.get("NodeManagerHostname") or "",
        )
        for found in ray.nodes()
    ]


def available() -> dict[str, dict[str, float]]:
    """What nobody holds, by node."""
    found: dict[str, dict[str, float]] = state.available_resources_per_node()
    return found


def this_node() -> str:
    """The id of the node that this process is on."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


def draining() -> dict[str, float]:
    """Nodes that are about to go, and when: UNIX seconds, 0 where that isn't known."""
    return {node: deadline / 1000 for node, deadline in state.get_draining_nodes().items()}


def tag_of(run: str) -> str:
    """What the names of all that belongs to a run begin with."""
    return f"everstep/{short_digest(run)}/"


def short_digest(text: str) -> str:
    """A name for what has a longer one."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lease_of(tag: str, name: str) -> int:
    """The lease of the driver that made this actor or placement group: ``LEASE.RESERVATION/SLICE/HOST`` or
    ``demand/LEASE.NUMBER`` after the tag. 0 for the sweeper, which is every driver's.
    """
    lease, dot, _ = name.removeprefix(tag).removeprefix("demand/").partition(".")
    return int(lease) if dot and lease.isdigit() else 0


def groups(tag: str) -> dict[str, dict[str, Any]]:
    """Placement groups whose names begin so and that are not removed, by id: the records of Ray's table."""
    return {
        number: record
        for number, record in state.placement_group_table().items()
        if record["name"].startswith(tag) and record["state"] != "REMOVED"
    }


def remove_group(number: str) -> None:
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))


def remove_named(name: str) -> None:
    """Whatever placement group has this name."""
    for number, record in groups(name).items():
        if record["name"] == name:
            remove_group(number)


def actors(tag: str) -> list[str]:
    """Names of the living actors whose names begin so."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"] for actor in found if actor["namespace"] == NAMESPACE and actor["name"].startswith(tag)
    )


def kill(name: str) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    except ValueError:
        pass  # it is gone already


def sweep(tag: str, but: str = "") -> bool:
    """End all actors and give back all reservations with this tag. True if nothing was left."""
    names = [name for name in actors(tag) if name != but]
    reserved = list(groups(tag))
    for name in names:
        kill(name)
    for number in reserved:
        remove_group(number)
    return not names and not reserved
