"""Growing, shrinking and preemption on virtual hosts of this machine."""

from __future__ import annotations

from pathlib import Path

from e2e.ray.cluster import Running
from e2e.training import elastic_steps, preemption_steps
from everstep.control.commands import GroupStarted, PreemptionSeen, Recovered, RecoveryDecided, Rung, Waiting
from everstep.testing import LocalCluster
from processes import wait_for


def test_a_run_waits_grows_shrinks_and_grows_again(tmp_path: Path) -> None:
    with LocalCluster(slices=0, hosts_per_slice=2) as cluster:
        cluster.add_slice("slice-0", hosts=1)
        run = Running(tmp_path, elastic_steps, (2, 4), engine=cluster, scaling={}, max_failures=1)
        wait_for(lambda: run.records(Waiting), "the wait")
        waits = run.records(Waiting)[0]
        assert waits.workers_min == 2
        assert "slice-0: not whole (1 of 2 hosts there)" in waits.message

        cluster.add_slice("slice-0")
        run.until_training(2)
        cluster.add_slice("slice-1")
        epoch = run.until_training(4)
        assert {n["slices"] for n in run.notes() if n["epoch"] == epoch} == {2}
        cluster.kill_host("slice-1-host-0")
        after = run.until_training(2, epoch)
        cluster.remove_slice("slice-1")
        cluster.add_slice("slice-1")
        run.until_training(4, after)
        run.until_steps()
        run.finish()

    started = [(s.world_size, s.rung) for s in run.records(GroupStarted)]
    assert started[-3:] == [(4, Rung.PLANNED), (2, Rung.SHRINK), (4, Rung.PLANNED)]
    reasons = [s.reason for s in run.records(GroupStarted)]
    assert "slice-1-host-0" in reasons[-2]
    assert [r.steps_lost for r in run.records(Recovered) if r.rung is Rung.PLANNED] == [0, 0]


def test_growing_waits_for_the_checkpoint_that_it_asks_for_and_loses_no_step(tmp_path: Path) -> None:
    with LocalCluster(slices=1) as cluster:
        run = Running(
            tmp_path, elastic_steps, (1, 2), engine=cluster, scaling={}, config={"save_every": "asked"}
        )
        run.until_training(1)
        cluster.add_slice()
        run.until_training(2)
        run.until_steps()
        run.finish()
    rank_0 = [n for n in run.notes() if n["rank"] == 0]
    # The report that saved did not return: its step is noted by the worker that restored it, and none twice.
    assert [n["step"] for n in rank_0] == list(range(rank_0[-1]["step"] + 1))
    assert [r.steps_lost for r in run.records(Recovered)] == [0]


def test_a_preempted_slice_is_left_at_one_checkpoint_and_costs_no_failure(tmp_path: Path) -> None:
    with LocalCluster(slices=3) as cluster:
        run = Running(tmp_path, elastic_steps, 2, engine=cluster, scaling={}, config={"save_every": "asked"})
        epoch = run.until_training(2)
        cluster.preempt_slice("slice-1", grace_s=6.0)
        run.until_training(2, epoch)
        run.until_steps()
        run.finish()
    assert [d.budget for d in run.records(RecoveryDecided)] == ["max_preemption_failures"]
    assert len(run.records(GroupStarted)) == 2
    assert [r.steps_lost for r in run.records(Recovered)] == [0]
    kept = [r for r in run.records() if type(r).__name__ == "CheckpointKept"]
    assert len(kept) in (1, 2), "at the notice, and before leaving"


def test_a_cancelled_notice_restarts_nothing(tmp_path: Path) -> None:
    with LocalCluster(slices=3) as cluster:
        run = Running(tmp_path, elastic_steps, 2, engine=cluster, scaling={})
        run.until_training(2)
        cluster.preempt_slice("slice-1", grace_s=60.0)
        wait_for(lambda: run.records(PreemptionSeen), "the notice")
        cluster.cancel_preemption("slice-1")
        wait_for(lambda: len(run.records(PreemptionSeen)) == 2, "the cancellation")
        run.until_steps()
        run.finish()
    assert len(run.records(GroupStarted)) == 1
    assert run.records(RecoveryDecided) == []


def test_two_notices_one_after_the_other_lead_to_one_restart(tmp_path: Path) -> None:
    with LocalCluster(slices=4) as cluster:
        run = Running(tmp_path, elastic_steps, 2, engine=cluster, scaling={})
        epoch = run.until_training(2)
        cluster.preempt_slice("slice-0", grace_s=8.0)
        wait_for(lambda: run.records(PreemptionSeen), "the first notice")
        cluster.preempt_slice("slice-1", grace_s=8.0)
        run.until_training(2, epoch)
        run.until_steps()
        run.finish()
    assert len(run.records(GroupStarted)) == 2
    assert len(run.records(RecoveryDecided)) == 1


def test_every_rank_hears_of_a_preemption_at_the_same_call(tmp_path: Path) -> None:
    with LocalCluster(slices=2, hosts_per_slice=2) as cluster:
        run = Running(tmp_path, preemption_steps, 4, engine=cluster, scaling={})
        run.until_training(4)
        cluster.preempt_slice("slice-1", grace_s=60.0)
        wait_for(lambda: any(n.get("info") for n in run.notes()), "the notice")
        run.until_steps(20)
        cluster.cancel_preemption("slice-1")

        def all_know() -> bool:
            last = {n["rank"]: n for n in run.notes()}
            return all(n["info"] is None for n in last.values())

        wait_for(all_know, "the cancellation")
        run.finish()
    by_call: dict[int, set[str]] = {}
    for note in run.notes():
        if not note.get("restored"):
            by_call.setdefault(note["step"], set()).add(str(note["info"]))
    last = min(max(n["step"] for n in run.notes() if n["rank"] == rank) for rank in range(4))
    answers = [by_call[step] for step in range(1, last + 1)]
    assert all(len(answer) == 1 for answer in answers), "every rank gets the same answer at the same call"
    assert str([2, 3]) in {a for answer in answers for a in answer}
    assert answers[-1] == {str(None)}
