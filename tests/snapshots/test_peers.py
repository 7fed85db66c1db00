"""Copies of snapshots on other hosts: a host that is lost is made up for without storage."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from everstep.testing import LocalCluster
from everstep.torch import TorchTrainer
from processes import wait_for

from .agents import host_of, wait_for_copies
from .runs import Fit, World
from .training import fsdp_steps, steps

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("jax") is None, reason="needs torch and jax"
)

NEVER_S = 3600.0
"""No state is written to storage while such a run trains: what it restores comes from memory."""


def sources(world: World) -> list[str]:
    """Where the state came from, of each recovery."""
    return [recovered.state_from.split(",")[0] for recovered in world.recoveries()]


def training(framework: str) -> dict[str, Any]:
    """A function of this framework whose state is divided among the ranks, and its trainer."""
    if framework == "torch":
        return {"function": fsdp_steps, "kind": TorchTrainer}
    from everstep.jax import JaxTrainer

    from .jax_training import steps as jax_steps

    return {"function": jax_steps, "kind": JaxTrainer}


def test_a_lost_hosts_ranks_are_restored_from_a_peer_and_nothing_from_storage(world: World) -> None:
    with LocalCluster(slices=3) as cluster:
        fit = Fit(world.trainer(steps, every_s=NEVER_S, engine=cluster))
        world.wait_for_step(1, 3)
        copied = wait_for_copies(2, 1)
        cluster.kill_host(host_of(world.pid_of(1, 1)))
        world.wait_for_step(2, 1)
        assert world.check_restored(2) >= copied.report
        assert world.checkpoints() == [], "there is nothing in storage that could be read"
        world.until.touch()
        fit.done()
    assert sources(world) == ["memory of other hosts"]


def test_a_host_that_is_lost_with_its_peer_is_restored_from_storage_and_the_run_says_so(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalCluster(slices=4) as cluster:
        fit = Fit(world.trainer(steps, every_s=0.2, engine=cluster))
        world.wait_for_step(1, 3)
        wait_for(world.checkpoints, "a checkpoint")
        wait_for_copies(2, 1)
        victims = [host_of(world.pid_of(1, rank)) for rank in (0, 1)]
        for host in victims:
            cluster.kill_host(host)
        world.wait_for_recovery(1)
        assert world.check_restored(world.attempt()) > 0
        world.until.touch()
        fit.done()
    assert sources(world)[-1:] == ["storage"]
    assert "state from storage" in capfd.readouterr().err


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_was_divided_among_four_is_restored_from_memory_at_two_and_at_four_again(
    world: World, framework: str
) -> None:
    scaling = {"elastic_resize_monitor_interval_s": 0.1}
    with LocalCluster(slices=2, workers_per_host=2) as cluster:
        fit = Fit(
            world.trainer(
                **training(framework), workers=(2, 4), every_s=NEVER_S, engine=cluster, scaling=scaling
            )
        )
        world.wait_for_step(1, 3, ranks=4)
        copied = wait_for_copies(4, 1)
        cluster.kill_host(host_of(world.pid_of(1, 3)))
        world.wait_for_recovery(1, ranks=2)
        shrunk = world.attempt()
        assert world.check_restored_whole(shrunk) >= copied.report
        world.wait_for_step(shrunk, world.newest_step(shrunk) + 2)
        cluster.add_slice()
        world.wait_for_recovery(shrunk, ranks=4)
        assert world.check_restored_whole(world.attempt()) > copied.report
        world.until.touch()
        fit.done()
    assert sources(world) == ["memory of other hosts"] * 2
