"""``UserCallback``: the hooks that a user may add to a run, and their arguments.

Callbacks run in the driver's process. One that raises is logged, and never ends the run. They are called by
``observe.callbacks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.checkpoint import Checkpoint
    from everstep.config import RunConfig, ScalingConfig


@dataclass(frozen=True)
class TrainRunContext:
    """Which run this is, and how it was asked for."""

    run_id: str
    """The same across restarts and take-overs."""
    run_config: RunConfig
    """As the trainer was given it."""
    scaling_config: ScalingConfig
    """As the trainer was given it."""
    train_loop_config: Mapping[str, Any] | None = None
    """What the training function is called with."""
    backend_config: object = None
    """The ``TorchConfig`` or ``JaxConfig``."""
    name: str = ""
    """The run's name, also where ``RunConfig`` has none."""
    path: str = ""
    """The address of the run's folder, as ``Result.path`` has it."""

    def get_run_config(self) -> RunConfig:
        """The same as ``run_config``: Ray Train has both."""
        return self.run_config


class UserCallback:
    """Subclass it, override what you need, and give an instance to ``RunConfig(callbacks=[…])``."""

    def after_report(
        self,
        run_context: TrainRunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Every rank has made its k-th report. ``metrics[i]`` is rank i's. A report with a checkpoint comes
        once that is committed, or without it if it could not be saved. With replica groups, every rank of a
        group: each group has its own count.
        """

    def after_exception(self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]) -> None:
        """Workers failed: rank to ``everstep.WorkerError``. Called once an incident, before the recovery."""
