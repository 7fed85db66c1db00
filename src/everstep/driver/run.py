"""``Trainer.fit()``: everything that can be refused is refused first, then a driver is started and waited
for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from everstep import __version__
from everstep.backend.base import Backend
from everstep.backend.launched import JoinsLaunched, LaunchedGroup, launched_member
from everstep.backend.visibility import visible_devices
from everstep.callbacks import TrainRunContext
from everstep.config import RunConfig, ScalingConfig
from everstep.control.commands import EndRun, Outcome
from everstep.control.events import StopKind
from everstep.driver import payload
from everstep.driver.changes import changes
from everstep.driver.in_process import Opening, run_in_process, run_launched_rank
from everstep.driver.interrupts import quiet, run_thread
from everstep.driver.job import Job
from everstep.driver.loop import Driver
from everstep.driver.output_files import OutputFiles
from everstep.driver.result import Result, result_of
from everstep.driver.run_error import error_for
from everstep.driver.unsaved import UnsavedReports
from everstep.engine.base import Engine
from everstep.engine.choice import make_engine
from everstep.engine.local.engine import LocalEngine
from everstep.engine.local.machine import visible_gpus
from everstep.errors import (
    ConfigError,
    ControllerError,
    EverstepError,
    FencedError,
    ReturnValueError,
)
from everstep.journal import records
from everstep.journal.history import History, log_folder
from everstep.journal.lease import Lease, is_dead, take
from everstep.observe.callbacks import Callbacks
from everstep.observe.display import PlainDisplay, make_display
from everstep.observe.metrics_server import MetricsServer, metrics_server
from everstep.observe.observer import Display
from everstep.observe.prometheus import MetricsSource
from everstep.observe.registry import Registry
from everstep.observe.tracking import tracked
from everstep.process.clock import MachineClock
from everstep.protocol.script import this_script
from everstep.storage.asynchronous import AsyncStore, ImmediateStore, ThreadedStore
from everstep.storage.folder import make_private
from everstep.storage.shared import leave_marker
from everstep.storage.store import Limits, Store, open_store, probe
from everstep.validation import ValidationConfig
from everstep.worker.datasets import is_rays

logger = logging.getLogger("everstep")

Found = TypeVar("Found")


@dataclass(frozen=True)
class RunSpec:
    """What a trainer hands over."""

    train_fn: Callable[..., Any]
    train_loop_config: Mapping[str, Any] | None
    """None: the function is called without an argument."""
    datasets: Mapping[str, Any]
    backend: Backend
    scaling: ScalingConfig
    run: RunConfig
    engine: object
    validation: ValidationConfig | None = None
    output: OutputFiles = field(default_factory=OutputFiles)


class TrainingTerminated(SystemExit):
    """The driver got SIGTERM; everything has been cleaned up. The script exits with code 143."""


def run_training(spec: RunSpec) -> Result:
    """Run it, and give what came of it, or raise what ended it."""
    launched = _launched(spec) if spec.scaling.num_workers == 0 else None
    if launched is not None and launched.member.rank > 0:
        return run_launched_rank(spec, launched)
    with metrics_server(spec.run) as server:
        return _run(_prepared(spec, server), launched)


def _run(start: _Start, launched: LaunchedGroup | None) -> Result:
    spec = start.spec
    # In this process a debugger may have the terminal: no picture on it.
    display = PlainDisplay() if start.here else make_display()
    try:
        lease = _in_a_loop(lambda: start.take(display.say))
    except BaseException:
        display.close()
        raise
    if isinstance(lease, History):
        display.close()
        if launched is not None:
            launched.share(Opening(start.name, 0, None, finished=True).encoded())
        return _finished_already(spec, start.name, start.store, lease, start.config)
    display.say(f"run {start.name} in {start.store.address()}")
    if lease.before is not None and lease.before.fingerprint != start.fingerprint:
        workers = (spec.scaling.min_workers, spec.scaling.max_workers)
        changed = changes(lease.before, start.config, workers, start.code_digests)
        display.say(f"changed since this run was last started: {changed}")
    with tracked(lease.history, start.context(lease)):
        if start.here:
            world = launched.member.world_size if launched is not None else 1
            start.serve(lease, lambda: {"training": world}, display.say)
            return run_in_process(spec, start.name, start.store, lease, display.say, launched)
        return _drive(start, lease, display)


@dataclass(frozen=True)
class _Start:
    """All that is known before the run is taken."""

    spec: RunSpec
    name: str
    store: Store
    asynchronous: AsyncStore
    """The same, for coroutines."""
    engine: Engine
    datasets: Mapping[str, Any]
    """What travels to the workers. Kept to the end: who divides a data set for them lives that long."""
    code: bytes
    arguments: bytes
    config: str
    fingerprint: str
    code_digests: Mapping[str, str]
    """Of what it is made of, by name, but for the config."""
    clock: MachineClock
    server: MetricsServer | None

    @property
    def here(self) -> bool:
        """In this process."""
        return self.spec.scaling.num_workers == 0

    async def take(self, say: Callable[[str], None]) -> Lease | History:
        """The run's lease; or its history, if it is over."""
        return await take(
            self.asynchronous, self._opened, self.clock, say, is_gone=self._is_gone, is_over=self._is_over
        )

    def _opened(self, lease: int) -> records.Opened:
        spec = self.spec
        return records.Opened(
            records.FORMAT,
            lease,
            records.this_process(self.engine.whoami()),
            self.clock.now(),
            self.clock.wall(),
            __version__,
            self.name,
            spec.scaling.min_workers,
            spec.scaling.max_workers,
            self.fingerprint,
            self.config,
            secrets.token_hex(8),
            spec.run.lease_ttl_s,
            spec.run.checkpoint_config.checkpoint_score_attribute,
            spec.run.checkpoint_config.checkpoint_score_order,
            metrics_url=self.server.url if self.server is not None else "",
            code=dict(self.code_digests),
        )

    def serve(
        self, lease: Lease, workers: Callable[[], Mapping[str, int]], say: Callable[[str], None]
    ) -> None:
        """The run's metrics, where they are asked for."""
        if self.server is not None:
            history = lease.history
            self.server.serve(
                MetricsSource(
                    self.name,
                    history.run_id,
                    lease.figures,
                    lambda: history.ledger.until(self.clock.now()),
                    workers,
                )
            )
            say(f"metrics for Prometheus: {self.server.url}")

    def context(self, lease: Lease) -> TrainRunContext:
        """For callbacks."""
        spec = self.spec
        return TrainRunContext(
            lease.history.run_id,
            spec.run,
            spec.scaling,
            spec.train_loop_config,
            spec.backend,
            self.name,
            self.store.address(),
        )

    def _is_over(self, history: History) -> bool:
        return history.outcome == Outcome.FINISHED.value and self.spec.run.if_finished != "continue"

    def _is_gone(self, owner: records.Owner) -> bool:
        return is_dead(owner) or (bool(owner.engine) and self.engine.is_dead(owner.engine))

    def job(self, lease: Lease) -> Job:
        spec = self.spec
        logs = log_folder(self.store)
        make_private(logs)
        return Job(
            self.name,
            self.store,
            logs,
            self.code,
            self.arguments,
            [*spec.backend.preload(), *payload.imports_of(spec.train_fn)],
            spec.backend,
            spec.scaling,
            spec.run,
            # From Python's own generator: random.seed(…) in the user's script makes the ranks' seeds
            # reproducible.
            random.getrandbits(62),
            self.fingerprint,
            leave_marker(self.store, lease.number),
            this_script(),
            spec.validation,
            spec.output.of_run(self.name, lease.history.run_id, logs),
        )


def _prepared(spec: RunSpec, server: MetricsServer | None) -> _Start:
    """Check and pickle what is handed over, before anything is started or written."""
    name = spec.run.name or f"everstep-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    here = spec.scaling.num_workers == 0
    engine = LocalEngine() if here else make_engine(spec.engine)
    if engine.shares_machine:
        payload.check_framework(spec.backend)
        spec.output.check()
    limits = Limits.of(spec.run.deadlines)
    store = open_store(spec.run.storage_path, spec.run.storage_options, limits).child(name)
    code = payload.pickle_function(spec.train_fn, spec.backend)
    datasets = {key: _handed_over(key, dataset, engine) for key, dataset in spec.datasets.items()}
    arguments = payload.pickle_arguments(spec.train_loop_config, datasets)
    if spec.validation is not None and not here:
        payload.check_validation(spec.validation.fn)
    if not here:
        payload.check_size(spec.train_fn, code, spec.train_loop_config, datasets, arguments)
        payload.check_working_folder(spec.run.worker_runtime_env)
    probe(store)
    return _Start(
        spec,
        name,
        store,
        ImmediateStore(store) if here else ThreadedStore(store, limits),
        engine,
        datasets,
        code,
        arguments,
        payload.config_digest(spec.train_loop_config),
        payload.fingerprint(spec.train_fn, spec.train_loop_config, spec.scaling),
        payload.code_digests(spec.train_fn, spec.scaling),
        MachineClock(),
        server,
    )


def _drive(start: _Start, lease: Lease, display: Display) -> Result:
    """With workers, to the end."""
    spec, name, store = start.spec, start.name, start.store
    display.resumed(lease.history.reports_by_attempt())
    observer = Callbacks(display, spec.run.callbacks, start.context(lease))
    driver = Driver(
        start.job(lease), start.asynchronous, start.engine, lease, observer, Registry(), start.clock
    )
    start.serve(lease, lambda: driver.announcements.census, observer.say)
    thread = threading.Thread(target=driver.main, name="everstep-driver", daemon=True)
    try:
        run_thread(thread, driver)
    finally:
        if how := driver.outcome.in_a_word():
            display.ended(how)
        observer.close()
    outcome = driver.outcome
    if outcome.crash is not None:
        if isinstance(outcome.crash, EverstepError):
            raise outcome.crash
        raise ControllerError(outcome.crash) from outcome.crash
    assert outcome.end is not None, "a run that is over says how"
    if outcome.unrecorded is not None:
        _say_unrecorded(outcome.end, outcome.unrecorded)
    unsaved = driver.unsaved() if not outcome.is_fenced else None
    if unsaved is not None:
        print(f"everstep: {unsaved}.", file=sys.stderr)
    _raise_for(
        outcome.end,
        driver,
        unsaved,
        name,
        store,
        resumable=spec.run.name is not None,
        has_checkpoint=lease.history.newest is not None,
    )
    returned = driver.workers.results
    result = replace(
        result_of(store, lease.history, spec.run.storage_options),
        return_value=returned.value,
        unsaved_reports=unsaved.reports if unsaved is not None else [],
    )
    if returned.problem:
        raise ReturnValueError(returned.problem, result)
    return result


def _launched(spec: RunSpec) -> LaunchedGroup | None:
    """The processes that torchrun has started beside this one, if it has started it."""
    member = launched_member(os.environ, visible_gpus() if spec.scaling.use_gpu else ())
    if member is None:
        return None
    if not isinstance(spec.backend, JoinsLaunched):
        raise ConfigError(
            f"num_workers=0 in process {member.rank} of {member.world_size} that torchrun has started, and "
            "this trainer can't make a group of them",
            "use everstep.torch.TorchTrainer, or start the script without torchrun",
            "ScalingConfig.num_workers",
        )
    for name, value in visible_devices(member).items() if member.devices else ():
        os.environ[name] = value or ""
    return spec.backend.launched(member)


def _say_unrecorded(end: EndRun, error: EverstepError) -> None:
    """The run is over, and its journal doesn't say so."""
    if end.outcome is Outcome.FINISHED:
        what = "training finished: every rank returned. Running it again resumes from its newest checkpoint"
    else:
        what = "the run has ended, and can be resumed"
    print(f"everstep: {what}. Its end could not be recorded: {error}", file=sys.stderr)


def _in_a_loop(work: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
    """Run a coroutine where there may be an event loop already, as in a notebook; Ctrl+C cancels it."""
    future: Future[Found] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Found]]] = Future()

    async def run() -> Found:
        task = asyncio.ensure_future(work())
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def body() -> None:
        try:
            future.set_result(asyncio.run(run()))
        except BaseException as error:  # raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=body, name="everstep-lease", daemon=True).start()
    try:
        return future.result()
    except KeyboardInterrupt:
        loop, task = started.result()
        loop.call_soon_threadsafe(task.cancel)
        raise


def _finished_already(spec: RunSpec, name: str, store: Store, history: History, config: str) -> Result:
    choice = "RunConfig(if_finished='return') gives its result, RunConfig(if_finished='continue') trains on"
    if spec.run.if_finished is None and history.config != config:
        raise ConfigError(
            f"run {name} has finished, with another train_loop_config than this",
            f"{choice}; or give this run another name",
            "RunConfig.name",
        )
    hint = "RunConfig(if_finished='continue') trains on, and another name starts a new run"
    logger.warning("run %s has finished already: this is its result. %s.", name, hint)
    return result_of(store, history, spec.run.storage_options)


def _handed_over(name: str, dataset: Any, engine: Engine) -> Any:
    """What travels to the workers in the place of a data set."""
    if not is_rays(dataset):
        return dataset
    if engine.shares_machine:
        raise ConfigError(
            f"Trainer.datasets[{name!r}] is a ray.data.Dataset, and the workers are not on Ray.",
            "Give engine='ray', or a map-style data set.",
            f"Trainer.datasets[{name!r}]",
        )
    from everstep.engine.ray.datasets import RayDataset

    return RayDataset(dataset)


def _raise_for(
    end: EndRun,
    driver: Driver,
    unsaved: UnsavedReports | None,
    name: str,
    store: Store,
    *,
    resumable: bool,
    has_checkpoint: bool,
) -> None:
    if end.outcome is Outcome.FINISHED:
        return
    if resumable:
        where = "its newest checkpoint" if has_checkpoint else "the beginning: it has no checkpoint yet"
        resume = f"Run the same command again to resume {name} from {where}."
    else:
        resume = (
            f"It has no RunConfig(name=…), so running it again doesn't resume it: give a name next time. Its "
            f"checkpoints stay in {store.address()}"
        )
    if end.outcome is Outcome.STOPPED:
        if end.stop in (StopKind.TERMINATE, StopKind.USER):
            print(f"everstep: {end.stop.value}. {resume}", file=sys.stderr)
            raise TrainingTerminated(128 + signal.SIGTERM)
        print(f"everstep: interrupted. {resume}", file=sys.stderr)
        raise quiet(KeyboardInterrupt(resume))
    if end.outcome is Outcome.FAILED:
        error = error_for(end, driver)
        if unsaved is not None:
            error.add_note(f"{unsaved}.")
        raise error
    raise FencedError(end.message)


__all__ = ["RunSpec", "TrainingTerminated", "run_training"]
