"""How many workers, and what each of them needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from everstep.config.values import (
    bad,
    is_int,
    is_number,
    put,
    require_bool,
    require_choice,
    require_seconds,
    require_text,
)
from everstep.errors import RefusedError
from everstep.refusals import answers_unknown_arguments
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
    """Workers that together hold one copy of the model, and need no other workers to train: when some such
    groups fail, only they are replaced. ``None``: all of them are one.
    """
    slice_label: str | None = None
    """The host label whose value says which hosts make one slice (an NVLink domain, for example)."""
    hosts_per_slice: int | None = None
    """How many hosts a slice of ``slice_label`` has. ``None``: as many as live; a lost one isn't missed."""

    def __post_init__(self) -> None:
        _check_num_workers(self.num_workers)
        require_bool("ScalingConfig.use_gpu", self.use_gpu)
        require_bool("ScalingConfig.use_tpu", self.use_tpu)
        _check_resources(self)
        require_choice("ScalingConfig.placement_strategy", self.placement_strategy, _STRATEGIES)
        require_text("ScalingConfig.accelerator_type", self.accelerator_type)
        require_text("ScalingConfig.slice_label", self.slice_label)
        _check_label_selector(self)
        _check_tpu(self)
        _check_slice_label(self)
        require_seconds(
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
        if len(num_workers) != 2 or not all(is_int(count) for count in num_workers):
            raise bad(name, num_workers, "(min, max), two ints", "Write num_workers=(2, 8), for example")
        least, most = num_workers
        if least > most:
            raise bad(name, num_workers, "min not above max", f"Write num_workers=({most}, {least})")
        if least < 1:
            raise bad(name, num_workers, "a min of at least 1", f"Write num_workers=(1, {max(most, 1)})")
    elif not is_int(num_workers):
        remedy = (
            "Write it as a tuple" if isinstance(num_workers, list) else "Write num_workers=4, for example"
        )
        raise bad(name, num_workers, "an int, or a tuple (min, max)", remedy)
    elif isinstance(num_workers, int) and num_workers < 0:
        raise bad(
            name, num_workers, "at least 0", "Use 0 to run in this process, 1 or more for worker processes"
        )


def _check_resources(scaling: ScalingConfig) -> None:
    name = "ScalingConfig.resources_per_worker"
    asked = scaling.resources_per_worker
    if asked is not None:
        if not isinstance(asked, Mapping):
            raise bad(name, asked, "a dict of resource names and amounts", "Write {'CPU': 2}, for example")
        for resource, amount in asked.items():
            if not isinstance(resource, str) or not resource:
                raise bad(name, resource, "resource names as keys", "Write {'CPU': 2}, for example")
            for known in ("CPU", "GPU", "TPU", "memory"):
                if resource != known and resource.lower() == known.lower():
                    raise bad(
                        f"{name}[{resource!r}]",
                        amount,
                        f"the key {known!r}",
                        f"Write {known!r}: case matters",
                    )
            if not is_number(amount) or not 0 <= amount < math.inf:
                raise bad(
                    f"{name}[{resource!r}]", amount, "a number of at least 0", "Leave the key out for none"
                )
        put(scaling, "resources_per_worker", dict(asked))
    for resource, flag in (("GPU", "use_gpu"), ("TPU", "use_tpu")):
        wanted = getattr(scaling, flag)
        given = (asked or {}).get(resource)
        if not wanted and given:
            raise bad(
                f"{name}[{resource!r}]",
                given,
                f"none without {flag}",
                f"Set {flag}=True, or leave {resource!r} out",
            )
        if wanted and given == 0:
            raise bad(
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
            raise bad(
                name, selector, "a dict of strings, or a list of them", "Write {'zone': 'a'}, for example"
            )
    if isinstance(selector, list):
        if len(selector) != scaling.max_workers:
            raise bad(
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
        raise bad(
            "ScalingConfig.topology",
            scaling.topology,
            "none without use_tpu",
            "Set use_tpu=True, or leave it out",
        )
    if not scaling.use_tpu:
        return
    if scaling.use_gpu:
        raise bad("ScalingConfig.use_tpu", True, "only one of use_gpu and use_tpu", "Leave one of them out")
    if scaling.max_workers > 1:
        for name in ("topology", "accelerator_type"):
            if not getattr(scaling, name):
                raise bad(
                    f"ScalingConfig.{name}",
                    None,
                    f"{name} with use_tpu and more than one worker",
                    f"Give {name} as well",
                )
        if scaling.label_selector:
            raise bad(
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
        raise bad(f"ScalingConfig.{error.field}", error.seen, error.expected, error.remedy) from error
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
    raise bad(
        "ScalingConfig.num_workers",
        scaling.num_workers,
        f"whole slices of {per_slice} workers (a {scaling.topology} with {chips:g} chips a worker)",
        f"Use {' or '.join(f'num_workers={choice}' for choice in choices)}",
    )


def _check_slice_label(scaling: ScalingConfig) -> None:
    if scaling.slice_label is not None and scaling.use_tpu:
        raise bad(
            "ScalingConfig.slice_label",
            scaling.slice_label,
            "none with use_tpu",
            "Leave it out: TPU slices are known by their own labels",
        )
    hosts = scaling.hosts_per_slice
    if hosts is None:
        return
    if not is_int(hosts) or hosts < 1:
        raise bad("ScalingConfig.hosts_per_slice", hosts, "an int of at least 1", "Leave it out")
    if scaling.slice_label is None:
        raise bad(
            "ScalingConfig.hosts_per_slice", hosts, "none without slice_label", "Give slice_label as well"
        )


def _check_replica_group_size(scaling: ScalingConfig) -> None:
    name, size = "ScalingConfig.replica_group_size", scaling.replica_group_size
    if size is None:
        return
    if not is_int(size) or size < 1:
        raise bad(name, size, "None or an int of at least 1", "Leave it out for one group of all workers")
    for count in {scaling.min_workers, scaling.max_workers}:
        if count % size:
            raise bad(name, size, f"a divisor of num_workers ({count})", "Make num_workers a multiple of it")


def _no_tune(name: str) -> RefusedError:
    return RefusedError(
        f"{name} is refused.", "It belongs to Ray Tune: use ScalingConfig.total_resources.", name
    )
