"""The driver dies on Ray: its agents outlive it; the next one takes them over, or all of it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from everstep.engine.ray import cluster as known
from everstep.engine.ray.endings import end_all, end_slice
from everstep.journal import journal, records
from everstep.process import kernel
from processes import LIMIT_S, alive, wait_for

from .cluster import RayCluster, everstep_actors, everstep_groups, notes_in

SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path
from everstep import Deadlines, FailureConfig, RunConfig, ScalingConfig, Trainer
from e2e.training import BareTorch, torch_steps

HERE = Path(__file__).parent

if sys.argv[2] == "die after reserving":
    from everstep.engine.ray import reservations

    reservations.make_actor = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "without storage at times":
    from everstep.storage.asynchronous import ThreadedStore

    answer = ThreadedStore.call

    async def call(*args, **options):
        while (HERE / "away").exists():
            await asyncio.sleep(0.05)
        return await answer(*args, **options)

    ThreadedStore.call = call

trainer = Trainer(
    torch_steps,
    backend_config=BareTorch(),
    train_loop_config={"notes": str(HERE / "notes"), "until": str(HERE / "until"), "save_every": 3},
    scaling_config=ScalingConfig(
        num_workers=2, use_tpu=True, topology="2x4", accelerator_type="TPU-V6E",
        resources_per_worker={"TPU": 4},
    ),
    run_config=RunConfig(
        name="run",
        storage_path=str(HERE / "runs"),
        lease_ttl_s=3.0,
        failure_config=FailureConfig(max_failures=1),
        deadlines=Deadlines(orphan_s=float(sys.argv[1])),
    ),
    engine="ray",
)
print("returned", trainer.fit().return_value)
"""


def start(
    cluster: RayCluster, folder: Path, orphan_s: float = 300.0, how: str = "plainly"
) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    (folder / "notes").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(script), str(orphan_s), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )


def until_step(process: subprocess.Popen[str], folder: Path, step: int) -> list[dict[str, Any]]:
    def reached() -> bool:
        assert process.returncode is not None or process.poll() is None, process.communicate()[0]
        return max((n["step"] for n in notes_in(folder)), default=0) >= step

    wait_for(reached, f"step {step}")
    return notes_in(folder)


def actor_ids() -> dict[str, str]:
    from ray._private.state import state

    table = state.actor_table(None).values()
    return {
        a["Name"]: a["ActorID"] for a in table if a["State"] == "ALIVE" and a["ActorClassName"] == "HostActor"
    }


def test_a_killed_driver_is_replaced_and_nothing_restarts(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path)
    seen = until_step(first, tmp_path, 5)
    pids = {note["rank"]: note["pid"] for note in seen}
    agents = actor_ids()
    assert len(agents) == 2
    first.kill()
    first.communicate()
    at = max(note["step"] for note in notes_in(tmp_path))
    until_step(first, tmp_path, at + 20)  # nobody drives, and they train on
    second = start(cluster, tmp_path)
    run = tmp_path / "runs" / "run"
    wait_for(lambda: any(isinstance(r, records.TakenOver) for r in journal.read(run)), "the take-over")
    assert actor_ids() == agents
    at = max(note["step"] for note in notes_in(tmp_path))
    until_step(second, tmp_path, at + 5)
    (tmp_path / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    last = int(output.split("returned")[1])
    for rank, pid in pids.items():
        mine = [note for note in notes_in(tmp_path) if note["rank"] == rank]
        assert {note["pid"] for note in mine} == {pid}
        assert [note["step"] for note in mine] == list(range(last + 1)), "no gap and no repeat"


def test_a_replaced_driver_that_is_stopped_leaves_the_workers_to_the_new_one(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path, how="without storage at times")
    pids = {note["rank"]: note["pid"] for note in until_step(first, tmp_path, 5)}
    there = everstep_actors(), everstep_groups()
    (tmp_path / "away").touch()
    first.send_signal(signal.SIGSTOP)
    second = start(cluster, tmp_path)
    run = tmp_path / "runs" / "run"
    wait_for(lambda: any(isinstance(r, records.TakenOver) for r in journal.read(run)), "the take-over")
    # What it would do if it ended before any agent could tell it.
    [group] = everstep_groups()
    tag = group[: len(known.tag_of("run"))]
    end_all(tag, known.lease_of(tag, group), LIMIT_S)
    end_slice(tag, known.lease_of(tag, group), group)
    assert (everstep_actors(), everstep_groups()) == there
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGCONT)
    output, _ = first.communicate(timeout=LIMIT_S)
    assert first.returncode != 0, output
    assert (everstep_actors(), everstep_groups()) == there
    until_step(second, tmp_path, max(note["step"] for note in notes_in(tmp_path)) + 20)
    (tmp_path / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    assert {(note["rank"], note["pid"]) for note in notes_in(tmp_path)} == {*pids.items()}, "nobody restarted"


def agent_processes(actor: str) -> list[int]:
    """The actor of a node, and its agent with all that it has started."""
    pid, _, _ = ray.get(ray.get_actor(actor, namespace=known.NAMESPACE).hello.remote())
    return [pid, *kernel.descendants(pid)]


def freeze(pids: list[int]) -> None:
    for pid in pids:
        kernel.send_signal(pid, signal.SIGSTOP)


def thaw(pids: list[int]) -> None:
    for pid in pids:
        kernel.send_signal(pid, signal.SIGCONT)


def test_a_replaced_driver_does_not_end_agents_that_can_not_say_whose_they_are(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_HEARTBEAT_TIMEOUT_S", str(LIMIT_S))  # hosts are frozen for a while
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path, how="without storage at times")
    pids = {note["rank"]: note["pid"] for note in until_step(first, tmp_path, 5)}
    there = everstep_actors(), everstep_groups()
    (tmp_path / "away").touch()
    first.send_signal(signal.SIGSTOP)
    second = start(cluster, tmp_path)
    run = tmp_path / "runs" / "run"
    wait_for(lambda: any(isinstance(r, records.TakenOver) for r in journal.read(run)), "the take-over")
    [group] = everstep_groups()
    tag = group[: len(known.tag_of("run"))]
    frozen = [pid for actor in actor_ids() for pid in agent_processes(actor)]
    freeze(frozen)
    try:
        end_slice(tag, known.lease_of(tag, group), group)
        end_all(tag, known.lease_of(tag, group), 3.0)
        assert (everstep_actors(), everstep_groups()) == there
        first.send_signal(signal.SIGTERM)
        first.send_signal(signal.SIGCONT)
        output, _ = first.communicate(timeout=LIMIT_S)
        assert first.returncode != 0, output
        assert (everstep_actors(), everstep_groups()) == there
    finally:
        thaw(frozen)
    until_step(second, tmp_path, max(note["step"] for note in notes_in(tmp_path)) + 20)
    (tmp_path / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    assert {(note["rank"], note["pid"]) for note in notes_in(tmp_path)} == {*pids.items()}, "nobody restarted"


def test_a_driver_that_was_not_replaced_ends_agents_that_do_not_answer(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path)
    seen = until_step(first, tmp_path, 3)
    frozen = agent_processes(min(actor_ids()))
    freeze(frozen)
    try:
        first.send_signal(signal.SIGTERM)
        output, _ = first.communicate(timeout=LIMIT_S)
        assert first.returncode == 143, output
        wait_for(lambda: not everstep_groups(), "the reservation's end")  # long before the sweeper's time
    finally:
        thaw(frozen)  # what was frozen sees now that its actor is gone
    wait_for(lambda: not any(alive(note["pid"]) for note in seen), "the end of the workers")


def test_the_next_driver_ends_agents_that_do_not_answer_and_starts_others(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path)
    pids = {note["pid"] for note in until_step(first, tmp_path, 3)}
    first.kill()
    first.communicate()
    frozen = agent_processes(min(actor_ids()))
    agents = actor_ids()
    freeze(frozen)
    try:
        second = start(cluster, tmp_path)
        wait_for(lambda: not agents.items() & actor_ids().items(), "the end of those that don't answer")
    finally:
        thaw(frozen)
    wait_for(lambda: {note["pid"] for note in notes_in(tmp_path)} - pids, "other workers")
    (tmp_path / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output


def test_a_driver_that_dies_between_a_reservation_and_its_agents_leaves_nothing_in_the_way(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path, how="die after reserving")
    output, _ = first.communicate(timeout=LIMIT_S)
    assert first.returncode == -signal.SIGKILL, output
    assert everstep_groups(), "it died holding a reservation"
    second = start(cluster, tmp_path)
    until_step(second, tmp_path, 3)
    assert len(everstep_groups()) == 1
    (tmp_path / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output


def test_what_nobody_takes_over_is_gone_after_the_orphan_time_out(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path, orphan_s=4.0)
    seen = until_step(first, tmp_path, 3)
    assert everstep_actors()
    first.kill()
    first.communicate()
    wait_for(lambda: not everstep_actors() and not everstep_groups(), "the sweeper")
    wait_for(lambda: not any(alive(note["pid"]) for note in seen), "the end of the workers")


def test_a_reservation_without_agents_that_nobody_takes_over_is_swept_too(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path, orphan_s=3.0, how="die after reserving")
    output, _ = first.communicate(timeout=LIMIT_S)
    assert first.returncode == -signal.SIGKILL, output
    wait_for(lambda: not everstep_actors() and not everstep_groups(), "the sweeper")
