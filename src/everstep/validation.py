"""Validation beside training: a function of the user's that looks at a checkpoint while training goes on.

``report(checkpoint=…, validation=True)`` asks for it. The driver calls the function once the checkpoint is
committed, in a process of its own, one checkpoint at a time; what it returns is added to the checkpoint's
metrics, and counts for retention.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from everstep.errors import ConfigError
from everstep.protocol.metrics import encode_metrics

if TYPE_CHECKING:
    from everstep.checkpoint import Checkpoint


class ValidationFn(Protocol):
    """What validates a checkpoint, and returns metrics. Any function does that can be called so."""

    def __call__(self, checkpoint: Checkpoint, **kwargs: Any) -> dict[str, Any]: ...


@dataclass
class ValidationTaskConfig:
    """How one checkpoint is validated: ``report(validation=ValidationTaskConfig(…))``."""

    fn_kwargs: dict[str, Any] | None = None
    """What the function is called with besides the checkpoint. JSON must be able to hold it."""
    timeout_s: float | None = None
    """Longer than this it may not take; ``None``: as long as it likes. With ``num_workers=0`` it isn't
    heeded: the function is called by ``report``.
    """

    def __post_init__(self) -> None:
        self.fn_kwargs = _checked_arguments(self.fn_kwargs)
        limit_s = self.timeout_s
        if limit_s is not None and (isinstance(limit_s, bool) or not 0 < limit_s < float("inf")):
            raise ConfigError(
                f"ValidationTaskConfig.timeout_s is {limit_s!r}",
                "give a number of seconds above 0, or None for no limit",
                "ValidationTaskConfig.timeout_s",
            )

    def asked(self) -> bytes:
        """As a checkpoint's manifest keeps it."""
        return msgspec.json.encode(_Asked(self.fn_kwargs or {}, self.timeout_s))


class ValidationConfig:
    """How checkpoints are validated: ``Trainer(validation_config=…)``.

    Args:
        fn: Called with a checkpoint and the arguments; returns a dict of metrics.
        task_config: What holds for every checkpoint, unless its report says otherwise.
        ray_remote_kwargs: On the Ray engine, the function runs as a Ray task, with these options
            (``num_cpus``, ``num_gpus``, …). On one machine it runs in a process of its own, and nothing is
            reserved for it.
    """

    def __init__(
        self,
        fn: ValidationFn | Callable[..., dict[str, Any]],
        task_config: ValidationTaskConfig | None = None,
        ray_remote_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigError(
                f"ValidationConfig.fn is {fn!r}, expected a function",
                "give the function that validates a checkpoint",
                "ValidationConfig.fn",
            )
        if task_config is not None and not isinstance(task_config, ValidationTaskConfig):
            raise ConfigError(
                f"ValidationConfig.task_config is a {type(task_config).__name__}",
                "give an everstep.ValidationTaskConfig",
                "ValidationConfig.task_config",
            )
        self.fn = fn
        self.task_config = task_config or ValidationTaskConfig()
        self.ray_remote_kwargs = dict(ray_remote_kwargs or {})

    def task(self, asked: bytes, checkpoint: Checkpoint) -> ValidationTask:
        """What is to be done for a report that has ``asked``."""
        request = msgspec.json.decode(asked, type=_Asked | None)
        defaults = self.task_config
        arguments = {**(defaults.fn_kwargs or {}), **(request.fn_kwargs if request is not None else {})}
        limit_s = request.timeout_s if request is not None else defaults.timeout_s
        return ValidationTask(self.fn, checkpoint, arguments, limit_s)


@dataclass(frozen=True)
class ValidationTask:
    """One call of the function."""

    fn: Callable[..., Any]
    checkpoint: Checkpoint
    arguments: dict[str, Any]
    timeout_s: float | None

    def run(self) -> bytes:
        """The metrics, as the journal has them."""
        found = self.fn(self.checkpoint, **self.arguments)
        if not isinstance(found, dict):
            raise ConfigError(
                f"the validation function returned a {type(found).__name__}",
                "return a dict of metrics",
                "ValidationConfig.fn",
            )
        return encode_metrics(found)


class _Asked(msgspec.Struct, frozen=True):
    fn_kwargs: dict[str, Any]
    timeout_s: float | None


BY_DEFAULT = msgspec.json.encode(None)
"""``report(validation=True)``: as the trainer's ``task_config`` says."""


def _checked_arguments(given: object) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        if isinstance(given, dict) and all(isinstance(name, str) for name in given):
            return dict(json.loads(json.dumps(given)))
        raise TypeError(
            f"a {type(given).__name__}" if not isinstance(given, dict) else "its keys aren't text"
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"ValidationTaskConfig.fn_kwargs can't be kept with the checkpoint: {error}",
            "give a dict of what JSON can hold: text, numbers, lists and dicts",
            "ValidationTaskConfig.fn_kwargs",
        ) from None
