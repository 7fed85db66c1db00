"""Where a run lives, what it is called, and how it deals with what happens to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal, NoReturn
from urllib.parse import unquote, urlsplit

from everstep.callbacks import UserCallback
from everstep.config.checkpoints import CheckpointConfig
from everstep.config.failures import FailureConfig
from everstep.config.values import bad, is_int, put, require_choice, require_seconds
from everstep.deadlines import Deadlines
from everstep.errors import ConfigError, RefusedAttributeError
from everstep.refusals import answers_unknown_arguments
from everstep.storage.schemes import BUCKETS, any_bucket
from everstep.storage.uri import without_arguments

_LOG_LEVELS = ("CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING")
_LAST_PORT = 65535
_LONGEST_NAME = 200  # a file name may have 255 bytes, and ours get suffixes

DEFAULT_STORAGE_PATH = "~/everstep_results"


@answers_unknown_arguments
@dataclass(frozen=True)
class LoggingConfig:
    """How much the logger ``everstep`` says."""

    log_level: str = "INFO"
    """A level of ``logging``, by its name."""

    def __post_init__(self) -> None:
        level = self.log_level.upper() if isinstance(self.log_level, str) else self.log_level
        require_choice("LoggingConfig.log_level", level, _LOG_LEVELS)
        put(self, "log_level", level)

    @property
    def level(self) -> int:
        """The same as ``logging``'s number."""
        return logging.getLevelNamesMapping()[self.log_level]


@answers_unknown_arguments
@dataclass(frozen=True)
class RunConfig:
    """Where a run lives, what it is called, and how it deals with what happens to it."""

    name: str | None = None
    """The run's name; the same ``(storage_path, name)`` again resumes it. ``None``: each ``fit()`` makes up
    its own.
    """
    storage_path: str = DEFAULT_STORAGE_PATH
    """The folder under which runs keep what they have, or ``s3://bucket/prefix``, ``gs://…``, ``az://…``,
    ``file://…``. ``~/everstep_results`` by default. A folder is made absolute here.
    """
    _: KW_ONLY
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    """How many recoveries are allowed. By default none: set ``max_failures``."""
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Which checkpoints are kept."""
    callbacks: tuple[UserCallback, ...] = ()
    """Any iterable of ``UserCallback``; they run in the driver's process."""
    worker_runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """``env_vars`` and ``working_dir`` for the workers; on Ray all that a runtime environment can have."""
    logging_config: LoggingConfig = field(default_factory=LoggingConfig)
    """How much is logged."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Every time limit. A variable ``EVERSTEP_<NAME>`` in the environment overrides the limit of that name.
    """
    log_ranks: tuple[int, ...] = (0,)
    """The ranks whose output reaches the terminal. All ranks' goes to files."""
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    """Settings of a remote store, by the names that its environment variables have: ``aws_region``,
    ``aws_endpoint``, ``google_service_account``, ``azure_storage_account_name``, ``allow_http``, … They win
    over the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``). Kept in memory only: workers get them from
    the driver.
    """
    if_finished: Literal["return", "continue"] | None = None
    """What a name whose run has finished does: give its result again, or train on from its newest checkpoint.
    """
    lease_ttl_s: float = 15.0
    """How long a driver that went silent still counts as the run's owner."""
    metrics_port: int | None = None
    """The driver serves the run's metrics for Prometheus on this port, at ``/metrics``; 0 takes any that is
    free. ``None``: it doesn't. ``EVERSTEP_METRICS_PORT`` overrides it.
    """
    metrics_host: str = "127.0.0.1"
    """The address of this machine that ``metrics_port`` is of; ``0.0.0.0`` is all of them.
    ``EVERSTEP_METRICS_HOST`` overrides it.
    """

    def __post_init__(self) -> None:
        _check_name(self.name)
        path, options = without_arguments(_absolute_storage_path(self.storage_path))
        put(self, "storage_path", path.rstrip("/") if "://" in path else path)
        _default_or_instance(self, "failure_config", FailureConfig)
        _default_or_instance(self, "checkpoint_config", CheckpointConfig)
        _default_or_instance(self, "logging_config", LoggingConfig)
        _default_or_instance(self, "deadlines", Deadlines)
        put(self, "callbacks", _checked_callbacks(self.callbacks))
        put(self, "worker_runtime_env", _checked_runtime_env(self.worker_runtime_env))
        put(self, "deadlines", override_from_environment(self.deadlines, os.environ))
        put(self, "log_ranks", _checked_log_ranks(self.log_ranks))
        given = _checked_storage_options(self.storage_options)
        put(self, "storage_options", {**options, **given} if given else options or given)
        if self.if_finished is not None:
            require_choice("RunConfig.if_finished", self.if_finished, ("return", "continue"))
        require_seconds("RunConfig.lease_ttl_s", self.lease_ttl_s)
        if self.lease_ttl_s == 0:
            raise bad("RunConfig.lease_ttl_s", 0, "a number of seconds above 0", "Leave it out for 15")
        put(self, "metrics_port", _checked_port(self.metrics_port, os.environ))
        put(self, "metrics_host", _checked_host(self.metrics_host, os.environ))

    @property
    def storage_context(self) -> NoReturn:
        """Ray Train's; refused."""
        raise RefusedAttributeError(
            "RunConfig.storage_context is refused.",
            "Use RunConfig.storage_path, and Result.path after fit().",
        )


def override_from_environment(deadlines: Deadlines, environment: Mapping[str, str]) -> Deadlines:
    """``deadlines`` with every ``EVERSTEP_<NAME>`` of the environment put in."""
    overrides: dict[str, float] = {}
    for limit in fields(deadlines):
        variable = f"EVERSTEP_{limit.name.upper()}"
        text = environment.get(variable)
        if text is None:
            continue
        try:
            overrides[limit.name] = int(text) if isinstance(limit.default, int) else float(text)
        except ValueError:
            raise bad(
                variable, text, "a number", f"Unset it, or set it to a number, for example {limit.default}"
            ) from None
    if not overrides:
        return deadlines
    try:
        return replace(deadlines, **overrides)  # type: ignore[arg-type]  # set_aside_after is an int: see above
    except ValueError as error:
        variables = ", ".join(f"EVERSTEP_{name.upper()}" for name in overrides)
        raise ConfigError(
            f"{error}.", f"Set by the environment: {variables}.", "RunConfig.deadlines"
        ) from error


def _check_name(name: object) -> None:
    if name is None:
        return
    remedy = "Use letters, digits, dots, dashes and underscores, or leave it out to get one"
    if not isinstance(name, str):
        raise bad("RunConfig.name", name, "a string", remedy)
    if "/" in name or "\\" in name:
        raise bad(
            "RunConfig.name",
            name,
            "a name without slashes",
            "Put the folder into storage_path, and the last part here",
        )
    if not name or name in (".", "..") or name != name.strip() or not name.isprintable():
        raise bad("RunConfig.name", name, "printable text without spaces around it", remedy)
    if len(name.encode()) > _LONGEST_NAME:
        raise bad("RunConfig.name", name, f"at most {_LONGEST_NAME} bytes", remedy)


def _absolute_storage_path(path: object) -> str:
    field_name = "RunConfig.storage_path"
    if path is None:
        path = DEFAULT_STORAGE_PATH
    if not isinstance(path, (str, os.PathLike)):
        raise bad(field_name, path, "a folder", "Write storage_path='/data/runs', for example")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise bad(field_name, path, "a folder", "Write storage_path='/data/runs', for example")
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise bad(
                field_name,
                text,
                "file:// and an absolute path",
                "Write file:///data/runs, with three slashes",
            )
        return os.path.abspath(unquote(parts.path))
    if parts.scheme in BUCKETS:
        if not parts.netloc:
            raise bad(field_name, text, "a bucket after the slashes", f"Write {parts.scheme}://bucket/runs")
        return text.rstrip("/")
    raise bad(
        field_name,
        text,
        f"a folder, or file://, {any_bucket()}",
        "Use a folder, or mount that store as one",
    )


def _checked_storage_options(options: object) -> dict[str, str] | None:
    name = "RunConfig.storage_options"
    remedy = "Write storage_options={'aws_region': 'eu-west-1'}, for example"
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise bad(name, type(options).__name__, "a dict of strings", remedy)
    given = {
        key: ("true" if value else "false") if isinstance(value, bool) else value
        for key, value in options.items()
    }
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, str):
            # The value isn't shown: it may be a secret.
            raise bad(f"{name}[{key!r}]", type(value).__name__, "a string", remedy)
    return given


def _checked_callbacks(callbacks: object) -> tuple[UserCallback, ...]:
    name = "RunConfig.callbacks"
    remedy = "Give instances of your subclass of everstep.UserCallback, in a list"
    if callbacks is None:
        return ()
    if isinstance(callbacks, (str, bytes)) or not isinstance(callbacks, Iterable):
        raise bad(name, callbacks, "a list of UserCallback", remedy)
    given = tuple(callbacks)
    for callback in given:
        if not isinstance(callback, UserCallback):
            raise bad(name, callback, "a list of UserCallback", remedy)
    return given


def _checked_runtime_env(runtime_env: object) -> dict[str, Any]:
    name = "RunConfig.worker_runtime_env"
    if runtime_env is None:
        return {}
    if not isinstance(runtime_env, Mapping):
        raise bad(name, runtime_env, "a dict", "Write {'env_vars': {'KEY': 'value'}}, for example")
    served = {key: value for key, value in runtime_env.items() if value is not None}
    env_vars = served.get("env_vars", {})
    if not isinstance(env_vars, Mapping):
        raise bad(f"{name}['env_vars']", env_vars, "a dict of strings", "Write {'KEY': 'value'}, for example")
    for key, value in env_vars.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise bad(
                f"{name}['env_vars']",
                key,
                "names of variables as keys",
                "Write {'KEY': 'value'}, for example",
            )
        if not isinstance(value, str) or "\0" in value:
            raise bad(f"{name}['env_vars'][{key!r}]", value, "a string", f"Write {str(value)!r}, in quotes")
    if "env_vars" in served:
        served["env_vars"] = dict(env_vars)
    if "working_dir" in served:
        served["working_dir"] = _checked_working_dir(f"{name}['working_dir']", served["working_dir"])
    return served


def _checked_working_dir(name: str, folder: object) -> str:
    if not isinstance(folder, (str, os.PathLike)):
        raise bad(name, folder, "a folder", "Give the path of a folder on this machine")
    if "://" in os.fspath(folder):
        return os.fspath(folder)  # an archive, which Ray fetches
    path = os.path.abspath(os.path.expanduser(os.fspath(folder)))
    if not os.path.isdir(path):
        raise bad(name, folder, "a folder that exists", "Make it first, or leave it out to stay in this one")
    return str(path)


def _checked_log_ranks(ranks: object) -> tuple[int, ...]:
    name, remedy = "RunConfig.log_ranks", "Write log_ranks=(0, 1), for example, or () for none"
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise bad(name, ranks, "a tuple of ranks", remedy)
    given = tuple(ranks)
    for rank in given:
        if not is_int(rank) or rank < 0:
            raise bad(name, rank, "ranks of at least 0", remedy)
    return given


def _checked_port(port: object, environment: Mapping[str, str]) -> int | None:
    name, given = "RunConfig.metrics_port", port
    if (text := environment.get("EVERSTEP_METRICS_PORT")) is not None:
        name, port = "EVERSTEP_METRICS_PORT", int(text) if text.isdecimal() and text.isascii() else text
        given = text
    if port is None:
        return None
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= _LAST_PORT:
        raise bad(
            name, given, f"a port, 0 to {_LAST_PORT}", "Give 0 for any that is free, none to serve none"
        )
    return port


def _checked_host(host: object, environment: Mapping[str, str]) -> str:
    name = "RunConfig.metrics_host"
    if "EVERSTEP_METRICS_HOST" in environment:
        name, host = "EVERSTEP_METRICS_HOST", environment["EVERSTEP_METRICS_HOST"]
    if not isinstance(host, str) or not host or host != host.strip():
        raise bad(
            name,
            host,
            "an address of this machine",
            "Leave it out for 127.0.0.1, which is this machine alone",
        )
    return host


def _default_or_instance(config: RunConfig, name: str, kind: type) -> None:
    value = getattr(config, name)
    if value is None:
        put(config, name, kind())
    elif not isinstance(value, kind):
        raise bad(
            f"RunConfig.{name}",
            value,
            f"an everstep {kind.__name__}",
            f"Make it with everstep.{kind.__name__}(…)",
        )
