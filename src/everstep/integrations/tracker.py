"""``Tracker``: logs a run's metrics elsewhere, each step once, also across restarts.

What there is to log is in the run's journal, and what was logged is with the tracker: a driver that begins
asks for the latter, and goes on from there. So nothing is kept besides the two.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from everstep.callbacks import TrainRunContext, UserCallback
from everstep.errors import ConfigError

__all__ = ["LoggedRow", "Tracker"]


class LoggedRow(NamedTuple):
    """One report, as numbers."""

    step: int
    """Its place on the curve."""
    metrics: Mapping[str, float]
    """Those in nested dicts are called ``a/b``."""


class Tracker(UserCallback):
    """A ``UserCallback`` that logs what rank 0 reports, each step once.

    Subclass it for a tracker of your own. Its methods are called on one thread of its own: they may take
    their time. If one raises, that is logged, and after a pause it begins again with ``open``.

    Args:
        step_metric: The metric whose value is the step, for example ``"step"``. By default steps are the
            numbers of reports, counted on from the checkpoint that a restart goes back to.
    """

    def __init__(self, step_metric: str | None = None) -> None:
        if step_metric is not None and not (isinstance(step_metric, str) and step_metric):
            raise ConfigError(
                f"{type(self).__name__}(step_metric) is {step_metric!r}, expected the name of a metric.",
                "Leave it out to count reports.",
                "step_metric",
            )
        self.step_metric = step_metric

    def open(self, run_context: TrainRunContext) -> int:
        """Begin to log, or go on. Returns the last step that was logged before; 0 if there was none."""
        raise NotImplementedError

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Later steps than all before. When this returns, they are on their way."""
        raise NotImplementedError

    def close(self, outcome: str) -> None:
        """The run is over: ``finished``, ``failed`` or ``stopped``. It may be resumed."""
        raise NotImplementedError


def require(package: str, extra: str, callback: str) -> None:
    """Tell before a run starts that a package is missing, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{callback} needs {package}, which is not installed.",
            f"Install it: pip install 'everstep[{extra}]'.",
            callback,
        )


def plain_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """What of ``train_loop_config`` can be shown: numbers and text, by name."""
    plain = (str, int, float, bool)
    return {str(key): value for key, value in (config or {}).items() if isinstance(value, plain)}
