"""``Trainer``: a training function, checked, and handed to the driver.

Everything that can be known to be wrong before a process starts is found out here. What happens after is the
driver's.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, TypeVar

from everstep.backend.base import Backend, NoBackend
from everstep.config import RunConfig, ScalingConfig
from everstep.driver.result import Result
from everstep.engine.choice import NAMES
from everstep.errors import ConfigError, EverstepError, RefusedError
from everstep.refusals import refuse_arguments
from everstep.validation import ValidationConfig
from everstep.worker.datasets import checked_datasets

logger = logging.getLogger("everstep")

TrainFunction = Callable[[], Any] | Callable[[dict[str, Any]], Any]

Config = TypeVar("Config")

TakesConfig = Literal["always", "if given", "never"]

_FUNCTION = "Trainer.train_loop_per_worker"


class Trainer:
    """Run a training function on N workers, without a framework between them.

    ``everstep.torch.TorchTrainer`` and ``everstep.jax.JaxTrainer`` are the same with one.

    Args:
        train_loop_per_worker: The training function. It takes nothing, or the config dict.
        train_loop_config: The dict that it is called with. If its argument has no default and none is
            given, an empty one.
        scaling_config: How many workers, and what each needs. One worker by default.
        run_config: Where the run lives, and how it deals with failures.
        datasets: By name: map-style data sets, ``everstep.data.Stream``s, or on the Ray engine
            ``ray.data.Dataset``s. ``get_dataset_shard(name)`` gives a worker its share.
        validation_config: The function that ``report(validation=…)`` has called with a checkpoint, beside
            training.
        engine: ``"local"``: processes of this machine. ``"ray"``: nodes of a Ray cluster. ``"auto"``: Ray
            where ``ray.is_initialized()`` or ``RAY_ADDRESS`` is set, else local. Or an engine such as
            ``everstep.testing.LocalCluster(…)``.
        backend_config: A backend of your own: an object with the methods of
            ``everstep.backend.base.Backend``.
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        engine: object = "auto",
        backend_config: Backend | None = None,
        **refused: object,
    ) -> None:
        name = type(self).__name__
        refuse_arguments("Trainer", refused, _accepted_arguments(type(self)), shown_as=name)
        takes_config = _takes_config(train_loop_per_worker)
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = _checked_loop_config(train_loop_config, takes_config)
        self.scaling_config = _checked_config(name, "scaling_config", scaling_config, ScalingConfig)
        self.run_config = _checked_config(name, "run_config", run_config, RunConfig)
        self.datasets = checked_datasets(datasets)
        self.validation_config = None
        if validation_config is not None:
            self.validation_config = _checked_config(
                name, "validation_config", validation_config, ValidationConfig
            )
        self.engine = _checked_engine(engine)
        if backend_config is not None and (
            isinstance(backend_config, type) or not isinstance(backend_config, Backend)
        ):
            raise ConfigError(
                f"{name}.backend_config is {backend_config!r}, expected an object with the methods of "
                "everstep.backend.base.Backend.",
                "Leave it out for none; TorchTrainer takes torch_config, JaxTrainer takes jax_config.",
                f"{name}.backend_config",
            )
        self.backend_config = backend_config

    def backend(self) -> Backend:
        """How the workers become one distributed job. What a framework's trainer overrides."""
        return NoBackend() if self.backend_config is None else self.backend_config

    def fit(self) -> Result:
        """Train, recover from what fails, and give what came of it.

        Raises ``TrainingFailedError``, with the first cause in its first line, when a budget is spent or the
        cause is one that no retry can fix.
        """
        from everstep.agent.script import is_script_here
        from everstep.driver.run import RunSpec, run_training

        name = type(self).__name__
        if is_script_here() and self.scaling_config.num_workers != 0:
            raise ConfigError(
                f"{name}.fit() is called in a worker of `everstep run`, where each worker would start a run "
                "of its own.",
                "Start the script with plain `python`: the trainer starts its workers itself, as many as "
                "ScalingConfig.num_workers says.",
                f"{name}.fit",
            )
        spec = RunSpec(
            train_fn=self.train_loop_per_worker,
            train_loop_config=self.train_loop_config,
            datasets=self.datasets,
            backend=self.backend(),
            scaling=self.scaling_config,
            run=self.run_config,
            engine=self.engine,
            validation=self.validation_config,
        )
        try:
            return run_training(spec)
        except EverstepError as error:
            # It says all there is to say: where in Everstep it was raised would push that off the screen.
            raise error.with_traceback(None) from error.__cause__

    @classmethod
    def restore(cls, *args: object, **kwargs: object) -> NoReturn:
        """Ray Train's; refused."""
        raise _no_restore(f"{cls.__name__}.restore()")

    @classmethod
    def can_restore(cls, *args: object, **kwargs: object) -> NoReturn:
        """Ray Train's; refused."""
        raise _no_restore(f"{cls.__name__}.can_restore()")


def _accepted_arguments(trainer: type[Trainer]) -> list[str]:
    """The names that a trainer takes; a subclass's ``__init__`` may take more, and passes what it doesn't
    know on.
    """
    own = inspect.signature(trainer).parameters.values()
    return [parameter.name for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]


def _takes_config(function: object) -> TakesConfig:
    """Whether the training function is called with the config dict. Raises if neither call would do."""
    if not callable(function):
        raise ConfigError(
            f"{_FUNCTION} is {function!r}, expected a function.", "Give the function itself.", _FUNCTION
        )
    name = getattr(function, "__qualname__", repr(function))
    body = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        raise ConfigError(
            f"{_FUNCTION} {name} is async, expected a plain function.",
            f"Write `def train(config): return asyncio.run({name}(config))`, and give that.",
            _FUNCTION,
        )
    if inspect.isgeneratorfunction(body):
        raise ConfigError(
            f"{_FUNCTION} {name} has a `yield`, so calling it would not run it.",
            "Call everstep.report(…) where it yields.",
            _FUNCTION,
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        raise ConfigError(
            f"{_FUNCTION} {name} has no signature that can be read.",
            f"Write `def train(config): return {name}(config)`, and give that.",
            _FUNCTION,
        ) from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    required_names = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 1 or required_names:
        wanted = ", ".join(p.name for p in required + required_names)
        raise ConfigError(
            f"{_FUNCTION} {name} needs ({wanted}), expected a function that takes nothing or the config "
            "dict.",
            "Put them all into train_loop_config, and take that as the only argument; or bind the "
            "others with functools.partial.",
            _FUNCTION,
        )
    if required:
        return "always"
    return "if given" if positional or any(p.kind is p.VAR_POSITIONAL for p in parameters) else "never"


def _checked_loop_config(config: object, takes_config: TakesConfig) -> dict[str, Any] | None:
    """The dict that the function is called with; ``None`` where it is called with nothing."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"Trainer.train_loop_config is a {type(config).__name__}, expected a dict.",
            "Wrap it: train_loop_config={'config': …}.",
            "Trainer.train_loop_config",
        )
    if takes_config == "always" or (takes_config == "if given" and config is not None):
        return dict(config or {})
    if config:
        logger.warning(
            "train_loop_config is given, but the training function takes no argument: it won't see it."
        )
    return None


def _checked_config(owner: str, name: str, given: object, kind: type[Config]) -> Config:
    if given is None:
        return kind()
    if not isinstance(given, kind):
        came_from = f"{type(given).__module__}.{type(given).__qualname__}"
        raise ConfigError(
            f"{owner}.{name} is a {came_from}, expected an everstep.{kind.__name__}.",
            f"Make it with everstep.{kind.__name__}(…).",
            f"{owner}.{name}",
        )
    return given


def _checked_engine(engine: object) -> object:
    *others, last = NAMES
    any_of = ", ".join(map(repr, others))
    if isinstance(engine, str) and engine not in NAMES:
        close = difflib.get_close_matches(engine, NAMES, n=1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Use {any_of} or {last!r}."
        raise ConfigError(
            f"Trainer.engine is {engine!r}, expected {any_of}, {last!r} or an engine.",
            remedy,
            "Trainer.engine",
        )
    if engine is None or isinstance(engine, type):
        raise ConfigError(
            f"Trainer.engine is {engine!r}, expected {any_of}, {last!r} or an engine.",
            "Leave it out, or give an instance: everstep.testing.LocalCluster(…).",
            "Trainer.engine",
        )
    return engine


def _no_restore(name: str) -> RefusedError:
    return RefusedError(
        f"{name} is refused.",
        "Make the trainer again with the same RunConfig(storage_path=…, name=…), and call fit(): it resumes.",
        name,
    )
