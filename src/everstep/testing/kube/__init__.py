"""Kubernetes on this machine, for tests: a real API server, and a kubelet whose containers are processes."""

from everstep.testing.kube.kubelet import ProcessKubelet as ProcessKubelet
from everstep.testing.kube.ray_nodes import ray_cluster as ray_cluster, ray_group as ray_group
from everstep.testing.kube.server import (
    ApiServer as ApiServer,
    NoApiServer as NoApiServer,
    find_programs as find_programs,
)

__all__ = ["ApiServer", "NoApiServer", "ProcessKubelet", "find_programs", "ray_cluster", "ray_group"]
