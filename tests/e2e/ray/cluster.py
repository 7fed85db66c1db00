"""A real Ray cluster on this machine: a head without CPUs, and nodes that are hosts of slices."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep import Deadlines, FailureConfig, Result, RunConfig, ScalingConfig, Trainer
from everstep.journal import journal, records
from everstep.journal.lease import stop_request
from processes import LIMIT_S, wait_for

_STORE = 80 << 20

IN_ANOTHER_TIME = ("unshare", "--user", "--map-root-user", "--time")
"""A command run so has a monotonic clock of its own, where the kernel lets users have one."""


class RayCluster:
    def __init__(self) -> None:
        # A place of its own, with a short name: Ray's sockets lie deep in it.
        self.folder = tempfile.mkdtemp(prefix="er")
        self._environment = pytest.MonkeyPatch()
        self._environment.setenv("RAY_TMPDIR", self.folder)
        # Several nodes share two cores here, and Ray takes over a second for an answer at times.
        self._environment.setenv("EVERSTEP_HEARTBEAT_TIMEOUT_S", "10")
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": _STORE,
                "include_dashboard": False,
                "include_log_monitor": False,  # nobody reads what it would read from every file, all the time
                "node_ip_address": "127.0.0.1",
            },
        )
        self.nodes: dict[str, Any] = {}
        self._started: list[subprocess.Popen[str]] = []
        self._connected = False

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def connect(self) -> None:
        self._connected = True
        self._ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")

    def add_host(self, slice_name: str, index: int, cpus: int = 2, chips: int = 4, **options: Any) -> str:
        """A host with four of a v6e 2x4's eight chips. Its node id."""
        return self.add_node(self._labels(slice_name, index), {"TPU": chips}, cpus, **options)

    def _labels(self, slice_name: str, index: int) -> dict[str, str]:
        return {
            "ray.io/tpu-slice-name": slice_name,
            "ray.io/tpu-worker-id": str(index),
            "ray.io/tpu-topology": "2x4",
            "ray.io/accelerator-type": "TPU-V6E",
        }

    def add_lone_host(self, slice_name: str, **options: Any) -> str:
        """A host with all eight chips of a v6e 2x4."""
        return self.add_host(slice_name, 0, chips=8, **options)

    def add_lone_host_with_folder(self, slice_name: str) -> str:
        """The same, with a folder of its own for all that Ray keeps there, as another machine has. That
        folder.
        """
        folder = tempfile.mkdtemp(dir=self.folder)
        self.add_lone_host(slice_name, temp_dir=folder)
        return folder

    def add_node(
        self, labels: dict[str, str], resources: dict[str, float], cpus: int = 2, **options: Any
    ) -> str:
        node = self.cluster.add_node(
            num_cpus=cpus,
            resources=resources,
            labels=labels,
            object_store_memory=_STORE,
            node_ip_address="127.0.0.1",
            **options,
        )
        self.nodes[node.node_id] = node
        return str(node.node_id)

    def add_lone_host_at(self, slice_name: str, ahead_s: float) -> str:
        """The same, in a time namespace: a machine that was booted this much earlier than ours."""
        asked = {
            "gcs_address": self.address,
            "node_ip_address": "127.0.0.1",
            "labels": self._labels(slice_name, 0),
            "resources": {"TPU": 8},
            "num_cpus": 2,
            "object_store_memory": _STORE,
        }
        offset = str(round(ahead_s))
        started = subprocess.Popen(
            [
                *IN_ANOTHER_TIME, "--monotonic", offset, "--boottime", offset,
                sys.executable, "-m", "e2e.ray.node", json.dumps(asked),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._started.append(started)
        assert started.stdout is not None
        said = next((line for line in started.stdout if line.startswith("node ")), "")
        assert said, f"the node's process ended with {started.wait()}"
        node_id = said.split()[1]
        wait_for(lambda: node_id in [n["NodeID"] for n in self._ray.nodes() if n["Alive"]], "it")
        return node_id

    def add_slice(self, name: str, hosts: int = 2) -> list[str]:
        return [self.add_host(name, index) for index in range(hosts)]

    def raylet_pid(self, node_id: str) -> int:
        return int(self.nodes[node_id].all_processes["raylet"][0].process.pid)

    def kill_raylet(self, node_id: str) -> None:
        """The machine is gone, as far as Ray can tell: SIGKILL."""
        os.kill(self.raylet_pid(node_id), signal.SIGKILL)

    def drain(self, node_id: str, seconds: float) -> None:
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int((time.time() + seconds) * 1000)
        gcs = self._ray._private.worker.global_worker.gcs_client
        accepted, why = gcs.drain_node(node_id, reason, "preempted by a test", deadline)
        assert accepted, why

    def remove(self, node_id: str) -> None:
        """The node says goodbye, if its raylet still lives."""
        self.cluster.remove_node(self.nodes.pop(node_id), allow_graceful=True)

    def clear(self) -> None:
        """Remove every node but the head, and wait until Ray knows: a killed one takes it 15 s."""
        for node_id in list(self.nodes):
            self.remove(node_id)
        while self._started:
            self._started.pop().communicate()  # the end of its input is the end of it
        if self._connected:
            self.until_alive(0)

    def until_alive(self, hosts: int) -> None:
        """Wait until Ray knows that there are so many besides the head."""
        wait_for(lambda: sum(n["Alive"] for n in self._ray.nodes()) == 1 + hosts, f"{hosts} living hosts")

    def close(self) -> None:
        self.clear()
        if self._connected:
            self._ray.shutdown()
        self.cluster.shutdown()
        self._environment.undo()
        shutil.rmtree(self.folder, ignore_errors=True)


def everstep_actors() -> list[str]:
    import ray

    return [
        a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "everstep"
    ]


def everstep_groups() -> dict[str, str]:
    """Names and states of what is reserved or asked for."""
    import ray

    table = ray.util.placement_group_table().values()
    return {
        g["name"]: g["state"] for g in table if g["name"].startswith("everstep/") and g["state"] != "REMOVED"
    }


class NotesFile:
    """What one rank notes, each line read once: a test looks many times at what only grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rank = int(path.stem.split("-")[1])
        self._read = 0
        self._notes: list[dict[str, Any]] = []

    def notes(self) -> list[dict[str, Any]]:
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._read += len(whole) + 1
            self._notes += [{"rank": self._rank, **json.loads(line)} for line in whole.splitlines()]
        return self._notes


@functools.cache
def _notes_file(path: Path) -> NotesFile:
    return NotesFile(path)


def notes_in(folder: Path) -> list[dict[str, Any]]:
    """What the workers of a run noted, with their ranks."""
    paths = sorted((folder / "notes").glob("rank-*.jsonl"))
    return [note for path in paths for note in _notes_file(path).notes()]


SCALING = {
    "use_tpu": True,
    "topology": "2x4",
    "accelerator_type": "TPU-V6E",
    "resources_per_worker": {"TPU": 4},
}
LONE = {**SCALING, "resources_per_worker": {"TPU": 8}}
"""One worker for each slice, which is one host."""


RUNNING: list[Running] = []


class Running:
    """A run in a thread of this process, looked at from outside."""

    def __init__(
        self,
        folder: Path,
        function: Callable[..., Any],
        num_workers: Any = 2,
        *,
        trainer: Callable[..., Trainer] = Trainer,
        engine: object = "ray",
        config: dict[str, Any] | None = None,
        scaling: dict[str, Any] | None = None,
        name: str = "run",
        max_failures: int = 0,
        deadlines: Deadlines | None = None,
        **run: Any,
    ) -> None:
        self.folder = folder
        (folder / "notes").mkdir(exist_ok=True)
        self.path = folder / "runs" / name
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._trainer = trainer(
            function,
            train_loop_config={
                "notes": str(folder / "notes"),
                "until": str(folder / "until"),
                **(config or {}),
            },
            scaling_config=ScalingConfig(
                num_workers=num_workers,
                elastic_resize_monitor_interval_s=0.5,
                **(SCALING if scaling is None else scaling),
            ),
            run_config=RunConfig(
                name=name,
                storage_path=str(folder / "runs"),
                failure_config=FailureConfig(max_failures=max_failures),
                deadlines=deadlines or Deadlines(),
                **run,
            ),
            engine=engine,
        )
        self.thread = threading.Thread(target=self._fit, daemon=True)
        self.thread.start()
        RUNNING.append(self)

    def _fit(self) -> None:
        try:
            self.result = self._trainer.fit()
        except BaseException as error:
            self.error = error

    def finish(self) -> Result:
        (self.folder / "until").touch()
        return self.wait()

    def wait(self) -> Result:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "fit() has not returned"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def abandon(self) -> None:
        """After a test that failed: as ``everstep stop`` does it."""
        if self.thread.is_alive():
            lease = max(r.lease for r in self.records(records.Opened))
            request = self.path / stop_request(lease)
            request.parent.mkdir(exist_ok=True)
            request.touch()
            self.thread.join(LIMIT_S)

    # ------------------------------------------------------------------ what can be seen

    def notes(self) -> list[dict[str, Any]]:
        return notes_in(self.folder)

    def records(self, kind: type | None = None) -> list[Any]:
        found = list(journal.read(self.path)) if self.path.exists() else []
        return [r for r in found if kind is None or isinstance(r, kind)]

    def newest_epoch(self) -> int:
        return max((note["epoch"] for note in self.notes()), default=0)

    def step(self) -> int:
        return max((note["step"] for note in self.notes()), default=0)

    def pids(self) -> dict[int, int]:
        """Of the newest epoch, by rank."""
        newest = self.newest_epoch()
        return {note["rank"]: note["pid"] for note in self.notes() if note["epoch"] == newest}

    def until_training(self, world: int, after_epoch: int = 0) -> int:
        """Wait until every rank of a group of this size, in a later epoch, has made a step. The epoch."""

        def trains() -> bool:
            assert self.error is None, self.error
            notes = self.notes()
            newest = max((note["epoch"] for note in notes), default=0)
            stepped = {n["rank"] for n in notes if n["epoch"] == newest and not n.get("restored")}
            worlds = {n["world"] for n in notes if n["epoch"] == newest}
            return newest > after_epoch and worlds == {world} and stepped == set(range(world))

        wait_for(trains, f"{world} workers training, after epoch {after_epoch}")
        return self.newest_epoch()

    def until_steps(self, more: int = 3) -> None:
        at = self.step() + more
        wait_for(lambda: self.step() >= at, f"step {at}")
