"""What a training function finds on Ray: the right JAX environment, Ray itself, shared storage."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import everstep as train
from e2e.training import elastic_steps, note
from everstep import ConfigError
from everstep.control.commands import FailureSeen, GroupStarted, RecoveryDecided
from everstep.errors import StorageAccessError
from everstep.jax import JaxTrainer
from processes import LIMIT_S, alive, wait_for

from .cluster import LONE, RayCluster, Running, everstep_groups

POD = {
    "JAX_PLATFORMS": "cpu",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "7",
    "MEGASCALE_COORDINATOR_ADDRESS": "10.9.9.9:1",
    "MEGASCALE_PORT": "18081",
}


def see_environment(config: dict[str, Any]) -> None:
    import jax

    seen = {name: value for name, value in os.environ.items() if name.startswith("MEGASCALE_")}
    from jax._src import distributed

    note(
        config,
        step=1,
        seen=seen,
        processes=jax.process_count(),
        jax=distributed.global_state.coordinator_address,
    )
    train.report({"step": 1})


@pytest.mark.parametrize("slices", [1, 2])
def test_the_multi_slice_environment_is_the_live_groups(
    cluster: RayCluster, tmp_path: Path, slices: int
) -> None:
    for number in range(slices):
        cluster.add_lone_host(f"slice-{number}")
    run = Running(
        tmp_path,
        see_environment,
        slices,
        trainer=JaxTrainer,
        scaling=LONE,
        worker_runtime_env={"env_vars": POD},
    )
    run.wait()
    notes = {n["rank"]: n for n in run.notes()}
    assert len(notes) == slices
    for rank, seen in notes.items():
        assert seen["processes"] == slices
        if slices == 1:
            assert seen["seen"] == {}
            continue
        assert seen["seen"]["MEGASCALE_NUM_SLICES"] == "2"
        assert seen["seen"]["MEGASCALE_SLICE_ID"] == str(rank)
        address, _, port = seen["seen"]["MEGASCALE_COORDINATOR_ADDRESS"].rpartition(":")
        assert address == "127.0.0.1"
        assert port == seen["seen"]["MEGASCALE_PORT"] == POD["MEGASCALE_PORT"]
        assert port != seen["jax"].rpartition(":")[2]


def use_ray(config: dict[str, Any]) -> str:
    import ray

    ray.init(address="auto", namespace="test", log_to_driver=False, logging_level="ERROR")
    counter = ray.get_actor("counter")
    total = ray.get(counter.add.remote(2))
    kept = ray.get(ray.put({"total": total}))
    train.report({"step": 1, **kept})
    ray.shutdown()
    return "used"


def test_ray_works_inside_a_training_function(cluster: RayCluster, tmp_path: Path) -> None:
    import ray

    @ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})
    class Counter:
        def __init__(self) -> None:
            self.total = 40

        def add(self, n: int) -> int:
            self.total += n
            return self.total

    counter = Counter.options(name="counter", namespace="test").remote()  # type: ignore[attr-defined]
    cluster.add_lone_host("slice-0")
    result = Running(tmp_path, use_ray, 1, scaling=LONE).wait()
    ray.kill(counter)
    assert result.return_value == "used"
    assert result.metrics == {"step": 1, "total": 42}


def agents() -> dict[str, int]:
    """Pids of the actors that hold them, by node."""
    from ray._private.state import state

    return {
        actor["Address"]["NodeID"]: actor["Pid"]
        for actor in state.actor_table(None).values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == "HostActor"
    }


def test_an_agent_that_the_memory_monitor_ends_is_the_loss_of_its_workers_and_no_more(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_lone_host("slice-0")
    cluster.add_lone_host("slice-1")
    run = Running(tmp_path, elastic_steps, 2, scaling=LONE, max_failures=1)
    epoch = run.until_training(2)
    # Ray's monitor sends SIGKILL to the process that it chooses: an actor of ours.
    pids = list(agents().values())
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    run.until_training(2, epoch)
    run.finish()
    assert len(run.records(RecoveryDecided)) == 1
    assert len(run.records(GroupStarted)) == 2


@pytest.mark.soak  # it takes up to a third of the free memory, and nobody else may take much meanwhile
def test_the_memory_monitor_itself_ends_the_workers_of_one_host_and_no_more(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = psutil.virtual_memory()
    threshold = 1 - memory.available * 7 / 8 / memory.total
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{threshold:.4f}")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "1000")
    watched = cluster.add_lone_host("slice-0")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    cluster.add_lone_host("slice-1")
    run = Running(tmp_path, elastic_steps, 2, scaling=LONE, max_failures=1)
    epoch = run.until_training(2)
    chosen = agents()[watched]
    with mmap.mmap(-1, memory.available // 3) as taken:
        while alive(chosen) and taken.tell() < len(taken) - (1 << 20):
            taken.write(bytes(1 << 20))
        wait_for(lambda: not alive(chosen), "the monitor")
    run.until_training(2, epoch)
    run.finish()
    [seen] = run.records(FailureSeen)
    assert (seen.failure.host, seen.failure.message) == (watched, "its agent died (OutOfMemoryError)")
    assert len(run.records(RecoveryDecided)) == 1
    assert len(run.records(GroupStarted)) == 2


def test_storage_that_the_hosts_do_not_share_is_refused(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One path, and a folder for each place that a process was started in: here the driver and one host, there
    # the other.
    nodes = {}
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        nodes[name] = cluster.add_lone_host(f"slice-{name}")
    run = Running(Path("/proc/self/cwd"), elastic_steps, 2, scaling=LONE)
    with pytest.raises(StorageAccessError) as refused:
        run.wait()
    assert "/proc/self/cwd/runs/run is not the same place here as it is for the driver" in str(refused.value)
    assert nodes["there"] in str(refused.value)
    assert nodes["here"] not in str(refused.value)
    assert list((tmp_path / "there").iterdir()) == []
    wait_for(lambda: not everstep_groups(), "that what was reserved is given back")


def test_what_lies_where_a_node_was_started_is_not_taken_for_pythons_own(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "types.py").write_text("raise ImportError('not the one that you look for')")
    with monkeypatch.context() as there:
        there.chdir(tmp_path)
        cluster.add_lone_host("slice-0")
    run = Running(tmp_path, elastic_steps, 1, scaling=LONE)
    run.until_training(1)
    run.finish()
    assert run.records(FailureSeen) == []


def test_a_ray_client_is_refused_with_the_reason(tmp_path: Path) -> None:
    script = (
        "import everstep\n"
        f"run = everstep.RunConfig(storage_path={str(tmp_path)!r}, name='x')\n"
        "try:\n"
        "    everstep.Trainer(lambda: None, run_config=run, engine='ray').fit()\n"
        "except everstep.errors.ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "RAY_ADDRESS": "ray://127.0.0.1:10001"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "ray:// address" in done.stdout, done.stderr
    assert "ray job submit" in done.stdout
    assert issubclass(ConfigError, ValueError)
