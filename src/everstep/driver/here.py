"""``num_workers=0``: the training function runs in this process, for a debugger. No workers, no recovery;
reports and checkpoints are the same.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from everstep import session as sessions
from everstep.agent import wire
from everstep.backend.base import Member
from everstep.checkpoint import Result
from everstep.control.commands import Outcome
from everstep.control.placement import Assignment
from everstep.driver import journal
from everstep.driver.history import History, plain_value, result_of, to_delete
from everstep.errors import WorkerError, WorkerGroupError
from everstep.storage import checkpoints as store
from everstep.storage.store import Limits, Store

if TYPE_CHECKING:
    from everstep.driver.run import RunSpec


class HereLink:
    """A link whose other end is this process."""

    def __init__(self, run: Store, history: History, log: journal.Journal, spec: RunSpec, epoch: int) -> None:
        self._run = run
        self._history = history
        self._journal = log
        self._spec = spec
        self._epoch = epoch
        self._rows: dict[int, msgspec.Raw] = {}
        self.session: sessions.Session | None = None
        self._frames = wire.Frames()

    def send(self, frame: bytes) -> None:
        for body in self._frames.feed(frame):
            match wire.from_worker.decode(body):
                case wire.Report() as report:
                    self._write(journal.Metrics(self._epoch, report.index, [report.metrics]))
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
            rows = [[kept.address(self._run), kept.metrics] for kept in self._history.checkpoints.values()]
            return msgspec.msgpack.encode(rows)
        return body  # a collective of one

    def _commit(self, part: Any) -> None:
        manifest = store.commit(self._run, part.folder, self._epoch, part.index, [part.record])
        metrics = self._rows[part.index]
        now = time.monotonic()
        self._write(journal.Committed(now, part.folder, self._epoch, part.index, metrics, manifest.external))
        self._journal.flush()
        if self.session is not None:
            self.session.committed(part.index)
        for folder in to_delete(self._history, self._spec.run.checkpoint_config):
            self._write(journal.Deleted(now, folder))
            self._journal.flush()
            if self._spec.run.checkpoint_config.delete_external:
                store.delete_external(self._run, folder, self._spec.run.storage_options)
            store.discard(self._run, folder)

    def _write(self, record: journal.AnyRecord) -> None:
        self._journal.append(record)
        self._history.apply(record)


def run_here(spec: RunSpec, name: str, run: Store, log: journal.Journal, history: History) -> Result:
    epoch = history.last_epoch + 1
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
        reason="first start",
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
    link = HereLink(run, history, log, spec, epoch)
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
        log.append(journal.Closed(time.monotonic(), outcome.value, message, plain_value(value)))
        log.flush()
    return replace(result_of(run, history, spec.run.storage_options), return_value=value)
