"""Replica groups over torchft: what fails is replaced, and the others never stop."""

from __future__ import annotations

import os
import random
import signal
import statistics
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everstep import FailureConfig, Result, RunConfig, ScalingConfig, UserCallback
from everstep.control.commands import GroupStarted, RecoveryDecided, Rung
from everstep.driver import journal
from everstep.torch import TorchftConfig, TorchTrainer
from processes import alive, wait_for

from .test_worker_deaths import Fit, config, folder
from .training import notes, torchft_steps


class Heard(UserCallback):
    """Every report that reaches the driver, as (pid, step)."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.reports += [(row["pid"], row["step"]) for row in metrics]


class Groups:
    """A run of torchft's loop in replica groups, seen from its notes."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        workers: int | tuple[int, int] = 4,
        size: int = 1,
        engine: object = "local",
        save_every: int = 0,
        max_failures: int = -1,
        **more: Any,
    ) -> None:
        self.tmp_path = tmp_path
        self.where = tmp_path / "notes"
        self.world = workers if isinstance(workers, int) else workers[1]
        self.heard = Heard()
        self.fit = Fit(
            lambda: TorchTrainer(
                torchft_steps,
                train_loop_config=config(tmp_path, save_every),
                scaling_config=ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=0.1),
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

        wait_for(together, f"{groups} groups that step together", 90)

    def wait_steps(self, ranks: Iterable[int], more: int = 5) -> None:
        """Until each of these has stepped on, from wherever it is."""
        before = {rank: self.latest(rank)["step"] for rank in ranks}
        wait_for(
            lambda: all(self.latest(rank)["step"] >= step + more for rank, step in before.items()),
            "steps",
            60,
        )

    def end(self) -> Result:
        """Let all stop at the same step, some way ahead of the furthest."""
        step = max(self.latest(rank)["step"] for rank in self.rows())
        temporary = self.tmp_path / "until.tmp"
        temporary.write_text(str(step + 40))
        temporary.rename(self.tmp_path / "until")
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
@pytest.mark.parametrize("times", [3, pytest.param(50, marks=pytest.mark.soak)])
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
    print(f"\n{times} kills: back after {statistics.median(back):.2f} s, at worst {max(back):.2f} s; ")
    print(f"longest gap between survivors' steps {max(gaps):.2f} s")
    assert run.reported() <= set(run.heard.reports), "every report that returned has reached the driver"


def longest_gaps(run: Groups) -> list[float]:
    found = []
    for rows in run.rows().values():
        at = [(row["pid"], row["at"]) for row in rows if "together" in row]
        found += [b - a for (p, a), (q, b) in pairwise(at) if p == q]
    return found
