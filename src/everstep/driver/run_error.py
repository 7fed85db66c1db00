"""The error that a failed run ends with."""

from __future__ import annotations

from everstep.control.commands import EndRun
from everstep.driver.loop import Driver
from everstep.errors import (
    ControllerError,
    EverstepError,
    FunctionLoadError,
    NCCLHangError,
    PreemptionError,
    StorageAccessError,
    TrainingFailedError,
    WorkerError,
    WorkerGroupError,
)
from everstep.failures import Failure, Kind
from everstep.preemption import PreemptionInfo


def error_for(end: EndRun, driver: Driver) -> TrainingFailedError:
    """The error that the user gets: the first cause first."""
    cause = end.cause
    assert cause is not None, "a failed run has a cause"
    failures: dict[int, WorkerError] = {}
    for failure in [cause, *end.failures]:
        rank = failure.rank
        if rank is not None and rank not in failures:
            failures[rank] = _worker_error(failure, rank, driver)
    match cause.kind:
        case Kind.LOAD:
            return FunctionLoadError(
                f"Training failed: the training function can't be loaded on {cause.host}: {cause.message}\n\n"
                f"{cause.traceback}",
                "Check that its imports work where the workers run; nothing was retried.",
            )
        case Kind.CONFLICT:
            return TrainingFailedError(f"Training failed: {cause.message}")
        case Kind.STORAGE:
            return StorageAccessError(f"Training failed: on {cause.host}, {cause.message}")
        case Kind.PREEMPTED:
            ranks = {cause.host or "": sorted(failures)}
            return PreemptionError(PreemptionInfo(None, ranks))
        case Kind.START | Kind.RESERVATION | Kind.LIMIT if cause.rank is None:
            return ControllerError(EverstepError(f"{cause.message} ({end.message})"))
        case Kind.HANG:
            return NCCLHangError(end.message, failures, cause.rank)
        case Kind.START:
            return ControllerError(WorkerGroupError(end.message, failures, cause.rank))
        case _:
            if cause.rank is None:
                lost = next(iter(_ranks_on(driver, cause.host)), 0)
                failures[lost] = _worker_error(cause, lost, driver)
                return WorkerGroupError(end.message, failures, lost)
            return WorkerGroupError(end.message, failures, cause.rank)


def _ranks_on(driver: Driver, host: str | None) -> list[int]:
    members = [m for group in driver.controller.groups.values() for m in group.members.values()]
    return sorted(m.rank for m in members if m.host == host)


def _worker_error(failure: Failure, rank: int, driver: Driver) -> WorkerError:
    exits = [exited for (_, _, r), exited in driver.workers.results.tails.items() if r == rank]
    exited = exits[-1] if exits else None
    tail = failure.log_tail or (exited.log_tail if exited is not None else "")
    path = failure.log_path or (exited.log_path if exited is not None else "")
    verbs = {Kind.EXCEPTION: "raised ", Kind.LIMIT: "raised ", Kind.OOM: "ran ", Kind.SIGNAL: "was "}
    verb = verbs.get(failure.kind, "")
    if failure.kind is Kind.HANG and failure.message.startswith("no "):
        verb = "made "  # no progress; others have returned too early
    if failure.kind in (Kind.HOST_LOST, Kind.HOST_SILENT, Kind.TEMPLATE):
        verb = f"was lost with its host ({failure.kind.value}): "
    return WorkerError(
        rank,
        failure.host or "",
        f"{verb}{failure.message}",
        failure.exit_code,
        exited.signal if failure.signal and exited is not None else None,
        failure.traceback,
        tuple(tail.splitlines()[-20:]),
        path,
    )
