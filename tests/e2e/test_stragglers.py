"""A rank of a real run is slower than the others: it is named, with what takes it longer, and cleared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from everstep import RunConfig, ScalingConfig, Trainer
from everstep.cli.inspection import top
from everstep.cli.runs import show
from everstep.health.stragglers import Slowness
from everstep.journal import journal
from everstep.journal.records import StragglerSeen
from everstep.observe.registry import live_runs
from everstep.testing import LocalCluster
from processes import wait_for

from . import straggling
from .training import BareTorch

SLOW = 1


class Training:
    """A run in a thread of its own."""

    def __init__(self, folder: Path, function: Callable[[dict[str, Any]], None], **given: Any) -> None:
        self.folder = folder
        config = {"rank": SLOW, "recover": str(folder / "recover"), "until": str(folder / "until")}
        if function is straggling.waits_for_data:
            given["datasets"] = {"train": straggling.SlowData(config)}
        trainer = Trainer(
            function,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="slow", storage_path=str(folder)),
            **given,
        )
        self._error: BaseException | None = None
        self._thread = Thread(target=self._fit, args=(trainer,))
        self._thread.start()

    def _fit(self, trainer: Trainer) -> None:
        try:
            trainer.fit()
        except BaseException as error:
            self._error = error

    def seen(self) -> list[StragglerSeen]:
        return [r for r in journal.read(self.folder / "slow") if isinstance(r, StragglerSeen)]

    def wait_for(self, count: int) -> list[StragglerSeen]:
        """Until so many have been told."""
        wait_for(lambda: len(self.seen()) >= count or not self._thread.is_alive(), "a straggler", look_s=0.2)
        return self.seen()

    def tell(self, what: str) -> None:
        (self.folder / what).touch()

    def end(self) -> None:
        self.tell("until")
        self._thread.join()
        assert self._error is None, self._error


@pytest.mark.parametrize(
    ("function", "kind"),
    [(straggling.computes, Slowness.COMPUTING), (straggling.waits_for_data, Slowness.DATA)],
)
def test_a_slow_rank_is_named_with_what_takes_it_longer_and_cleared_when_it_recovers(
    tmp_path: Path, function: Any, kind: Slowness
) -> None:
    run = Training(tmp_path, function)
    try:
        (slow,) = run.wait_for(1)
        assert (slow.ranks, slow.kind, slow.over) == ((SLOW,), kind, "")
        run.tell("recover")
        _, over = run.wait_for(2)
        assert (over.ranks, over.over) == ((SLOW,), "recovered")
    finally:
        run.end()


def test_a_rank_that_others_wait_for_in_an_all_reduce_is_named(tmp_path: Path) -> None:
    run = Training(tmp_path, straggling.reduces, backend_config=BareTorch())
    try:
        (slow,) = run.wait_for(1)
        assert (slow.ranks, slow.kind) == ((SLOW,), Slowness.COMPUTING)
    finally:
        run.end()


def test_a_busy_host_is_named(tmp_path: Path) -> None:
    with LocalCluster(2, 1, 1) as cluster:
        run = Training(tmp_path, straggling.shares_its_processor, engine=cluster)
        try:
            (slow,) = run.wait_for(1)
            assert (slow.ranks, slow.kind) == ((SLOW,), Slowness.BUSY_HOST)
            assert slow.host == "slice-1-host"
        finally:
            run.end()


def test_show_and_top_say_who_is_slow_as_long_as_it_is(tmp_path: Path) -> None:
    run = Training(tmp_path, straggling.sleeps)

    def shown() -> str:
        return CliRunner().invoke(show, [str(tmp_path / "slow")]).output

    def on_top() -> str:
        return CliRunner().invoke(top, ["slow", "--once", "--every", "0.1"], env={"COLUMNS": "240"}).output

    try:
        (slow,) = run.wait_for(1)
        assert (slow.ranks, slow.kind) == ((SLOW,), Slowness.OTHER)
        wait_for(lambda: any(w.note for w in live_runs()["slow"].workers), "a note")
        assert "straggler     rank 1 on slice-0-host is " in shown()
        assert "slower than its peers: waiting for something else" in on_top()
        run.tell("recover")
        run.wait_for(2)
        assert "straggler" not in shown()
        wait_for(lambda: not any(w.note for w in live_runs()["slow"].workers), "no note")
        assert "slower" not in on_top()
    finally:
        run.end()


def test_an_even_run_has_no_stragglers(tmp_path: Path) -> None:
    run = Training(tmp_path, straggling.even)
    run.end()
    assert run.seen() == []
