"""What this machine has: processors and GPUs, and whether a run's workers can fit at all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache

from everstep.agent import descriptors
from everstep.engine.base import EngineRequest
from everstep.engine.local.cluster import LocalCluster
from everstep.errors import InfeasibleResourcesError, RefusedError
from everstep.process import kernel

_LEAST_MEMORY = 4 << 20
"""Bytes that even a worker that does nothing has for itself, once it is forked (7 MiB, measured)."""
_SERVED_RUNTIME_ENV = ("env_vars", "working_dir")


@cache
def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(name for name in given.split(",") if name and name != "-1")
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listing.stdout.split())


def check_feasible(request: EngineRequest, cluster: LocalCluster | None) -> None:
    """Refuse, before anything starts, what this machine can never give."""
    for key, value in request.runtime_env.items():
        if key not in _SERVED_RUNTIME_ENV or (key == "working_dir" and "://" in value):
            raise RefusedError(
                f"RunConfig.worker_runtime_env[{key!r}] is refused: the local engine serves "
                f"{' and '.join(_SERVED_RUNTIME_ENV)}, the rest needs engine='ray'.",
                "Prepare it in the environment that you start from instead.",
                f"RunConfig.worker_runtime_env.{key}",
            )
    asked = {
        "use_tpu": bool(request.wanted.per_worker.get("TPU")),
        "accelerator_type": request.wanted.accelerator_type,
        "label_selector": request.wanted.labels,
        "slice_label": request.wanted.slice_label,
    }
    for name, value in asked.items():
        if value:
            raise InfeasibleResourcesError(
                f"ScalingConfig({name}={value!r}): the local engine has no such hosts",
                f"leave {name} out, or run on a cluster that has them, with engine='ray'",
            )
    need = dict(request.resources)
    if request.gpus:
        need["GPU"] = request.gpus
    if cluster is None:
        _check_machine(request, need)
    else:
        _check_cluster(request, need, cluster)


def _check_cluster(request: EngineRequest, need: Mapping[str, float], cluster: LocalCluster) -> None:
    """Virtual hosts have room for so many workers each, and share the machine's processors."""
    for name, amount in need.items():
        if name != "CPU" and amount:
            raise InfeasibleResourcesError(
                f"each worker needs {amount:g} {name}, and the hosts of a LocalCluster have none: they are "
                "virtual, with room for workers and nothing else",
                "leave use_gpu and resources_per_worker out; for this machine's GPUs leave the LocalCluster "
                "out: engine='local'",
            )
    slots = cluster.workers_per_host
    if slots is not None and cluster.hosts_per_slice > 1:
        per_slice = slots * cluster.hosts_per_slice
        if request.workers % per_slice:
            lower = request.workers - request.workers % per_slice
            nearest = " or ".join(str(n) for n in (lower, lower + per_slice) if n)
            raise InfeasibleResourcesError(
                f"num_workers={request.workers} doesn't fill whole slices of {per_slice} workers",
                f"ask for {nearest}: a slice is used whole or not at all",
            )


def _check_machine(request: EngineRequest, need: Mapping[str, float]) -> None:
    room, limit = min(_rooms())
    if request.workers > room:
        raise InfeasibleResourcesError(
            f"{request.workers} workers on this machine, which has room for at most {room}: {limit}",
            "ask for fewer (ScalingConfig.num_workers; --nproc-per-node of `everstep run`), or raise that "
            "limit",
        )
    have: dict[str, float] = {"CPU": os.cpu_count() or 1, "GPU": len(visible_gpus())}
    for name, amount in need.items():
        total = amount * request.workers
        if total > have.get(name, 0):
            asked = "use_gpu" if name == "GPU" else "resources_per_worker"
            raise InfeasibleResourcesError(
                f"{request.workers} workers need {total:g} {name} ({asked}: {amount:g} each), and "
                f"this machine has {have.get(name, 0):g}",
                f"ask for fewer workers or less for each in ScalingConfig, or leave {asked} out to share the "
                "processors",
            )


def _rooms() -> Iterator[tuple[int, str]]:
    """Numbers of workers that each limit of this machine lets through, however little each of them does."""
    descriptors_limit = descriptors.most_workers()
    if descriptors_limit is not None:
        workers, most = descriptors_limit
        yield workers, f"the limit is {most} file descriptors for each process (ulimit -Hn)"
    for most, where in kernel.process_limits():
        yield most, f"the limit is {most} processes ({where})"
    _, total = kernel.memory()
    yield total // _LEAST_MEMORY, f"its memory is {total >> 20} MiB"
