"""What is to be run, as engine, agents and workers need it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from everstep.backend.base import Backend, Member
from everstep.callbacks import UserCallback
from everstep.config import RunConfig, ScalingConfig
from everstep.config.failures import limits_of
from everstep.control.commands import CopySnapshot, StartWorkers
from everstep.control.controller import Settings
from everstep.driver import payload
from everstep.driver.output_files import OutputFiles
from everstep.engine.base import Engine, EngineRequest, SideTask
from everstep.health.hangs import OnHang
from everstep.protocol import wire
from everstep.protocol.script import Script
from everstep.storage.store import Limits, Store
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId
from everstep.torchft.server import NeedsLighthouse
from everstep.validation import ValidationConfig

Specs = dict[HostId, list[wire.WorkerSpec]]
"""The specs of workers, by host."""


@dataclass(frozen=True)
class Job:
    name: str
    store: Store
    """Where the run lives."""
    logs: Path
    """Where its workers' output is kept."""
    code: bytes
    arguments: bytes
    preload: list[str]
    backend: Backend
    scaling: ScalingConfig
    run: RunConfig
    seed: int
    fingerprint: str
    marker: str
    """What every host must find in the run's storage."""
    script: Script = field(default_factory=Script)
    validation: ValidationConfig | None = None
    """How checkpoints are validated beside training."""
    output: OutputFiles = field(default_factory=OutputFiles)
    """Streams of workers that have files of their own."""

    @property
    def wants_all_metrics(self) -> bool:
        """Whether a callback looks at what ranks other than 0 report."""
        return any(type(cb).after_report is not UserCallback.after_report for cb in self.run.callbacks)

    def settings(self) -> Settings:
        """As the controller needs it."""
        failures, memory = self.run.failure_config, self.run.checkpoint_config.memory
        size = self.scaling.replica_group_size
        return Settings(
            workers_min=self.scaling.min_workers,
            workers_max=self.scaling.max_workers,
            group_size=size,
            groups_min=self.scaling.min_workers // size if size and self.scaling.elasticity_enabled else 1,
            **limits_of(failures),
            on_hang=OnHang(failures.on_hang),
            spread="SPREAD" in self.scaling.placement_strategy,
            snapshot_copies=memory.copies if memory is not None else 0,
            resize_interval_s=self.scaling.elastic_resize_monitor_interval_s,
            deadlines=self.run.deadlines,
        )

    def engine_request(self, lease: int, journal: str, left: Iterable[HostId]) -> EngineRequest:
        """As an engine needs it."""
        address = self.store.address()
        return EngineRequest(
            # One run has one name, also if links lead to it.
            os.path.realpath(address) if self.store.is_local else address,
            lease,
            dict(self.scaling.resources_per_worker or {}),
            int(self.scaling.num_gpus_per_worker),
            self.scaling.max_workers,
            self.run.deadlines,
            self.scaling.wanted,
            self.run.worker_runtime_env,
            journal,
            frozenset(left),
        )

    def preparation(self, lease: int, engine: Engine) -> wire.Prepare:
        """As a template needs it."""
        given = self.run.worker_runtime_env
        if engine.shares_machine:
            env = payload.template_environment(given)
            # Workers that share a machine share its processors: a pool of every core for each is slower.
            share = max(1, (os.cpu_count() or 1) // max(1, self.scaling.max_workers))
            env.setdefault("OMP_NUM_THREADS", str(share))
        else:
            env = payload.given_variables(given)
            env.setdefault("OMP_NUM_THREADS", str(max(1, int(self.scaling.num_cpus_per_worker))))
        if isinstance(self.backend, NeedsLighthouse):
            env.setdefault("RUST_LOG", "warn")  # torchft has several lines to say about every step
        return wire.Prepare(
            lease,
            self.code,
            self.arguments,
            env,
            payload.python_path(given),
            "" if engine.brings_folder else payload.working_folder(given),
            self.preload,
            self.run.deadlines.probe_s,
            self.store.address(),
            dict(self.run.storage_options or {}),
            Limits.of(self.run.deadlines),
            self.marker,
            not engine.shares_machine,
            self.script,
        )

    def copy_slot(self, command: CopySnapshot, lease: int, engine: Engine) -> wire.CopySlot:
        """As an agent needs it that is to have a copy."""
        memory = self.run.checkpoint_config.memory
        assert memory is not None, "without snapshots there are no copies"
        source = engine.source(command.source)
        return wire.CopySlot(
            lease, command.rank, command.snapshot, source, memory.copy_rate, memory.host_fraction
        )

    def side_task(self, code: bytes, log: Path) -> SideTask:
        """Work beside training, with what workers have."""
        given = self.run.worker_runtime_env
        options = self.validation.ray_remote_kwargs if self.validation is not None else {}
        return SideTask(
            code,
            self.script,
            payload.template_environment(given),
            payload.working_folder(given),
            str(log),
            options,
        )

    def specs(self, start: StartWorkers, engine: Engine, snapshot_every: int) -> Specs:
        """As workers need it, by host. ``snapshot_every``: reports from one snapshot to the next."""
        leaders: dict[int, str] = {}
        for a in start.assignments:
            leaders.setdefault(a.slice_id, engine.address(a.host))
        generations = dict(start.generations)
        by_host: dict[HostId, list[wire.WorkerSpec]] = {}
        shown = frozenset(self.run.log_ranks)
        slice_leaders = tuple(leaders[s] for s in sorted(leaders))
        for a in start.assignments:
            member = _member(a, engine, self.scaling, slice_leaders)
            echo = a.rank in shown and self.output.shows(a.local_rank)
            spec = self._spec(a, generations[a.group_id], member, start, snapshot_every, echo)
            by_host.setdefault(a.host, []).append(spec)
        return by_host

    def _spec(
        self,
        a: Assignment,
        generation: int,
        member: Member,
        start: StartWorkers,
        snapshot_every: int,
        echo: bool,
    ) -> wire.WorkerSpec:
        limits, memory = self.run.deadlines, self.run.checkpoint_config.memory
        attempt = f"attempt-{start.epoch:04d}" + (f".{generation}" if generation else "")
        stdout, stderr = self.output.of(a, start.epoch, generation)
        return wire.WorkerSpec(
            run_name=self.name,
            run_folder=self.store.address(),
            epoch=start.epoch,
            generation=generation,
            assignment=a,
            member=member,
            checkpoint=start.checkpoint,
            reason=start.reason,
            log_path=str(self.logs / attempt / f"rank-{a.rank:05d}.log"),
            seed=_seed(self.seed, start.epoch, generation, a.rank),
            start_timeout_s=limits.start_s,
            leave_timeout_s=limits.leave_s,
            report_wait_s=limits.report_wait_s,
            hold_s=limits.upload_wait_s,
            look_s=limits.hang_look_s,
            quiet_s=limits.hang_s / 2,
            all_metrics=self.wants_all_metrics,
            echo=echo,
            storage_options=dict(self.run.storage_options or {}),
            storage_limits=Limits.of(limits),
            fingerprint=self.fingerprint,
            snapshot=start.snapshot,
            snapshot_ranks=len(start.sources) or a.world_size,
            kept=start.kept,
            snapshot_every=snapshot_every,
            memory_fraction=memory.host_fraction if memory is not None else 0.0,
            validates=self.validation is not None,
            stdout=stdout,
            stderr=stderr,
        )


def _member(a: Assignment, engine: Engine, scaling: ScalingConfig, slice_leaders: tuple[str, ...]) -> Member:
    each = int(scaling.num_tpus_per_worker if scaling.use_tpu else scaling.num_gpus_per_worker)
    devices = engine.devices(a.host)[a.local_rank * each : (a.local_rank + 1) * each]
    kind = "tpu" if scaling.use_tpu else "gpu" if devices else ""
    return Member(
        rank=a.rank,
        world_size=a.world_size,
        local_rank=a.local_rank,
        local_world_size=a.local_world_size,
        node_rank=a.node_rank,
        num_nodes=a.num_nodes,
        slice_id=a.slice_id,
        num_slices=a.num_slices,
        group_id=a.group_id,
        num_groups=a.num_groups,
        group_rank=a.group_rank,
        group_size=a.group_size,
        bind_address=engine.address(a.host),
        devices=devices,
        device_kind=kind,
        slice_leaders=slice_leaders,
    )


def _seed(base: int, epoch: int, generation: int, rank: int) -> int:
    """Different for every rank and attempt, the same for the same one."""
    seed = base
    for part in (epoch, generation, rank):
        seed = (seed * 6364136223846793005 + part + 1442695040888963407) % (1 << 63)
    return seed
