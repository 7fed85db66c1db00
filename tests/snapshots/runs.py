"""Runs that save their state, and what tests do to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep import CheckpointConfig, FailureConfig, MemoryConfig, Result, RunConfig, ScalingConfig, Trainer
from everstep.control.commands import Recovered
from everstep.journal import journal
from everstep.torch import TorchTrainer
from noted import notes
from processes import LIMIT_S, wait_for


class Fit:
    """``fit()`` in a thread of its own."""

    def __init__(self, trainer: Trainer) -> None:
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(trainer,), daemon=True)
        self._thread.start()

    def _run(self, trainer: Trainer) -> None:
        try:
            self._result = trainer.fit()
        except BaseException as error:
            self._error = error

    def done(self) -> Result:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the run did not end"
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class World:
    """A folder for one test: where runs live, what their ranks note, and how they are told to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        self.until = folder / "until"

    def trainer(
        self,
        function: Callable[..., Any],
        workers: int | tuple[int, int] = 2,
        every_s: float = 0.2,
        kind: type[Trainer] = TorchTrainer,
        **more: Any,
    ) -> Trainer:
        config = {"notes": str(self.notes), "until": str(self.until), **more.pop("config", {})}
        return kind(
            function,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=workers, **more.pop("scaling", {})),
            run_config=RunConfig(
                name="run",
                storage_path=str(self.folder / "runs"),
                failure_config=FailureConfig(max_failures=-1),
                checkpoint_config=CheckpointConfig(
                    storage_every_s=every_s, num_to_keep=2, memory=more.pop("memory", MemoryConfig(every_s=0))
                ),
                **more.pop("run", {}),
            ),
            **more,
        )

    def checkpoints(self) -> list[Path]:
        """Those that are committed, the oldest first."""
        return sorted(path.parent for path in (self.folder / "runs" / "run").glob("*/.manifest.json"))

    def of_epoch(self, epoch: int) -> dict[int, list[dict[str, Any]]]:
        return {rank: [n for n in found if n["epoch"] == epoch] for rank, found in notes(self.notes).items()}

    def wait_for_step(self, epoch: int, step: int, ranks: int = 2) -> None:
        """Until every rank has reported it in this attempt."""

        def reached() -> bool:
            found = [each for each in self.of_epoch(epoch).values() if each]
            return len(found) == ranks and all(
                any(n.get("reported") and n["step"] >= step for n in each) for each in found
            )

        wait_for(reached, f"step {step} of attempt {epoch}")

    def pid_of(self, epoch: int, rank: int) -> int:
        return int(self.of_epoch(epoch)[rank][-1]["pid"])

    def attempt(self) -> int:
        """The newest in which some rank has begun."""
        return max(n["epoch"] for each in notes(self.notes).values() for n in each)

    def wait_for_recovery(self, after: int, ranks: int = 2) -> None:
        """Until every rank has reported in an attempt after this one."""

        def recovered() -> bool:
            each = self.of_epoch(self.attempt()).values()
            reported = [any(n.get("reported") for n in some) for some in each if some]
            return self.attempt() > after and len(reported) == ranks and all(reported)

        wait_for(recovered, f"{ranks} ranks that train after attempt {after}")

    def recoveries(self) -> list[Recovered]:
        """What the journal says of them."""
        records = journal.read(self.folder / "runs" / "run")
        return [record for record in records if isinstance(record, Recovered)]

    def newest_step(self, epoch: int) -> int:
        return max(n["step"] for each in self.of_epoch(epoch).values() for n in each)

    def check_restored_whole(self, epoch: int) -> int:
        """All ranks of this attempt, however many, began with what others had between them at one step
        before. Returns the step.
        """
        restored = [n for each in self.of_epoch(epoch).values() for n in each if n.get("restored")]
        ((step, whole),) = {(n["step"], n["whole"]) for n in restored}
        before = [n for each in notes(self.notes).values() for n in each if n["epoch"] < epoch]
        known = {n["whole"] for n in before if n["step"] == step and "whole" in n}
        assert known == {whole}, f"another state than that of step {step}"
        return int(step)

    def check_restored(self, epoch: int) -> int:
        """All ranks of this attempt began with exactly what they had at one step before. Returns the step."""
        before = notes(self.notes)
        steps = set()
        for rank, each in self.of_epoch(epoch).items():
            restored = next(n for n in each if n.get("restored"))
            steps.add(restored["step"])
            known = [
                n["state"]
                for n in before[rank]
                if n["epoch"] < epoch and n["step"] == restored["step"] and n.get("state")
            ]
            assert restored["step"] == 0 or restored["state"] in known, f"rank {rank} has another state"
        (step,) = steps
        return step
