"""The driver dies without a word; its workers train on, and the same command takes them over."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everstep import Result
from everstep.control.commands import PreemptionSeen
from everstep.journal import journal
from everstep.journal.records import TakenOver
from everstep.observe.registry import live_runs
from everstep.testing import LocalCluster
from noted import notes
from processes import LIMIT_S, alive, ours, wait_for

from .training import stop_together

SCRIPT = """
import asyncio, sys, time
from pathlib import Path
import everstep as train
from everstep import RunConfig, ScalingConfig, FailureConfig, Deadlines, Trainer
from everstep.torch import TorchftConfig, TorchTrainer
from e2e import training

HERE = Path(__file__).parent

if sys.argv[5]:
    from everstep.storage.asynchronous import ThreadedStore

    answer = ThreadedStore.call

    async def call(*args, **options):
        while (HERE / sys.argv[5]).exists():
            await asyncio.sleep(0.05)
        return await answer(*args, **options)

    ThreadedStore.call = call

if "torchft" in sys.argv[4]:
    kind, backend = TorchTrainer, {"torch_config": TorchftConfig()}
elif sys.argv[4] == "list_checkpoints":
    kind, backend = Trainer, {}
else:
    kind, backend = Trainer, {"backend_config": training.BareTorch()}
trainer = kind(
    getattr(training, sys.argv[4]),
    **backend,
    train_loop_config={
        "notes": str(HERE / "notes"), "until": str(HERE / "until"), "save_every": int(sys.argv[3])
    },
    scaling_config=ScalingConfig(num_workers=4),
    run_config=RunConfig(
        name=sys.argv[1],
        storage_path=str(HERE / "runs"),
        failure_config=FailureConfig(max_failures=-1),
        lease_ttl_s=float(sys.argv[2]),
        deadlines=Deadlines(storage_s=15.0 if sys.argv[5] else 60.0),
    ),
)
result = trainer.fit()
print("returned", result.return_value)
"""


def start(
    folder: Path,
    name: str,
    lease_ttl_s: float = 15.0,
    save_every: int = 3,
    function: str = "torch_steps",
    no_storage_while: str = "",
) -> subprocess.Popen[str]:
    """``no_storage_while``: a file; while it is there, storage doesn't answer this driver."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    (folder / "notes").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(script), name, str(lease_ttl_s), str(save_every), function, no_storage_while],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rows(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return notes(folder / "notes")


def stepped(folder: Path, beyond: int) -> bool:
    seen = rows(folder)
    return len(seen) == 4 and all(r and r[-1]["step"] > beyond for r in seen.values())


def drives(name: str, pid: int) -> bool:
    live = live_runs().get(name)
    return live is not None and live.driver_pid == pid


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_a_killed_driver_costs_no_step_and_no_process(tmp_path: Path, times: int) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    process = start(tmp_path, name)
    wait_for(lambda: stepped(tmp_path, 5), "steps")
    pids = {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items()}
    for n in range(times):
        process.kill()
        output, _ = process.communicate()
        before = max(r[-1]["step"] for r in rows(tmp_path).values())
        # Nobody drives now, and they train on.
        wait_for(lambda before=before: stepped(tmp_path, before + 5), "steps without a driver")
        process = start(tmp_path, name)
        for _ in range(random.randrange(2)):  # twice in quick succession, now and then
            process.kill()
            process.communicate()
            process = start(tmp_path, name)
        wait_for(lambda pid=process.pid: drives(name, pid), f"take-over {n}")
        before = max(r[-1]["step"] for r in rows(tmp_path).values())
        wait_for(lambda before=before: stepped(tmp_path, before + 5), f"steps after take-over {n}")
        assert all(alive(pid) for pid in pids.values()), output
    (tmp_path / "until").touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "took over 4 workers" in output
    last = int(output.split("returned")[1])
    for rank, r in rows(tmp_path).items():
        assert {row["pid"] for row in r} == {pids[rank]}
        assert [row["step"] for row in r] == list(range(last + 1)), "no gap and no repeat"
    result = Result.from_path(str(tmp_path / "runs" / name))
    assert [row["step"] for row in result.metrics_history] == list(range(1, last + 1))
    committed = [metrics["step"] for _, metrics in result.best_checkpoints]
    assert committed == list(range(3, last + 1, 3)), "every checkpoint that was reported is there"


def test_a_driver_that_is_replaced_hears_of_it_although_it_has_no_storage(tmp_path: Path) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    first = start(tmp_path, name, lease_ttl_s=3.0, no_storage_while="away")
    wait_for(lambda: stepped(tmp_path, 5), "steps")
    pids = {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items()}
    (tmp_path / "away").touch()
    second = start(tmp_path, name, lease_ttl_s=3.0)
    output, _ = first.communicate(timeout=LIMIT_S)
    assert "the run was taken over by another driver" in output
    before = max(r[-1]["step"] for r in rows(tmp_path).values())
    wait_for(lambda: stepped(tmp_path, before + 20), "steps after the first has ended")
    (tmp_path / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    assert {rank: {row["pid"] for row in r} for rank, r in rows(tmp_path).items()} == {
        rank: {pid} for rank, pid in pids.items()
    }


def test_a_worker_that_died_while_nobody_drove_is_recovered_by_the_next_driver(tmp_path: Path) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    process = start(tmp_path, name)
    wait_for(lambda: stepped(tmp_path, 5), "steps")
    pids = {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items()}
    process.kill()
    process.communicate()
    os.kill(pids[2], signal.SIGKILL)
    wait_for(lambda: not alive(pids[2]), "its death")
    process = start(tmp_path, name)
    wait_for(lambda: any(row["epoch"] == 2 for r in rows(tmp_path).values() for row in r), "the recovery")
    (tmp_path / "until").touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "rank 2" in output


def half_saved(run: Path) -> bool:
    """Some rank has brought something, and the checkpoint isn't committed."""
    folders = [folder for folder in run.glob("checkpoint_*") if not (folder / ".manifest.json").exists()]
    return any(list(folder.glob("shard-*")) for folder in folders)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [2, pytest.param(15, marks=pytest.mark.soak)])
def test_a_driver_killed_while_a_checkpoint_is_uploaded_loses_none(tmp_path: Path, times: int) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    run = tmp_path / "runs" / name
    process = start(tmp_path, name, save_every=5, function="torch_shards")
    wait_for(lambda: stepped(tmp_path, 5), "steps")
    pids = {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items()}
    for n in range(times):
        wait_for(lambda: half_saved(run), "an upload")
        process.kill()
        process.communicate()
        process = start(tmp_path, name, save_every=5, function="torch_shards")
        wait_for(lambda pid=process.pid: drives(name, pid), f"take-over {n}")
        before = max(r[-1]["step"] for r in rows(tmp_path).values())
        wait_for(lambda before=before: stepped(tmp_path, before + 5), f"steps after take-over {n}")
    (tmp_path / "until").touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    last = int(output.split("returned")[1])
    for rank, r in rows(tmp_path).items():
        assert {row["pid"] for row in r} == {pids[rank]}
        assert [row["step"] for row in r] == list(range(last + 1)), "no gap and no repeat"
    committed = Result.from_path(str(run)).best_checkpoints
    assert [metrics["step"] for _, metrics in committed] == list(range(5, last + 1, 5))
    for checkpoint, _ in committed:
        assert len(list(Path(checkpoint.path).glob("shard-*"))) == 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_a_driver_killed_in_the_middle_of_a_recovery_loses_no_checkpoint(tmp_path: Path, times: int) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    process = start(tmp_path, name)
    kept: set[str] = set()
    for n in range(times):
        before = max((r[-1]["step"] for r in rows(tmp_path).values() if r), default=0)
        wait_for(lambda pid=process.pid: drives(name, pid), f"driver {n}")
        wait_for(lambda before=before: stepped(tmp_path, before + 5), f"steps {n}")
        os.kill(rows(tmp_path)[n % 4][-1]["pid"], signal.SIGKILL)
        time.sleep(random.random() * 0.15)  # anywhere in the recovery
        process.kill()
        process.communicate()
        found = {
            checkpoint.path
            for checkpoint, _ in Result.from_path(str(tmp_path / "runs" / name)).best_checkpoints
        }
        assert kept <= found
        kept = found
        process = start(tmp_path, name)
    before = max(r[-1]["step"] for r in rows(tmp_path).values())
    wait_for(lambda: stepped(tmp_path, before + 5), "steps at the end")
    (tmp_path / "until").touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    saved = {
        metrics["step"] for _, metrics in Result.from_path(str(tmp_path / "runs" / name)).best_checkpoints
    }
    for r in rows(tmp_path).values():
        begun = [row["step"] for row in r if row.get("restored")]
        assert set(begun) <= {0, *saved}, "each epoch began with a committed checkpoint"
        assert begun == sorted(begun), "and never with an older one than before"


def test_a_driver_that_waits_for_an_answer_of_an_agent_can_be_stopped(tmp_path: Path) -> None:
    from .scripts import start as start_script

    first = start_script(tmp_path, "trainer().fit()")
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)), "workers")
    first.kill()
    first.communicate()
    (agent,) = [pid for pid, command in ours().items() if "-m everstep.agent " in command]
    os.kill(agent, signal.SIGSTOP)
    second = start_script(tmp_path, "trainer().fit()", {"EVERSTEP_TAKE_OVER_S": str(2 * LIMIT_S)})
    assert second.stderr is not None
    assert any("waiting for an answer from" in line for line in second.stderr)
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=LIMIT_S)
    assert second.returncode == -signal.SIGINT
    assert not alive(agent)


def test_agents_that_nobody_claims_leave_with_their_workers(tmp_path: Path) -> None:
    from .scripts import start as start_script

    process = start_script(tmp_path, "trainer(orphan_s=0.5).fit()")
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)), "workers")
    process.kill()
    process.communicate()
    # The fixture that looks for what is left over does the rest.


def test_agents_whose_sockets_were_removed_leave_once_their_driver_is_gone(tmp_path: Path) -> None:
    from everstep.engine.local.cluster import runtime_folder

    from .scripts import start as start_script

    process = start_script(tmp_path, "trainer().fit()")
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)), "workers")
    sockets = list(runtime_folder().glob("r*/*/agent.sock"))
    assert sockets
    for path in sockets:
        path.unlink()
    process.kill()
    process.communicate()
    # The fixture that looks for what is left over does the rest: nobody waits for orphan_s.


def test_replica_groups_outlive_their_driver_and_then_their_lighthouse(tmp_path: Path) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    process = start(tmp_path, name, function="torchft_steps")
    wait_for(lambda: stepped(tmp_path, 5), "steps")
    pids = {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items()}
    process.kill()
    process.communicate()
    (lighthouse,) = [pid for pid, command in ours().items() if "everstep.torchft.server" in command]
    os.kill(lighthouse, signal.SIGKILL)
    before = max(r[-1]["step"] for r in rows(tmp_path).values())
    wait_for(lambda: stepped(tmp_path, before + 10), "steps with a new lighthouse, and without a driver")
    process = start(tmp_path, name, function="torchft_steps")
    wait_for(lambda: drives(name, process.pid), "the take-over")
    os.kill(pids[2], signal.SIGKILL)
    wait_for(lambda: rows(tmp_path)[2][-1]["pid"] != pids[2], "the group's replacement by the new driver")
    last = max(r[-1]["step"] for r in rows(tmp_path).values())
    wait_for(lambda: stepped(tmp_path, last + 5), "steps of all groups")
    stop_together(tmp_path / "until", groups=4)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "took over 4 workers" in output
    assert {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items() if rank != 2} == {
        rank: pid for rank, pid in pids.items() if rank != 2
    }


ON_SLICES = """
import sys, time
from pathlib import Path
from everstep import Deadlines, FailureConfig, RunConfig, ScalingConfig, Trainer
from everstep.testing import LocalCluster
from e2e.training import independent_steps

HERE = Path(__file__).parent

if len(sys.argv) > 3:  # the clock was set while nobody drove
    right, ahead = time.time, float(sys.argv[3])
    time.time = lambda: right() + ahead

trainer = Trainer(
    independent_steps,
    train_loop_config={"notes": str(HERE / "notes"), "until": str(HERE / "until"), "save_every": 3},
    scaling_config=ScalingConfig(num_workers=(1, 3), replica_group_size=1),
    run_config=RunConfig(
        name=sys.argv[1], storage_path=str(HERE / "runs"), failure_config=FailureConfig(max_failures=-1)
    ),
    engine=LocalCluster(slices=0, folder=Path(sys.argv[2])),
)
print("returned", trainer.fit().return_value)
"""


def test_groups_that_stay_are_taken_over_and_the_missing_one_is_started(tmp_path: Path) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    script = tmp_path / "script.py"
    script.write_text(ON_SLICES)
    (tmp_path / "notes").mkdir()
    with LocalCluster(slices=3) as cluster:
        command = [sys.executable, str(script), name, str(cluster.folder)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

        def steps(ranks: Iterable[int], beyond: int) -> bool:
            seen = rows(tmp_path)
            return all(rank in seen and seen[rank] and seen[rank][-1]["step"] > beyond for rank in ranks)

        first = subprocess.Popen(command, **pipes)
        wait_for(lambda: steps(range(3), 5), "steps")
        pids = {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items()}
        places = {worker.rank: worker.host for worker in live_runs()[name].workers}
        first.kill()
        first.communicate()
        cluster.kill_host(places[1])
        wait_for(lambda: not alive(pids[1]), "its death")
        second = subprocess.Popen(command, **pipes)
        wait_for(lambda: drives(name, second.pid), "the take-over")
        before = max(r[-1]["step"] for r in rows(tmp_path).values())
        wait_for(lambda: steps((0, 2), before + 5), "steps of those that stayed")
        assert alive(pids[0])
        assert alive(pids[2])
        cluster.add_slice()
        wait_for(lambda: rows(tmp_path)[1][-1]["pid"] != pids[1], "the missing group")
        (tmp_path / "until").touch()
        output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    assert "took over 2 workers" in output
    assert all({row["pid"] for row in rows(tmp_path)[rank]} == {pids[rank]} for rank in (0, 2))


@contextmanager
def noticed_while_driven(folder: Path) -> Iterator[tuple[LocalCluster, list[str], PreemptionSeen]]:
    """A run on two slices, one of which has a notice of an hour. Its driver has heard of it, and was
    killed.
    """
    name = f"takeover-{random.getrandbits(32):08x}"
    script = folder / "script.py"
    script.write_text(ON_SLICES)
    (folder / "notes").mkdir()
    with LocalCluster(slices=2) as cluster:
        command = [sys.executable, str(script), name, str(cluster.folder)]
        first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        wait_for(lambda: len(rows(folder)) == 2 and all(rows(folder).values()), "steps")
        cluster.preempt_slice("slice-1", grace_s=3600.0)
        wait_for(lambda: notices(folder / "runs" / name), "the notice")
        first.kill()
        first.communicate()
        (heard,) = notices(folder / "runs" / name)
        yield cluster, command, heard


def notices(run: Path) -> list[PreemptionSeen]:
    return [record for record in journal.read(run) if isinstance(record, PreemptionSeen)]


def take_over(folder: Path, command: list[str]) -> list[PreemptionSeen]:
    """What the next driver writes of notices, until it has ended."""
    run = folder / "runs" / command[2]
    second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: any(isinstance(record, TakenOver) for record in journal.read(run)), "the take-over")
    before = max(r[-1]["step"] for r in rows(folder).values())
    wait_for(lambda: all(r[-1]["step"] > before + 5 for r in rows(folder).values()), "steps")
    (folder / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    return notices(run)[1:]


@pytest.mark.parametrize("ahead", [-86_400.0, 1800.0, 86_400.0])
def test_a_clock_that_is_set_while_nobody_drives_does_not_move_a_notice(tmp_path: Path, ahead: float) -> None:
    with noticed_while_driven(tmp_path) as (_, command, heard):
        told = take_over(tmp_path, [*command, str(ahead)])
    assert heard.deadline is not None
    # By the clock of one machine; the host has told it again, rounded by the time that its message took.
    assert [round((seen.deadline or 0) - heard.deadline, -3) for seen in told] == [0.0]


def test_a_notice_that_is_taken_back_while_nobody_drives_is_over_for_the_next_driver(tmp_path: Path) -> None:
    with noticed_while_driven(tmp_path) as (cluster, command, _):
        cluster.cancel_preemption("slice-1")
        told = take_over(tmp_path, command)
    assert [seen.deadline for seen in told][-1:] == [None]


WAITS_AT_FIRST = """
import os, sys, threading
from pathlib import Path
from everstep import Deadlines, RunConfig, Trainer
from everstep.testing import LocalCluster
from processes import alive

first = Path(__file__).with_name("first")

def train():
    if not first.exists():
        first.with_suffix(".draft").write_text(str(os.getpid()))
        first.with_suffix(".draft").rename(first)
        threading.Event().wait()
    return alive(int(first.read_text()))

trainer = Trainer(
    train,
    run_config=RunConfig(
        name=sys.argv[1],
        storage_path=str(first.with_name("runs")),
        deadlines=Deadlines(take_over_s=2),
    ),
    engine=LocalCluster(slices=0, folder=Path(sys.argv[2])),
)
print("the first one trains beside it:", trainer.fit().return_value)
"""


def test_workers_of_a_host_that_thaws_after_a_take_over_are_ended_before_it_is_used(tmp_path: Path) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    script = tmp_path / "script.py"
    script.write_text(WAITS_AT_FIRST)
    with LocalCluster() as cluster:
        command = [sys.executable, str(script), name, str(cluster.folder)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        first = subprocess.Popen(command, **pipes)
        wait_for(lambda: (tmp_path / "first").exists(), "a worker")
        (host,) = cluster.hosts
        cluster.freeze_host(host)
        first.kill()
        first.communicate()
        second = subprocess.Popen(command, **pipes)
        assert second.stdout is not None
        assert any("waiting: " in line for line in second.stdout)
        cluster.thaw_host(host)
        output, _ = second.communicate(timeout=LIMIT_S)
    assert "the first one trains beside it: False" in output


def test_a_question_about_checkpoints_outlives_the_driver_that_was_asked(tmp_path: Path) -> None:
    name = f"takeover-{random.getrandbits(32):08x}"
    first = start(tmp_path, name, function="list_checkpoints")
    try:
        wait_for(lambda: rows(tmp_path).get(0), "rank 0's report")
        objects = tmp_path / "runs" / name / "journal"
        so_far = len(list(objects.iterdir()))
        # What has been dealt with is acknowledged after a write to the journal.
        wait_for(lambda: len(list(objects.iterdir())) > so_far, "the next write to the journal")
    finally:
        first.kill()
        first.wait()
    second = start(tmp_path, name, function="list_checkpoints")
    try:
        wait_for(lambda: drives(name, second.pid), "the take-over")
        (tmp_path / "until").touch()
        output, _ = second.communicate(timeout=LIMIT_S)
    finally:
        second.kill()
    assert "returned 1" in output
