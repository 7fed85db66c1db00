"""How a run is asked for: ``ScalingConfig``, ``RunConfig``, ``FailureConfig``, ``CheckpointConfig``,
``MemoryConfig``, ``LoggingConfig``.

Names and meanings are Ray Train v2's; what is ours comes last in each class. Every value is checked when it
is made, and frozen. Whether this machine can serve what is asked is found out in ``fit()``, by the engine.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal, NoReturn
from urllib.parse import unquote, urlsplit

from everstep.callbacks import UserCallback
from everstep.control.deadlines import Deadlines
from everstep.errors import ConfigError, RefusedAttributeError, RefusedError
from everstep.refusals import answers_unknown_arguments
from everstep.storage.uri import without_arguments
from everstep.topology.accelerators import (
    TopologyError,
    chips_in,
    generation_of,
    nearest_multiples,
    slice_shape,
)
from everstep.topology.wanted import Wanted

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_INSTEAD_OF_STRICT = {
    "STRICT_PACK": "Use 'PACK', and a label_selector that names one host with room for all.",
    "STRICT_SPREAD": "Use 'SPREAD', and resources_per_worker that leave a host no room for a second.",
}
_REMOTE_SCHEMES = ("s3", "gs", "az")
_LOG_LEVELS = ("CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING")
_LONGEST_NAME = 200  # a file name may have 255 bytes, and ours get suffixes

DEFAULT_STORAGE_PATH = "~/everstep_results"


@answers_unknown_arguments
@dataclass(frozen=True)
class ScalingConfig:
    """How many workers, and what each of them needs."""

    _: KW_ONLY
    num_workers: int | tuple[int, int] = 1
    """The number of workers; ``(min, max)`` for an elastic run; 0 runs the function in this process, for a
    debugger.
    """
    use_gpu: bool = False
    """One GPU for each worker, unless ``resources_per_worker`` says otherwise."""
    resources_per_worker: Mapping[str, float] | None = None
    """``"CPU"``, ``"GPU"``, ``"TPU"``, ``"memory"`` (bytes) or names of your cluster's own. 1 CPU by default.
    """
    placement_strategy: PlacementStrategy = "PACK"
    """``"PACK"`` fills one host after the other, ``"SPREAD"`` spreads over hosts where it can."""
    accelerator_type: str | None = None
    """The kind of accelerator that hosts must have, for example ``"TPU-V6E"``."""
    label_selector: Mapping[str, str] | list[Mapping[str, str]] | None = None
    """Labels that hosts must have: one set for all workers, or a list with one for each."""
    use_tpu: bool = False
    """Train on TPU slices; needs ``topology`` and ``accelerator_type`` with more than one worker."""
    topology: str | None = None
    """The shape of one TPU slice, for example ``"4x4"``."""
    elastic_resize_monitor_interval_s: float = 60.0
    """An elastic run grows no more often than this."""
    replica_group_size: int | None = None
    """Workers that together hold one copy of the model, and need nobody else to train: when some such groups
    fail, only they are replaced. ``None``: all of them are one.
    """
    slice_label: str | None = None
    """The host label whose value says which hosts make one slice (an NVLink domain, for example)."""
    hosts_per_slice: int | None = None
    """How many hosts a slice of ``slice_label`` has. ``None``: as many as live; a lost one isn't missed."""

    def __post_init__(self) -> None:
        _check_num_workers(self.num_workers)
        _require_bool("ScalingConfig.use_gpu", self.use_gpu)
        _require_bool("ScalingConfig.use_tpu", self.use_tpu)
        _check_resources(self)
        _require_choice("ScalingConfig.placement_strategy", self.placement_strategy, _STRATEGIES)
        _require_text("ScalingConfig.accelerator_type", self.accelerator_type)
        _require_text("ScalingConfig.slice_label", self.slice_label)
        _check_label_selector(self)
        _check_tpu(self)
        _check_slice_label(self)
        _require_seconds(
            "ScalingConfig.elastic_resize_monitor_interval_s", self.elastic_resize_monitor_interval_s
        )
        _check_replica_group_size(self)
        _refuse_what_no_engine_serves_yet(self)

    @property
    def elasticity_enabled(self) -> bool:
        """Whether ``num_workers`` is a range."""
        return isinstance(self.num_workers, tuple)

    @property
    def min_workers(self) -> int:
        """The fewest workers to train with."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The most workers to train with."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def worker_resources(self) -> dict[str, float]:
        """What one worker needs, defaults filled in and zeros left out."""
        if self.resources_per_worker is None:
            if self.use_tpu:
                return {"TPU": self._tpus_by_default}
            return {"GPU": 1} if self.use_gpu else {"CPU": 1}
        asked = {name: amount for name, amount in self.resources_per_worker.items() if amount != 0}
        if self.use_gpu:
            asked.setdefault("GPU", 1)
        if self.use_tpu:
            asked.setdefault("TPU", self._tpus_by_default)
        return asked

    @property
    def _tpus_by_default(self) -> int:
        """One worker for each TPU host, where it is known what a host has."""
        if self.topology is None or self.accelerator_type is None:
            return 1
        return slice_shape(self.accelerator_type, self.topology).chips_per_host

    @property
    def workers_per_slice(self) -> int | None:
        """Of a TPU slice; ``None`` where slices have no known shape."""
        if not self.use_tpu or self.topology is None or self.accelerator_type is None:
            return None
        return slice_shape(self.accelerator_type, self.topology).workers(self.num_tpus_per_worker)

    @property
    def wanted(self) -> Wanted:
        """What is asked of a cluster's hosts."""
        selector = self.label_selector
        return Wanted(
            self.worker_resources,
            self.topology,
            self.accelerator_type,
            self.slice_label,
            dict(selector[0] if isinstance(selector, list) and selector else selector or {}),  # type: ignore[arg-type]
            self.hosts_per_slice,
            self.max_workers,
        )

    @property
    def total_resources(self) -> dict[str, float]:
        """What all workers need together; of an elastic run, at its largest."""
        return {name: amount * self.max_workers for name, amount in self.worker_resources.items()}

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs of one worker."""
        return self.worker_resources.get("CPU", 0)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs of one worker."""
        return self.worker_resources.get("GPU", 0)

    @property
    def num_tpus_per_worker(self) -> float:
        """TPU chips of one worker."""
        return self.worker_resources.get("TPU", 0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """What one worker needs besides CPUs and GPUs."""
        return {name: amount for name, amount in self.worker_resources.items() if name not in ("CPU", "GPU")}

    def as_placement_group_factory(self) -> None:
        """Ray Tune's; refused."""
        raise _no_tune("ScalingConfig.as_placement_group_factory")

    @classmethod
    def from_placement_group_factory(cls, pgf: object) -> None:
        """Ray Tune's; refused."""
        raise _no_tune("ScalingConfig.from_placement_group_factory")


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
        limits = (
            "max_failures",
            "controller_failure_limit",
            "max_preemption_failures",
            "max_replica_failures",
        )
        for name in limits:
            value = getattr(self, name)
            if name == "max_replica_failures" and value is None:
                continue
            if not _is_int(value) or value < -1:
                raise _bad(
                    f"FailureConfig.{name}",
                    value,
                    "an int of at least -1",
                    "Use -1 for no limit, 0 to fail at the first",
                )
        _require_choice("FailureConfig.on_hang", self.on_hang, ("restart", "warn", "fail"))


@answers_unknown_arguments
@dataclass(frozen=True)
class MemoryConfig:
    """Snapshots in the hosts' memory, of a state that is reported (``report(…, state=…)``)."""

    _: KW_ONLY
    every_s: float | None = None
    """Seconds between snapshots; 0: one with every report. ``None``: as often as keeps the time that training
    waits for them under 2% of all.
    """
    host_fraction: float = 0.5
    """At most this part of a host's memory, or of its container's limit, for the snapshots of all its
    workers.
    """

    def __post_init__(self) -> None:
        if self.every_s is not None:
            _require_seconds("MemoryConfig.every_s", self.every_s)
        if not _is_number(self.host_fraction) or not 0 < self.host_fraction <= 1:
            raise _bad(
                "MemoryConfig.host_fraction",
                self.host_fraction,
                "a number above 0, up to 1",
                "Use 0.5 for half of each host's memory, or CheckpointConfig(memory=None) for no snapshots",
            )


@answers_unknown_arguments
@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are kept. The newest always is."""

    num_to_keep: int | None = None
    """How many to keep, the best or the newest; ``None`` keeps all. The newest is kept beside the best."""
    checkpoint_score_attribute: str | None = None
    """The metric to keep the best by, in nested metrics ``"eval/loss"``; ``None`` keeps the newest. NaN
    scores worst.
    """
    checkpoint_score_order: Literal["max", "min"] = "max"
    """Whether a high score is good, or a low one."""
    delete_external: bool = False
    """Whether retention also removes the files of checkpoints that Everstep did not upload (``NO_UPLOAD``,
    ``checkpoint_upload_fn``). Otherwise it only stops listing them.
    """
    storage_every_s: float = 600.0
    """How often a state that is reported (``report(…, state=…)``) is written to storage, in seconds. It is
    also written when the training function returns, before workers are moved or stopped, and when a machine
    is about to be taken away.
    """
    memory: MemoryConfig | None = field(default_factory=MemoryConfig)
    """Snapshots of such a state in the hosts' memory, from which workers restart without reading storage.
    ``None``: storage alone.
    """

    def __post_init__(self) -> None:
        if self.memory is not None and not isinstance(self.memory, MemoryConfig):
            raise _bad(
                "CheckpointConfig.memory",
                self.memory,
                "None or an everstep MemoryConfig",
                "Make it with everstep.MemoryConfig(…)",
            )
        if not isinstance(self.delete_external, bool):
            raise _bad(
                "CheckpointConfig.delete_external", self.delete_external, "True or False", "Use a bool"
            )
        if self.num_to_keep is not None and (not _is_int(self.num_to_keep) or self.num_to_keep < 1):
            raise _bad(
                "CheckpointConfig.num_to_keep",
                self.num_to_keep,
                "None or an int of at least 1",
                "Use None to keep all",
            )
        if not _is_number(self.storage_every_s) or not self.storage_every_s > 0:
            raise _bad(
                "CheckpointConfig.storage_every_s",
                self.storage_every_s,
                "seconds, more than 0",
                "Use 600 for every ten minutes",
            )
        _require_text("CheckpointConfig.checkpoint_score_attribute", self.checkpoint_score_attribute)
        _require_choice(
            "CheckpointConfig.checkpoint_score_order", self.checkpoint_score_order, ("max", "min")
        )


@answers_unknown_arguments
@dataclass(frozen=True)
class LoggingConfig:
    """How much the logger ``everstep`` says."""

    log_level: str = "INFO"
    """A level of ``logging``, by its name."""

    def __post_init__(self) -> None:
        level = self.log_level.upper() if isinstance(self.log_level, str) else self.log_level
        _require_choice("LoggingConfig.log_level", level, _LOG_LEVELS)
        _set(self, "log_level", level)

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

    def __post_init__(self) -> None:
        _check_name(self.name)
        path, options = without_arguments(_absolute_storage_path(self.storage_path))
        _set(self, "storage_path", path.rstrip("/") if "://" in path else path)
        _default_or_instance(self, "failure_config", FailureConfig)
        _default_or_instance(self, "checkpoint_config", CheckpointConfig)
        _default_or_instance(self, "logging_config", LoggingConfig)
        _default_or_instance(self, "deadlines", Deadlines)
        _set(self, "callbacks", _checked_callbacks(self.callbacks))
        _set(self, "worker_runtime_env", _checked_runtime_env(self.worker_runtime_env))
        _set(self, "deadlines", override_from_environment(self.deadlines, os.environ))
        _set(self, "log_ranks", _checked_log_ranks(self.log_ranks))
        given = _checked_storage_options(self.storage_options)
        _set(self, "storage_options", {**options, **given} if given else options or given)
        if self.if_finished is not None:
            _require_choice("RunConfig.if_finished", self.if_finished, ("return", "continue"))
        _require_seconds("RunConfig.lease_ttl_s", self.lease_ttl_s)
        if self.lease_ttl_s == 0:
            raise _bad("RunConfig.lease_ttl_s", 0, "a number of seconds above 0", "Leave it out for 15")

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
            raise _bad(
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


def _refuse_what_no_engine_serves_yet(scaling: ScalingConfig) -> None:
    """What comes with later releases is refused here until then."""
    strategy = scaling.placement_strategy
    if strategy in _INSTEAD_OF_STRICT:
        raise RefusedError(
            f"ScalingConfig(placement_strategy={strategy!r}) is refused: what serves it comes with a later "
            "release.",
            _INSTEAD_OF_STRICT[strategy],
            "ScalingConfig.placement_strategy",
        )


def _check_num_workers(num_workers: object) -> None:
    name = "ScalingConfig.num_workers"
    if isinstance(num_workers, tuple):
        if len(num_workers) != 2 or not all(_is_int(count) for count in num_workers):
            raise _bad(name, num_workers, "(min, max), two ints", "Write num_workers=(2, 8), for example")
        least, most = num_workers
        if least > most:
            raise _bad(name, num_workers, "min not above max", f"Write num_workers=({most}, {least})")
        if least < 1:
            raise _bad(name, num_workers, "a min of at least 1", f"Write num_workers=(1, {max(most, 1)})")
    elif not _is_int(num_workers):
        remedy = (
            "Write it as a tuple" if isinstance(num_workers, list) else "Write num_workers=4, for example"
        )
        raise _bad(name, num_workers, "an int, or a tuple (min, max)", remedy)
    elif isinstance(num_workers, int) and num_workers < 0:
        raise _bad(
            name, num_workers, "at least 0", "Use 0 to run in this process, 1 or more for worker processes"
        )


def _check_resources(scaling: ScalingConfig) -> None:
    name = "ScalingConfig.resources_per_worker"
    asked = scaling.resources_per_worker
    if asked is not None:
        if not isinstance(asked, Mapping):
            raise _bad(name, asked, "a dict of resource names and amounts", "Write {'CPU': 2}, for example")
        for resource, amount in asked.items():
            if not isinstance(resource, str) or not resource:
                raise _bad(name, resource, "resource names as keys", "Write {'CPU': 2}, for example")
            for known in ("CPU", "GPU", "TPU", "memory"):
                if resource != known and resource.lower() == known.lower():
                    raise _bad(
                        f"{name}[{resource!r}]",
                        amount,
                        f"the key {known!r}",
                        f"Write {known!r}: case matters",
                    )
            if not _is_number(amount) or not 0 <= amount < math.inf:
                raise _bad(
                    f"{name}[{resource!r}]", amount, "a number of at least 0", "Leave the key out for none"
                )
        _set(scaling, "resources_per_worker", dict(asked))
    for resource, flag in (("GPU", "use_gpu"), ("TPU", "use_tpu")):
        wanted = getattr(scaling, flag)
        given = (asked or {}).get(resource)
        if not wanted and given:
            raise _bad(
                f"{name}[{resource!r}]",
                given,
                f"none without {flag}",
                f"Set {flag}=True, or leave {resource!r} out",
            )
        if wanted and given == 0:
            raise _bad(
                f"{name}[{resource!r}]", given, f"above 0 with {flag}", f"Set {flag}=False, or leave it out"
            )


def _check_label_selector(scaling: ScalingConfig) -> None:
    name, selector = "ScalingConfig.label_selector", scaling.label_selector
    if selector is None:
        return
    for labels in selector if isinstance(selector, list) else [selector]:
        if not isinstance(labels, Mapping) or not all(
            isinstance(text, str) for pair in labels.items() for text in pair
        ):
            raise _bad(
                name, selector, "a dict of strings, or a list of them", "Write {'zone': 'a'}, for example"
            )
    if isinstance(selector, list):
        if len(selector) != scaling.max_workers:
            raise _bad(
                name,
                selector,
                f"one dict for each of {scaling.max_workers} workers",
                "Give one dict for all workers, or a list of that length",
            )
        if any(labels != selector[0] for labels in selector):
            raise RefusedError(
                f"{name} differs between workers, and is refused: ranks follow the slices that they are in.",
                "Give one dict for all workers.",
                name,
            )


def _check_tpu(scaling: ScalingConfig) -> None:
    if scaling.topology is not None and not scaling.use_tpu:
        raise _bad(
            "ScalingConfig.topology",
            scaling.topology,
            "none without use_tpu",
            "Set use_tpu=True, or leave it out",
        )
    if not scaling.use_tpu:
        return
    if scaling.use_gpu:
        raise _bad("ScalingConfig.use_tpu", True, "only one of use_gpu and use_tpu", "Leave one of them out")
    if scaling.max_workers > 1:
        for name in ("topology", "accelerator_type"):
            if not getattr(scaling, name):
                raise _bad(
                    f"ScalingConfig.{name}",
                    None,
                    f"{name} with use_tpu and more than one worker",
                    f"Give {name} as well",
                )
        if scaling.label_selector:
            raise _bad(
                "ScalingConfig.label_selector",
                scaling.label_selector,
                "none with use_tpu",
                "Leave it out: slices are chosen by topology",
            )
    try:
        if scaling.topology is not None:
            chips_in(scaling.topology)
        if scaling.accelerator_type is not None:
            generation_of(scaling.accelerator_type)
        per_slice = scaling.workers_per_slice
    except TopologyError as error:
        raise _bad(f"ScalingConfig.{error.field}", error.seen, error.expected, error.remedy) from error
    if per_slice is not None:
        _check_whole_slices(scaling, per_slice)


def _check_whole_slices(scaling: ScalingConfig, per_slice: int) -> None:
    counts = scaling.num_workers if isinstance(scaling.num_workers, tuple) else (scaling.num_workers,)
    if not any(count % per_slice for count in counts):
        return
    choices: list[Any]
    if len(counts) == 2:
        # The nearest whole numbers of slices, of which the larger must not be below the smaller.
        choices = [
            (low, high)
            for low in nearest_multiples(counts[0], per_slice)
            for high in nearest_multiples(counts[1], per_slice)
            if low <= high
        ]
    else:
        choices = nearest_multiples(counts[0], per_slice)
    chips = scaling.num_tpus_per_worker
    raise _bad(
        "ScalingConfig.num_workers",
        scaling.num_workers,
        f"whole slices of {per_slice} workers (a {scaling.topology} with {chips:g} chips a worker)",
        f"Use {' or '.join(f'num_workers={choice}' for choice in choices)}",
    )


def _check_slice_label(scaling: ScalingConfig) -> None:
    if scaling.slice_label is not None and scaling.use_tpu:
        raise _bad(
            "ScalingConfig.slice_label",
            scaling.slice_label,
            "none with use_tpu",
            "Leave it out: TPU slices are known by their own labels",
        )
    hosts = scaling.hosts_per_slice
    if hosts is None:
        return
    if not _is_int(hosts) or hosts < 1:
        raise _bad("ScalingConfig.hosts_per_slice", hosts, "an int of at least 1", "Leave it out")
    if scaling.slice_label is None:
        raise _bad(
            "ScalingConfig.hosts_per_slice", hosts, "none without slice_label", "Give slice_label as well"
        )


def _check_replica_group_size(scaling: ScalingConfig) -> None:
    name, size = "ScalingConfig.replica_group_size", scaling.replica_group_size
    if size is None:
        return
    if not _is_int(size) or size < 1:
        raise _bad(name, size, "None or an int of at least 1", "Leave it out for one group of all workers")
    for count in {scaling.min_workers, scaling.max_workers}:
        if count % size:
            raise _bad(name, size, f"a divisor of num_workers ({count})", "Make num_workers a multiple of it")


def _check_name(name: object) -> None:
    if name is None:
        return
    remedy = "Use letters, digits, dots, dashes and underscores, or leave it out to get one"
    if not isinstance(name, str):
        raise _bad("RunConfig.name", name, "a string", remedy)
    if "/" in name or "\\" in name:
        raise _bad(
            "RunConfig.name",
            name,
            "a name without slashes",
            "Put the folder into storage_path, and the last part here",
        )
    if not name or name in (".", "..") or name != name.strip() or not name.isprintable():
        raise _bad("RunConfig.name", name, "printable text without spaces around it", remedy)
    if len(name.encode()) > _LONGEST_NAME:
        raise _bad("RunConfig.name", name, f"at most {_LONGEST_NAME} bytes", remedy)


def _absolute_storage_path(path: object) -> str:
    field_name = "RunConfig.storage_path"
    if path is None:
        path = DEFAULT_STORAGE_PATH
    if not isinstance(path, (str, os.PathLike)):
        raise _bad(field_name, path, "a folder", "Write storage_path='/data/runs', for example")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise _bad(field_name, path, "a folder", "Write storage_path='/data/runs', for example")
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise _bad(
                field_name,
                text,
                "file:// and an absolute path",
                "Write file:///data/runs, with three slashes",
            )
        return os.path.abspath(unquote(parts.path))
    if parts.scheme in _REMOTE_SCHEMES:
        if not parts.netloc:
            raise _bad(field_name, text, "a bucket after the slashes", f"Write {parts.scheme}://bucket/runs")
        return text.rstrip("/")
    raise _bad(
        field_name,
        text,
        "a folder, or file://, s3://, gs:// or az://",
        "Use a folder, or mount that store as one",
    )


def _checked_storage_options(options: object) -> dict[str, str] | None:
    name = "RunConfig.storage_options"
    remedy = "Write storage_options={'aws_region': 'eu-west-1'}, for example"
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise _bad(name, type(options).__name__, "a dict of strings", remedy)
    given = {
        key: ("true" if value else "false") if isinstance(value, bool) else value
        for key, value in options.items()
    }
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, str):
            # The value isn't shown: it may be a secret.
            raise _bad(f"{name}[{key!r}]", type(value).__name__, "a string", remedy)
    return given


def _checked_callbacks(callbacks: object) -> tuple[UserCallback, ...]:
    name = "RunConfig.callbacks"
    remedy = "Give instances of your subclass of everstep.UserCallback, in a list"
    if callbacks is None:
        return ()
    if isinstance(callbacks, (str, bytes)) or not isinstance(callbacks, Iterable):
        raise _bad(name, callbacks, "a list of UserCallback", remedy)
    given = tuple(callbacks)
    for callback in given:
        if not isinstance(callback, UserCallback):
            raise _bad(name, callback, "a list of UserCallback", remedy)
    return given


def _checked_runtime_env(runtime_env: object) -> dict[str, Any]:
    name = "RunConfig.worker_runtime_env"
    if runtime_env is None:
        return {}
    if not isinstance(runtime_env, Mapping):
        raise _bad(name, runtime_env, "a dict", "Write {'env_vars': {'KEY': 'value'}}, for example")
    served = {key: value for key, value in runtime_env.items() if value is not None}
    env_vars = served.get("env_vars", {})
    if not isinstance(env_vars, Mapping):
        raise _bad(
            f"{name}['env_vars']", env_vars, "a dict of strings", "Write {'KEY': 'value'}, for example"
        )
    for key, value in env_vars.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise _bad(
                f"{name}['env_vars']",
                key,
                "names of variables as keys",
                "Write {'KEY': 'value'}, for example",
            )
        if not isinstance(value, str) or "\0" in value:
            raise _bad(f"{name}['env_vars'][{key!r}]", value, "a string", f"Write {str(value)!r}, in quotes")
    if "env_vars" in served:
        served["env_vars"] = dict(env_vars)
    if "working_dir" in served:
        served["working_dir"] = _checked_working_dir(f"{name}['working_dir']", served["working_dir"])
    return served


def _checked_working_dir(name: str, folder: object) -> str:
    if not isinstance(folder, (str, os.PathLike)):
        raise _bad(name, folder, "a folder", "Give the path of a folder on this machine")
    if "://" in os.fspath(folder):
        return os.fspath(folder)  # an archive, which Ray fetches
    path = os.path.abspath(os.path.expanduser(os.fspath(folder)))
    if not os.path.isdir(path):
        raise _bad(name, folder, "a folder that exists", "Make it first, or leave it out to stay in this one")
    return str(path)


def _checked_log_ranks(ranks: object) -> tuple[int, ...]:
    name, remedy = "RunConfig.log_ranks", "Write log_ranks=(0, 1), for example, or () for none"
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise _bad(name, ranks, "a tuple of ranks", remedy)
    given = tuple(ranks)
    for rank in given:
        if not _is_int(rank) or rank < 0:
            raise _bad(name, rank, "ranks of at least 0", remedy)
    return given


def _default_or_instance(config: RunConfig, name: str, kind: type) -> None:
    value = getattr(config, name)
    if value is None:
        _set(config, name, kind())
    elif not isinstance(value, kind):
        raise _bad(
            f"RunConfig.{name}",
            value,
            f"an everstep {kind.__name__}",
            f"Make it with everstep.{kind.__name__}(…)"
            if kind is not Deadlines
            else "Make it with everstep.Deadlines(…)",
        )


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _bad(name, value, "True or False", "Write it without quotes")


def _require_text(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise _bad(name, value, "None or some text", "Leave it out for none")


def _require_seconds(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise _bad(name, value, "a number of seconds, at least 0", "Leave it out for the default")


def _require_choice(name: str, value: object, choices: Collection[str]) -> None:
    if isinstance(value, str) and value in choices:
        return
    close = difflib.get_close_matches(str(value).upper(), [choice.upper() for choice in choices], n=1)
    meant = next((choice for choice in choices if close and choice.upper() == close[0]), None)
    listed = ", ".join(map(repr, choices))
    raise _bad(name, value, f"one of {listed}", f"Did you mean {meant!r}" if meant else "Pick one of these")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _set(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)  # frozen for everyone else; here it is still being made


def _no_tune(name: str) -> RefusedError:
    return RefusedError(
        f"{name} is refused.", "It belongs to Ray Tune: use ScalingConfig.total_resources.", name
    )


def _bad(name: str, seen: object, expected: str, remedy: str) -> ConfigError:
    text = repr(seen)
    text = text if len(text) <= 120 else f"{text[:119]}…"
    ending = "?" if remedy.startswith("Did you mean") else "."
    return ConfigError(f"{name} is {text}, expected {expected}.", f"{remedy}{ending}", name)
