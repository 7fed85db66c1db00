"""What the operator reads of a RayCluster, by its types.

Pod templates are open in the definition, so that anything may be in there. What is read of it is of the right
kind, or the cluster is refused; what isn't read is left to the API server.
"""

from __future__ import annotations

from typing import Any

import msgspec

Anything = dict[str, Any]
Texts = dict[str, str]


class _Part(msgspec.Struct, rename="camel"):
    pass


class _Meta(_Part):
    name: str | None = None
    labels: Texts | None = None
    finalizers: list[str] | None = None
    annotations: Texts | None = None


class _Variable(_Part):
    name: str
    value: str | None = None
    value_from: Anything | None = None


class _Port(_Part):
    container_port: int
    name: str | None = None
    protocol: str | None = None


class _Resources(_Part):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class _Mount(_Part):
    name: str | None = None
    mount_path: str | None = None


class _Container(_Part):
    name: str | None = None
    image: str | None = None
    image_pull_policy: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[_Variable] | None = None
    env_from: list[Anything] | None = None
    ports: list[_Port] | None = None
    resources: _Resources | None = None
    volume_mounts: list[_Mount] | None = None
    security_context: Anything | None = None


class _PodSpec(_Part):
    containers: list[_Container] | None = None
    init_containers: list[Anything] | None = None
    volumes: list[Anything] | None = None
    node_selector: Texts | None = None
    hostname: str | None = None
    subdomain: str | None = None
    restart_policy: str | None = None
    service_account_name: str | None = None


class _Template(_Part):
    metadata: _Meta | None = None
    spec: _PodSpec | None = None


class _Member(_Part):
    template: _Template | None = None
    ray_start_params: Anything | None = None
    resources: Anything | None = None
    labels: Anything | None = None


class _ServicePort(_Part):
    port: int
    name: str | None = None


class _ServiceSpec(_Part):
    type: str | None = None
    ports: list[_ServicePort] | None = None
    publish_not_ready_addresses: bool | None = None


class _Service(_Part):
    metadata: _Meta | None = None
    spec: _ServiceSpec | None = None


class _Head(_Member):
    service_type: str | None = None
    head_service: _Service | None = None


class _ScaleStrategy(_Part):
    workers_to_delete: list[Any] | None = None


class _Group(_Member):
    group_name: str | None = None
    suspend: bool | None = None
    scale_strategy: _ScaleStrategy | None = None


class _Autoscaler(_Part):
    image: str | None = None
    image_pull_policy: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    resources: Anything | None = None
    env: list[_Variable] | None = None
    env_from: list[Anything] | None = None
    volume_mounts: list[Anything] | None = None
    security_context: Anything | None = None


class _Spec(_Part):
    ray_version: str | None = None
    suspend: bool | None = None
    enable_in_tree_autoscaling: bool | None = None
    autoscaler_options: _Autoscaler | None = None
    head_service_annotations: Texts | None = None
    head_group_spec: _Head | None = None
    worker_group_specs: list[_Group] | None = None


class _RayCluster(_Part):
    metadata: _Meta | None = None
    spec: _Spec | None = None


def misshapen(raw: object) -> tuple[str, str] | None:
    """The path of the first field that is of the wrong kind, and what is wrong with it."""
    try:
        msgspec.convert(raw, _RayCluster)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        return path.rstrip("`").removeprefix(".") or "metadata", said
    return None
