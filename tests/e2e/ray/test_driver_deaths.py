"""The driver dies on Ray: its agents outlive it; the next one takes them over, or all of it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.driver import journal, records
from processes import LIMIT_S, alive, wait_for

from .cluster import RayCluster, everstep_actors, everstep_groups, notes_in

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import os, signal, sys
from pathlib import Path
from everstep import Deadlines, FailureConfig, RunConfig, ScalingConfig, Trainer
from e2e.training import BareTorch, torch_steps

HERE = Path(__file__).parent

if sys.argv[2] == "die after reserving":
    from everstep.engine.ray import reservations

    reservations.make_actor = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

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
    first.kill()
    first.communicate()
    assert everstep_actors()
    wait_for(lambda: not everstep_actors() and not everstep_groups(), "the sweeper")
    wait_for(lambda: not any(alive(note["pid"]) for note in seen), "the end of the workers")


def test_a_reservation_without_agents_that_nobody_takes_over_is_swept_too(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_slice("slice-0")
    first = start(cluster, tmp_path, orphan_s=3.0, how="die after reserving")
    first.communicate(timeout=LIMIT_S)
    assert everstep_groups()
    wait_for(lambda: not everstep_actors() and not everstep_groups(), "the sweeper")
