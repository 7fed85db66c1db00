"""What Ray Train has and Everstep refuses, each with its remedy; and how an unknown argument is
answered.

A script that moves over from Ray Train meets an error that says what to write instead, never a bare
``TypeError``. The table in ``docs/from-ray-train.md`` lists what is refused; a test holds the two together.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NoReturn, TypeVar

from everstep.errors import ConfigError, RefusedError

_TUNE = "It belongs to Ray Tune. Leave it out"
_DATA = (
    "Leave it out: every data set in Trainer(datasets=…) is divided among the workers. Prepare data before "
    "it is handed over, or in the training function"
)
_RESUME = (
    "The same RunConfig(storage_path=…, name=…) resumes by itself. To start from another run's "
    "checkpoint, put it into train_loop_config: train_loop_config={'checkpoint': Checkpoint(path)}"
)
_FILESYSTEM = "Everstep takes no pyarrow filesystems. Give a folder or a URI as the path instead"


@dataclass(frozen=True)
class Refusal:
    """Why an argument is refused, and what to do instead. ``None`` and ``harmless`` ask for nothing."""

    remedy: str
    _: KW_ONLY
    harmless: Collection[object] = ()


REFUSED_ARGUMENTS: Mapping[str, Mapping[str, Refusal]] = {
    "ScalingConfig": {
        "trainer_resources": Refusal(
            "The driver needs no resources of its own. Leave it out; resources_per_worker is for the workers"
        ),
    },
    "RunConfig": {
        "storage_filesystem": Refusal(_FILESYSTEM),
        "sync_config": Refusal(f"{_TUNE}: report(checkpoint=…) uploads by itself"),
        "verbose": Refusal(f"{_TUNE}: LoggingConfig(log_level=…) sets how much is logged"),
        "stop": Refusal(f"{_TUNE}: return from the training function to stop"),
        "progress_reporter": Refusal(f"{_TUNE}: progress is shown by itself"),
        "log_to_file": Refusal(
            "Leave it out: the output of every rank goes to a file in the run's folder already"
        ),
    },
    "FailureConfig": {
        "fail_fast": Refusal(
            f"{_TUNE}: max_failures=0, the default, fails at the first error", harmless=(False,)
        ),
        "relax_collectives_on_preemption": Refusal(
            "It comes with a later release. Leave it out: report() is no barrier, and strands no rank",
            harmless=(False,),
        ),
        "preemption_grace_s": Refusal(
            "It comes with a later release. Leave it out, and checkpoint within the notice", harmless=(0, 0.0)
        ),
    },
    "CheckpointConfig": {
        "checkpoint_frequency": Refusal(
            "Call report(checkpoint=…) as often as you want a checkpoint instead"
        ),
        "checkpoint_at_end": Refusal("Call report(checkpoint=…) at the end of the training function instead"),
    },
    "LoggingConfig": {},
    "Trainer": {
        "dataset_config": Refusal(_DATA),
        "metadata": Refusal(
            "Put it into train_loop_config, or next to the weights with Checkpoint.set_metadata(…)"
        ),
        "resume_from_checkpoint": Refusal(_RESUME),
        "restore_from_checkpoint": Refusal(_RESUME),
        "preprocessor": Refusal(_DATA),
    },
}


def refuse_arguments(
    owner: str, given: Mapping[str, object], accepted: Collection[str], shown_as: str = ""
) -> None:
    """Raise for the first argument in ``given`` that ``owner`` doesn't take. ``shown_as`` is the name in the
    error.
    """
    shown_as = shown_as or owner
    refusals = REFUSED_ARGUMENTS.get(owner, {})
    for name, value in given.items():
        if name in accepted:
            continue
        refusal = refusals.get(name)
        if refusal is None:
            raise unknown_argument(shown_as, name, accepted)
        # Types are compared first: an array or a dataset has an == of its own.
        if value is not None and not any(
            type(value) is type(same) and value == same for same in refusal.harmless
        ):
            raise RefusedError(
                f"{shown_as}({name}={_short(value)}) is refused.", f"{refusal.remedy}.", f"{shown_as}.{name}"
            )


def unknown_argument(owner: str, name: str, accepted: Collection[str]) -> ConfigError:
    """The error for an argument that neither Everstep nor Ray Train knows."""
    close = difflib.get_close_matches(name, accepted, n=1)
    remedy = f"Did you mean {close[0]}?" if close else f"It takes: {', '.join(sorted(accepted))}."
    return ConfigError(f"{owner} has no argument {name!r}.", remedy, f"{owner}.{name}")


ConfigClass = TypeVar("ConfigClass", bound=type)


def answers_unknown_arguments(cls: ConfigClass) -> ConfigClass:
    """Class decorator, over ``@dataclass``: an argument that isn't a field gets an answer with a remedy.

    Wrapped around ``__init__`` rather than put into a metaclass, so that signatures stay readable to people
    and tools.
    """
    parameters = inspect.signature(cls).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    accepted = [p.name for p in parameters]
    owner = cls.__name__
    plain_init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(plain_init)
    def checked_init(self: object, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(positional):
            taken = (
                f"only {', '.join(positional)} without a name" if positional else "its arguments by name only"
            )
            raise ConfigError(
                f"{owner} takes {taken}, but {len(args)} came without one.",
                f"Write {owner}({accepted[0]}=…).",
                owner,
            )
        twice = [name for name in positional[: len(args)] if name in kwargs]
        if twice:
            raise ConfigError(f"{owner} got {twice[0]} twice.", "Give it once.", f"{owner}.{twice[0]}")
        refuse_arguments(owner, kwargs, accepted)
        plain_init(self, *args, **{name: value for name, value in kwargs.items() if name in accepted})

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def _short(value: object, limit: int = 80) -> str:
    """A plain value as it was written. Anything else may be a data set, or take long to print."""
    if not isinstance(value, bool | int | float | str):
        return "…"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


# Names of Ray Train's that can be imported, so that the answer comes with its remedy where they are used:
# `from everstep import X` would swallow the text of an error raised at import.


def _refuse_name(name: str, remedy: str) -> NoReturn:
    raise RefusedError(f"everstep has no {name}.", f"{remedy}.", name)


class _RefusedClass:
    _remedy = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _refuse_name(type(self).__name__, self._remedy)


class DataConfig(_RefusedClass):
    """Ray Data's; refused."""

    _remedy = _DATA


class SyncConfig(_RefusedClass):
    """Ray Tune's; refused."""

    _remedy = f"{_TUNE}: report(checkpoint=…) uploads by itself"


class BackendConfig(_RefusedClass):
    """The base class of Ray Train's backends; refused."""

    _remedy = (
        "Write a class with the methods of everstep.backend.base.Backend, and give an instance to "
        "Trainer(backend_config=…)"
    )


class TuneContext:
    """What Ray Train's ``TrainContext`` has of Ray Tune's, and refuses as well. Ours inherits it."""

    def get_metadata(self) -> NoReturn:
        _refuse_name("TrainContext.get_metadata()", "Put what you need into train_loop_config")

    def get_trial_name(self) -> NoReturn:
        _refuse_name("TrainContext.get_trial_name()", f"{_TUNE}: get_experiment_name() is the run's name")

    def get_trial_id(self) -> NoReturn:
        _refuse_name("TrainContext.get_trial_id()", f"{_TUNE}: get_experiment_name() is the run's name")

    def get_trial_resources(self) -> NoReturn:
        _refuse_name("TrainContext.get_trial_resources()", f"{_TUNE}: ScalingConfig says what a worker has")

    def get_trial_dir(self) -> NoReturn:
        _refuse_name("TrainContext.get_trial_dir()", f"{_TUNE}: get_storage() says where files are kept")
