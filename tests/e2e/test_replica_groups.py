"""Replica groups over torchft: what fails is replaced, and the others never stop."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everstep import FailureConfig, Result, RunConfig, ScalingConfig, Trainer, UserCallback
from everstep.control.commands import GroupStarted, RecoveryDecided, Rung
from everstep.journal import journal
from everstep.observe.registry import live_runs
from everstep.process import kernel
from everstep.testing import LocalCluster
from everstep.torch import TorchftConfig, TorchTrainer
from noted import notes
from processes import alive, wait_for

from .test_worker_deaths import Fit, config, folder
from .training import independent_steps, stop_together, torchft_steps


class Heard(UserCallback):
    """Every report that reaches the driver, as (pid, step)."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.reports += [(row["pid"], row["step"]) for row in metrics]


class Groups:
    """A run in replica groups, seen from its notes."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        workers: int | tuple[int, int] = 4,
        size: int = 1,
        engine: object = "local",
        save_every: int = 0,
        max_failures: int = -1,
        trainer: Callable[..., Trainer] | None = None,
        sharded: bool = False,
        **more: Any,
    ) -> None:
        self.tmp_path = tmp_path
        self.where = tmp_path / "notes"
        self.size = size
        self.world = workers if isinstance(workers, int) else workers[1]
        self.heard = Heard()
        self.fit = Fit(
            lambda: (trainer or with_torchft)(
                ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=0.1),
                size,
                train_loop_config={**config(tmp_path, save_every), "sharded": sharded},
                torch_config=TorchftConfig({"min_replicas": 1}, replica_group_size=size, **more),
                run_config=RunConfig(
                    name="groups",
                    storage_path=folder(tmp_path, "runs"),
                    failure_config=FailureConfig(max_failures=max_failures),
                    log_ranks=(),
                    callbacks=[self.heard],
                ),
                engine=engine,
            )
        )

    def rows(self) -> dict[int, list[dict[str, Any]]]:
        assert self.fit.error is None, self.fit.error
        return notes(self.where)

    def latest(self, rank: int) -> dict[str, Any]:
        rows = self.rows().get(rank)
        return rows[-1] if rows else {"step": -1, "pid": 0}

    def pids(self, ranks: Iterable[int] | None = None) -> dict[int, int]:
        return {rank: self.latest(rank)["pid"] for rank in (range(self.world) if ranks is None else ranks)}

    def wait_together(self, groups: int, ranks: Iterable[int] | None = None, but: Iterable[int] = ()) -> None:
        """Until each of these ranks, in none of the processes ``but``, has stepped with so many groups."""
        ranks, but = list(range(self.world) if ranks is None else ranks), set(but)

        def together() -> bool:
            rows = [self.latest(rank) for rank in ranks]
            return all(row.get("together") == groups and row["pid"] not in but for row in rows)

        wait_for(together, f"{groups} groups that step together")

    def wait_steps(self, ranks: Iterable[int], more: int = 5) -> None:
        """Until each of these has stepped on, from wherever it is."""
        before = {rank: self.latest(rank)["step"] for rank in ranks}
        wait_for(
            lambda: all(self.latest(rank)["step"] >= step + more for rank, step in before.items()),
            "steps",
        )

    def end(self) -> Result:
        stop_together(self.tmp_path / "until", self.world // self.size)
        return self.fit.done()

    def reported(self) -> set[tuple[int, int]]:
        """What ``report`` returned for, as (pid, step)."""
        return {
            (row["pid"], row["step"]) for rows in self.rows().values() for row in rows if "together" in row
        }

    def digests(self) -> set[str]:
        return {row["digest"] for rows in self.rows().values() for row in rows[-1:]}

    def kill(self, rank: int, *, inside: bool) -> None:
        """Now, or in the middle of its next all-reduce."""
        if inside:
            (self.where / f"die-{rank}").touch()
        else:
            os.kill(self.latest(rank)["pid"], signal.SIGKILL)


def records(result: Result, kind: type) -> list[Any]:
    return [record for record in journal.read(Path(result.path)) if isinstance(record, kind)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_a_killed_group_is_replaced_while_the_others_go_on(tmp_path: Path, times: int) -> None:
    run = Groups(tmp_path, save_every=5)
    run.wait_together(4)
    back: list[float] = []
    for n in range(times):
        victim = random.choice([0, 1, 2, 3]) if n else 0  # rank 0 has no part that others don't have
        before = run.pids()
        run.kill(victim, inside=n % 2 == 0)
        wait_for(lambda pid=before[victim]: not alive(pid), "its death")
        died = run.latest(victim)["at"]
        run.wait_together(4, but=[before[victim]])
        now = run.pids()
        assert {r: p for r, p in now.items() if r != victim} == {
            r: p for r, p in before.items() if r != victim
        }
        first = next(row for row in run.rows()[victim] if row["pid"] == now[victim] and "together" in row)
        back.append(first["at"] - died)
    result = run.end()
    assert len(run.digests()) == 1, "all groups have the same parameters, bit for bit"
    started = records(result, GroupStarted)
    assert [s.rung for s in started] == [Rung.FIRST_START] + [Rung.REPLACE_GROUPS] * times
    assert {s.epoch for s in started} == {1}
    assert [r.spent for r in records(result, RecoveryDecided)] == list(range(1, times + 1))
    gaps = longest_gaps(run)
    late = sorted(back)[int(0.99 * (len(back) - 1))]
    print(f"\n{times} kills: back after {statistics.median(back):.2f} s, p99 {late:.2f} s; ")
    print(f"longest gap between survivors' steps {max(gaps):.2f} s")
    assert run.reported() <= set(run.heard.reports), "every report that returned has reached the driver"


def longest_gaps(run: Groups) -> list[float]:
    found = []
    for rows in run.rows().values():
        at = [(row["pid"], row["at"]) for row in rows if "together" in row]
        found += [b - a for (p, a), (q, b) in pairwise(at) if p == q]
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_worker_that_dies_takes_its_partner_along_and_nobody_else(
    tmp_path: Path, sharded: bool, times: int
) -> None:
    run = Groups(tmp_path, size=2, sharded=sharded, save_every=5)
    run.wait_together(2)
    for n in range(times):
        victim = random.randrange(4) if n else 3
        lost, stay = ([2, 3], [0, 1]) if victim > 1 else ([0, 1], [2, 3])
        before = run.pids()
        run.kill(victim, inside=sharded is (n % 2 == 0))
        wait_for(lambda pid=before[victim]: not alive(pid), "its death")
        run.wait_together(2, but=[before[rank] for rank in lost])
        assert run.pids(stay) == {rank: before[rank] for rank in stay}
        assert not any(alive(before[rank]) for rank in lost)
    result = run.end()
    last = {rank: rows[-1]["digest"] for rank, rows in run.rows().items()}
    assert (last[0], last[1]) == (last[2], last[3]), "each rank has what its peer in the other group has"
    assert (last[0] == last[1]) is not sharded, "partners have copies, or shards"
    decided = records(result, RecoveryDecided)
    assert len(decided) == times
    assert decided[0].groups == (1,)


def test_groups_that_die_together_are_replaced_together(tmp_path: Path) -> None:
    run = Groups(tmp_path, save_every=5)
    run.wait_together(4)
    before = run.pids()
    for rank in (1, 3):
        run.kill(rank, inside=False)
    run.wait_together(4, but=[before[1], before[3]])
    assert run.pids([0, 2]) == {0: before[0], 2: before[2]}
    result = run.end()
    assert len(run.digests()) == 1
    (decided,) = records(result, RecoveryDecided)
    assert decided.groups == (1, 3)
    assert decided.spent == 1


def test_when_all_groups_die_everything_restarts_from_the_checkpoint(tmp_path: Path) -> None:
    run = Groups(tmp_path, save_every=2)
    run.wait_together(4)
    run.wait_steps(range(4), 6)
    before = run.pids()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    run.wait_together(4, but=before.values())
    starts = [
        row for rows in run.rows().values() for row in rows if row.get("restored") and row["epoch"] == 2
    ]
    assert len(starts) == 4
    assert min(row["step"] for row in starts) > 0
    result = run.end()
    assert len(run.digests()) == 1
    (decided,) = records(result, RecoveryDecided)
    assert (decided.groups, decided.spent) == ((), 1)


def lighthouses(cluster: LocalCluster) -> dict[int, str]:
    """The processes that are a lighthouse, and the host of each."""
    found = {}
    for host, facts in cluster.hosts.items():
        for pid in kernel.descendants(facts.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue  # gone meanwhile
            if b"everstep.torchft.server" in command:
                found[pid] = host
    return found


def test_the_lighthouse_comes_back_and_no_surviving_group_restarts(tmp_path: Path) -> None:
    with LocalCluster(slices=3, workers_per_host=2) as cluster:
        run = Groups(tmp_path, engine=cluster)
        run.wait_together(4)
        replaced = []
        for what in ("the lighthouse", "the lighthouse and a group", "its host"):
            before = run.pids()
            ((pid, host),) = lighthouses(cluster).items()
            beside = sorted(w.rank for w in live_runs()["groups"].workers if w.host == host)
            elsewhere = next(rank for rank in range(4) if rank not in beside)
            lost: list[int] = []
            match what:
                case "the lighthouse":
                    os.kill(pid, signal.SIGKILL)
                case "its host":
                    cluster.kill_host(host)
                    lost = beside
                case _:
                    os.kill(pid, signal.SIGKILL)
                    run.kill(elsewhere, inside=True)
                    lost = [elsewhere]
            replaced += [tuple(lost)] if lost else []
            wait_for(lambda pid=pid: not alive(pid), f"the death of {what}")
            wait_for(lambda pid=pid: lighthouses(cluster).keys() - {pid}, f"another lighthouse after {what}")
            survivors = [rank for rank in range(4) if rank not in lost]
            run.wait_steps(survivors, 10)
            run.wait_together(4, but=[before[rank] for rank in lost])
            assert run.pids(survivors) == {rank: before[rank] for rank in survivors}, what
        result = run.end()
        assert len(run.digests()) == 1
        assert [r.groups for r in records(result, RecoveryDecided)] == replaced


def test_groups_come_and_go_with_capacity_and_the_others_never_stop(tmp_path: Path) -> None:
    with LocalCluster(slices=2, workers_per_host=1) as cluster:
        run = Groups(tmp_path, workers=(2, 3), engine=cluster)
        first = [0, 1]
        run.wait_together(2, first)
        before = run.pids(first)
        cluster.add_slice()
        run.wait_together(3)
        third = run.latest(2)["pid"]
        cluster.remove_slice(next(w for w in live_runs()["groups"].workers if w.rank == 2).slice)
        run.wait_together(2, first)
        cluster.add_slice()
        run.wait_together(3, but=[third])
        assert run.pids(first) == before
        result = run.end()
        assert len(run.digests()) == 1
        started = [dict(r.generations) for r in records(result, GroupStarted)]
        assert started == [{0: 0, 1: 0}, {2: 1}, {2: 2}]
        (decided,) = records(result, RecoveryDecided)
        assert decided.budget == "max_failures", "the loss cost one, and neither arrival did"


def test_a_preempted_group_leaves_before_its_host_does_and_the_others_never_stop(tmp_path: Path) -> None:
    with LocalCluster(slices=3, workers_per_host=1) as cluster:
        run = Groups(tmp_path, workers=(2, 3), save_every=3, engine=cluster, trainer=plain)
        run.wait_together(3)
        before = run.pids()
        host = next(w for w in live_runs()["groups"].workers if w.rank == 2).host
        # A notice that nobody carries out: that the group leaves is not because its host is gone.
        (cluster.folder / host / "grace_s").write_text("4")
        os.kill(cluster.hosts[host].pid, signal.SIGTERM)
        wait_for(lambda: not alive(before[2]), "the group's leaving")
        assert alive(cluster.hosts[host].pid)
        run.wait_steps([0, 1])
        cluster.add_slice()
        run.wait_together(3, but=[before[2]])
        assert run.pids([0, 1]) == {0: before[0], 1: before[1]}
        (tmp_path / "until").touch()
        result = run.fit.done()
        (decided,) = records(result, RecoveryDecided)
        assert decided.budget == "max_preemption_failures"


def test_replicas_that_need_no_torchft_are_replaced_alike(tmp_path: Path) -> None:
    run = Groups(tmp_path, size=2, save_every=3, trainer=plain)
    run.wait_together(2)
    run.wait_steps(range(4))
    before = run.pids()
    os.kill(before[0], signal.SIGKILL)
    run.wait_together(2, but=[before[0], before[1]])
    assert run.pids([2, 3]) == {2: before[2], 3: before[3]}
    again = [row for row in run.rows()[0] if row.get("restored")]
    assert again[1]["step"] > 0, "it goes on from the newest checkpoint"
    (tmp_path / "until").touch()
    result = run.fit.done()
    stayed = {(pid, step) for pid, step in run.reported() if pid in (before[2], before[3])}
    assert stayed <= set(run.heard.reports)
    (decided,) = records(result, RecoveryDecided)
    assert decided.groups == (0,)


def plain(scaling: ScalingConfig, size: int, **more: Any) -> Trainer:
    del more["torch_config"]
    return Trainer(
        independent_steps, scaling_config=dataclasses.replace(scaling, replica_group_size=size), **more
    )


def with_torchft(scaling: ScalingConfig, size: int, **more: Any) -> Trainer:
    return TorchTrainer(torchft_steps, scaling_config=scaling, **more)
