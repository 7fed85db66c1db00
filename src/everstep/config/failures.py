"""How many recoveries each kind of failure may cost."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from everstep.config.values import bad, is_int, require_choice
from everstep.refusals import answers_unknown_arguments

_LIMITS = ("max_failures", "controller_failure_limit", "max_preemption_failures", "max_replica_failures")
"""One for each of the controller's budgets, under the same name."""


@answers_unknown_arguments
@dataclass(frozen=True)
class FailureConfig:
    """How many recoveries each kind of failure may cost. -1 is without limit, 0 is none."""

    max_failures: int = 0
    """For a worker's exception, exit or signal, for workers that hang, and for hosts lost without notice."""
    _: KW_ONLY
    controller_failure_limit: int = -1
    """For starts, rendezvous and reservations that failed or timed out."""
    max_preemption_failures: int = -1
    """For losses after a preemption notice."""
    max_replica_failures: int | None = None
    """For replica groups that are replaced while others train on; after that, all workers restart instead,
    which spends ``max_failures``. ``None``: a replacement spends ``max_failures`` itself.
    """
    on_hang: Literal["restart", "warn", "fail"] = "restart"
    """When workers make no progress any more: restart them, which spends ``max_failures``; only say so; or
    end the run. When that is: ``Deadlines.hang_s`` and those next to it.
    """

    def __post_init__(self) -> None:
        for name, value in limits_of(self).items():
            if name == "max_replica_failures" and value is None:
                continue
            if not is_int(value) or value < -1:
                raise bad(
                    f"FailureConfig.{name}",
                    value,
                    "an int of at least -1",
                    "Use -1 for no limit, 0 to fail at the first",
                )
        require_choice("FailureConfig.on_hang", self.on_hang, ("restart", "warn", "fail"))


def limits_of(config: FailureConfig) -> dict[str, Any]:
    """What each budget allows, as ``control.settings.Settings`` takes it."""
    return {name: getattr(config, name) for name in _LIMITS}
