"""A rank that waits for the others in a call of ours is seen to wait, from outside."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep as train
from everstep import Checkpoint, RunConfig, ScalingConfig, Trainer
from everstep.agent.watch import take_stacks
from everstep.health.vitals import StackPlace
from everstep.process import kernel
from everstep.process.current import session_here
from everstep.protocol import stacks
from everstep.protocol.progress import Seen, page_of
from everstep.protocol.worker_messages import WantCheckpoint
from everstep.worker.uploads import MAX_UNCOMMITTED
from processes import wait_for


def save() -> None:
    train.report({}, checkpoint=Checkpoint(tempfile.mkdtemp()))


def many_checkpoints(is_late: Callable[[], None]) -> None:
    is_late()
    for _ in range(MAX_UNCOMMITTED + 1):
        save()


def a_checkpoint_before_a_change(is_late: Callable[[], None]) -> None:
    session = session_here()
    assert session is not None
    session.values.proposed(0, WantCheckpoint("resize"))
    session.values.agreed(0, 1)
    is_late()
    save()


def the_newest_checkpoint(is_late: Callable[[], None]) -> None:
    is_late()
    train.report({})
    train.get_checkpoint()


def every_checkpoint(is_late: Callable[[], None]) -> None:
    is_late()
    train.report({})
    train.get_all_reported_checkpoints()


def a_barrier(is_late: Callable[[], None]) -> None:
    is_late()
    train.collective.barrier()


def the_first_state(is_late: Callable[[], None]) -> None:
    state = a_state()
    is_late()
    train.report({}, state=state, step=1)


def more_states(is_late: Callable[[], None]) -> None:
    state = a_state()
    train.report({}, state=state, step=1)
    is_late()
    for step in (2, 3):
        train.report({}, state=state, step=step)


def a_state() -> Any:
    import torch

    from everstep.torch import State

    model = torch.nn.Linear(2, 2)
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def reports(config: dict[str, str]) -> None:
    folder, rank = Path(config["folder"]), train.get_context().get_world_rank()

    def is_late() -> None:
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        while rank == 1 and not (folder / "go").exists():
            time.sleep(0.01)

    WAITS[config["what"]](is_late)


PLACES = {
    many_checkpoints: StackPlace.REPORT,
    a_checkpoint_before_a_change: StackPlace.REPORT,
    the_newest_checkpoint: StackPlace.REPORT,
    every_checkpoint: StackPlace.REPORT,
    more_states: StackPlace.REPORT,
    the_first_state: StackPlace.COLLECTIVE,
    a_barrier: StackPlace.COLLECTIVE,
}
WAITS = {wait.__name__: wait for wait in PLACES}


def place_of(pid: int) -> StackPlace:
    page = page_of(pid)
    assert page is not None
    try:
        found = asyncio.run(take_stacks(pid, page))
        return stacks.place_of(found.main, Seen(page).place)
    finally:
        page.close()


@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_waits_for_a_late_one_is_seen_to_wait(what: str, tmp_path: Path) -> None:
    trainer = Trainer(
        reports,
        train_loop_config={"folder": str(tmp_path), "what": what},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
    )
    fit = threading.Thread(target=trainer.fit)
    fit.start()
    try:
        pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
        wait_for(lambda: all(path.exists() and path.read_text() for path in pids), "both ranks")
        early, late = (int(path.read_text()) for path in pids)
        wait_for(lambda: place_of(early) is PLACES[WAITS[what]], "rank 0 to be seen to wait")
        assert kernel.is_alive(late)
        assert place_of(late) is StackPlace.WORKING
    finally:
        (tmp_path / "go").touch()
        fit.join()
