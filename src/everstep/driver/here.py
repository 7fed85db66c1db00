"""``num_workers=0``: the training function runs in this process, for a debugger. No workers, no recovery;
reports and checkpoints are the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from everstep import session as sessions
from everstep.agent import wire
from everstep.backend.base import Member
from everstep.checkpoint import Result
from everstep.control.commands import Outcome
from everstep.control.events import CheckpointRef
from everstep.control.placement import Assignment
from everstep.control.reports import Part
from everstep.driver import records
from everstep.driver.clock import MachineClock
from everstep.driver.deletions import Deletions
from everstep.driver.history import plain_value, result_of, to_delete
from everstep.driver.lease import Lease
from everstep.driver.repair import Repair
from everstep.errors import WorkerError, WorkerGroupError
from everstep.storage import checkpoints
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.store import Limits, Store

if TYPE_CHECKING:
    from everstep.driver.run import RunSpec


class HereLink:
    """A link whose other end is this process."""

    def __init__(self, run: Store, lease: Lease, spec: RunSpec) -> None:
        self._run = ImmediateStore(run)
        self._history = lease.history
        self._journal = lease.journal
        self._config = spec.run.checkpoint_config
        self.epoch = 0
        self._sending = threading.Lock()
        self._rows: dict[int, msgspec.Raw] = {}
        self._frames = wire.Frames()
        self._deletions = Deletions(
            self._run,
            lease.journal,
            lease.history,
            delete_external=self._config.delete_external,
            storage_options=spec.run.storage_options,
        )
        self.session: sessions.Session | None = None

    def send(self, frame: bytes) -> None:
        with self._sending:  # the function's thread reports, and the one that uploads
            self._receive(frame)

    def _receive(self, frame: bytes) -> None:
        for body in self._frames.feed(frame):
            match wire.from_worker.decode(body):
                case wire.Report() as report:
                    self.write(records.Metrics(self.epoch, report.index, [report.metrics]))
                    self._rows[report.index] = report.metrics
                    if report.part is not None:
                        self._commit(report.part)
                case wire.PartDone() as done:
                    self._commit(done.part)
                case wire.PartFailed() as failed:
                    print(f"everstep: checkpoint {failed.index} could not be saved: {failed.reason}")
                case _:
                    pass

    def ask(self, what: str, body: bytes, timeout_s: float | None) -> bytes:
        if what == "checkpoints":
            rows = [[kept.address(self._run), kept.metrics] for kept in self._history.in_order()]
            return msgspec.msgpack.encode(rows)
        return body  # a collective of one

    def _commit(self, part: Part) -> None:
        ref = CheckpointRef(part.folder, self.epoch, part.index)
        metrics = self._rows[part.index]
        manifest = complete(checkpoints.commit(self._run, ref, [part.record], bytes(metrics)))
        now = time.monotonic()
        self.write(records.Committed(now, part.folder, self.epoch, part.index, metrics, manifest.external))
        complete(self._journal.flush())
        if self.session is not None:
            self.session.committed(part.index)
        for folder in to_delete(self._history, self._config):
            self.write(records.Deleted(now, folder))
            complete(self._deletions.remove(folder))

    def write(self, record: records.AnyRecord) -> None:
        self._journal.append(record)
        self._history.apply(record)

    def put_in_order(self, lease: Lease, say: Callable[[str], None]) -> None:
        """As a driver does, before training starts."""
        complete(lease.mend(say))
        repair = Repair(self._run, self._history, self._deletions, self.write, say, MachineClock())
        complete(repair.put_in_order(journal_is_whole=not lease.damage))

    def close(self, closed: records.Closed) -> None:
        self.write(closed)
        complete(self._journal.flush())


def run_here(spec: RunSpec, name: str, run: Store, lease: Lease, say: Callable[[str], None]) -> Result:
    history = lease.history
    link = HereLink(run, lease, spec)
    link.put_in_order(lease, say)
    epoch = link.epoch = history.last_epoch + 1
    limits = spec.run.deadlines
    member = Member(0, 1, 0, 1, 0, 1)
    here = Assignment(0, "here", 0, 1, 0, 1, 1, "here", 0, 1, 0, 1, 0, 1)
    newest = history.newest
    worker = wire.WorkerSpec(
        run_name=name,
        run_folder=run.address(),
        epoch=epoch,
        generation=0,
        assignment=here,
        member=member,
        checkpoint=newest.ref.folder if newest is not None else None,
        reason="resumed" if epoch > 1 else "first start",
        log_path="",
        seed=0,
        start_timeout_s=limits.start_s,
        leave_timeout_s=limits.leave_s,
        hold_s=0.0,
        report_wait_s=limits.report_wait_s,
        all_metrics=False,
        echo=False,
        storage_options=dict(spec.run.storage_options or {}),
        storage_limits=Limits.of(limits),
    )
    session = sessions.Session(worker, link)
    link.session = session
    outcome, message, value = Outcome.FAILED, "", None
    sessions.enter(session)
    try:
        endpoint = spec.backend.host(member)
        spec.backend.join(member, endpoint, limits.start_s)
        config = spec.train_loop_config
        value = spec.train_fn() if config is None else spec.train_fn(dict(config))
        session.finish()
        spec.backend.leave(member)
        outcome = Outcome.FINISHED
    except KeyboardInterrupt:
        outcome = Outcome.STOPPED
        raise
    except (
        Exception
    ) as error:  # the user's function may raise anything; its cause stays attached for the debugger
        message = f"{type(error).__name__}: {error}"
        failure = WorkerError(0, "this process", f"raised {message}")
        raise WorkerGroupError("num_workers=0 runs once, without recovery", {0: failure}, 0) from error
    finally:
        sessions.enter(None)
        link.close(records.Closed(time.monotonic(), outcome.value, message, plain_value(value)))
    return replace(result_of(run, history, spec.run.storage_options), return_value=value)
