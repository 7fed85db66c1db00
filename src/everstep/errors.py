"""The errors that ``Trainer.fit()`` and the functions of Everstep raise. Those of one command or one room are
there: ``ActionError`` (``observe.actions``), ``DataError`` (``data.errors``), ``TraceError``
(``forecast.outages``).

Errors are plain data: they pickle, they carry what was seen as fields, and their text says what to do next.
Nothing here decides anything; where an error is raised, and whether it is retried, is decided in ``control``
and the driver.

Not retried, whatever the budget: ``ConfigError``, ``FunctionLoadError``, ``TooLargeError``,
``InfeasibleResourcesError`` and ``StorageAccessError``.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from everstep.wording import named

if TYPE_CHECKING:
    from everstep.preemption import PreemptionInfo


class EverstepError(Exception):
    """The root of all of them. ``remedy`` says what to do about it; it is part of the text."""

    def __init__(self, message: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        return f"{_ended(self.message)} {_ended(self.remedy[0].upper() + self.remedy[1:])}"


def _ended(text: str) -> str:
    text = text.rstrip()
    return text if text.endswith((".", "?", "!", "…")) else f"{text}."


class ConfigError(EverstepError, ValueError):
    """An argument that can't be right. Raised when it is given, before anything starts.

    ``field`` is its full name (``"ScalingConfig.num_workers"``), ``remedy`` what to write instead.
    """

    def __init__(self, message: str = "", remedy: str = "", field: str = "") -> None:
        EverstepError.__init__(self, message, remedy)
        self.args = (message, remedy, field)
        self.field = field


class NotJsonError(ConfigError, TypeError):
    """Metadata that can't be stored as JSON. Ray Train raises a ``TypeError``."""


class NoRunError(ConfigError, RuntimeError):
    """A folder that isn't one of a run. Ray Train raises a ``RuntimeError``."""


class TooLargeError(ConfigError):
    """More in one piece than can be sent between a worker and its driver. Never retried."""


class RefusedError(ConfigError):
    """A name or an argument of Ray Train's that Everstep doesn't have, or doesn't have yet."""


class RefusedAttributeError(EverstepError, AttributeError):
    """An attribute of Ray Train's that Everstep doesn't have. ``hasattr`` says so as well."""


class CallError(EverstepError, RuntimeError):
    """A function of Everstep's was called where, or when, it can't work."""


class NoCheckpointError(EverstepError, RuntimeError):
    """The run has no such checkpoint. Ray Train raises a ``RuntimeError``."""


class CollectiveError(EverstepError, RuntimeError):
    """A barrier or a broadcast that can't complete: ranks called different ones, or one of them is gone."""


EQUALLY_OFTEN = (
    "Every rank must call report() equally often, with checkpoint=None where it has nothing to save"
)


class UnequalReportsError(EverstepError, RuntimeError):
    """A rank has waited too long (``Deadlines.report_wait_s``) for reports of other ranks."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EQUALLY_OFTEN)
        self.args = (message,)


class TrainingFailedError(EverstepError):
    """``fit()`` ended without a result. Its first line is the first cause."""


class WorkerError(EverstepError):
    """How one worker ended: what its own process said, and what the kernel said about it.

    The worker's exception itself stays on the worker: nothing is unpickled from there. Its type, its message
    and its traceback are here as text.
    """

    def __init__(
        self,
        rank: int,
        host: str = "",
        reason: str = "",
        exit_code: int | None = None,
        signal: int | None = None,
        traceback: str = "",
        log_tail: tuple[str, ...] = (),
        log_path: str = "",
    ) -> None:
        self.rank = rank
        self.host = host
        self.reason = reason or _how_it_ended(exit_code, signal)
        self.exit_code = exit_code
        self.signal = signal
        self.traceback = traceback
        self.log_tail = tuple(log_tail)
        self.log_path = log_path
        where = f"rank {rank} on {host}" if host else f"rank {rank}"
        super().__init__(f"{where} {self.reason}")
        self.args = (rank, host, reason, exit_code, signal, traceback, self.log_tail, log_path)

    @property
    def signal_name(self) -> str | None:
        """``"SIGKILL"``, for example; ``None`` if no signal ended it."""
        return None if self.signal is None else signal_name(self.signal)


class WorkerGroupError(TrainingFailedError):
    """Workers failed, and the budget for it is spent.

    ``error_message`` says why the run ended rather than recovered. ``worker_failures`` maps the rank of every
    worker that failed in the last incident to its ``WorkerError``; ``first_rank`` is the one that failed
    first, so that the echoes in its peers never hide it. One that you make yourself may hold any exceptions.
    """

    def __init__(
        self,
        error_message: str,
        worker_failures: Mapping[int, Exception],
        first_rank: int | None = None,
    ) -> None:
        self.error_message = error_message
        self.worker_failures = dict(worker_failures)
        self.first_rank = first_rank
        failures = [_as_worker_error(rank, error) for rank, error in self.worker_failures.items()]
        super().__init__(_describe(error_message, failures, self.first_cause))
        self.args = (error_message, self.worker_failures, first_rank)

    @property
    def first_cause(self) -> WorkerError | None:
        """The failure that came first. ``None`` only where no worker is known to have failed."""
        if not self.worker_failures:
            return None
        first = self.first_rank if self.first_rank in self.worker_failures else None
        rank = first if first is not None else next(iter(self.worker_failures))
        return _as_worker_error(rank, self.worker_failures[rank])


class NCCLHangError(WorkerGroupError):
    """Workers hang, and the budget for it is spent, or ``FailureConfig(on_hang="fail")`` allows none.

    The name is Ray Train's; it is raised for every kind of hang, with or without NCCL. A collective that runs
    into its own time limit first is a ``WorkerGroupError``.
    """


class ControllerError(TrainingFailedError):
    """The run could not be started or kept: a reservation, a start, a rendezvous, or a bug of ours.

    ``controller_failure`` says what it was; where workers failed before training began, it is a
    ``WorkerGroupError`` with their ``worker_failures``.
    """

    def __init__(self, controller_failure: BaseException) -> None:
        has_cause = isinstance(
            controller_failure, TrainingFailedError
        )  # it begins with the first cause itself
        prefix = "" if has_cause else "Training failed in the controller: "
        super().__init__(f"{prefix}{_one_line(controller_failure)}")
        self.controller_failure = controller_failure
        self.args = (controller_failure,)


class PreemptionError(TrainingFailedError):
    """Hosts were taken away, and ``FailureConfig(max_preemption_failures=…)`` is spent."""

    def __init__(self, preemption_info: PreemptionInfo, drain_timed_out: bool = False) -> None:
        gone = preemption_info.preempted_ranks
        ranks = named("rank", gone) if gone else "no ranks"
        ended = (
            "the deadline passed with workers still running" if drain_timed_out else "the workers had ended"
        )
        super().__init__(
            f"Training was preempted ({ranks}; {ended}), and the preemption budget is spent.",
            "Raise FailureConfig(max_preemption_failures=…), or -1 for no limit, and run it again to resume.",
        )
        self.preemption_info = preemption_info
        self.drain_timed_out = drain_timed_out
        self.args = (preemption_info, drain_timed_out)


class FunctionLoadError(TrainingFailedError):
    """The training function can't be shipped, or can't be loaded on a worker. Never retried."""


class ReturnValueError(EverstepError):
    """Training finished, and what the function returned can't be had: it could not be sent, or can't be
    loaded here. Nothing is trained again. ``result`` has all the rest: metrics and checkpoints.
    """

    def __init__(self, problem: str = "", result: object = None) -> None:
        super().__init__(
            "Training finished, and its checkpoints are kept, but what the training function returned can't "
            f"be given to you: {problem}",
            "return plain data (a tensor as .cpu() or .tolist(), an object as a dict), or save it with a "
            "checkpoint. All the rest is in this error's .result",
        )
        self.problem = problem
        self.result = result
        self.args = (problem, result)


class InfeasibleResourcesError(TrainingFailedError):
    """More is asked for than any host of this kind of cluster can ever have. Never retried."""


class StorageError(EverstepError):
    """Storage said no, or held something else than it should."""


class StorageAccessError(StorageError, TrainingFailedError):
    """Storage that can't be written or read with what we were given. Never retried."""


class ConflictingPartsError(StorageError):
    """What ranks saved does not make one checkpoint: some of it would be lost."""


class ConflictingPlacesError(ConflictingPartsError):
    """Ranks saved in different places what they reported as one checkpoint."""

    def __init__(self, rank: int, place: str, other_rank: int, other_place: str) -> None:
        super().__init__(
            f"rank {rank} saved in {place}, and rank {other_rank} in {other_place}, in the same report: one "
            "checkpoint is one folder",
            "save into one folder at all ranks (with a file of its own at each), or report on one rank only",
        )
        self.places = {rank: place, other_rank: other_place}
        self.args = (rank, place, other_rank, other_place)


class ConflictingFilesError(ConflictingPartsError):
    """Ranks saved different files under one name, in one checkpoint: all but one would be lost."""

    def __init__(self, file: str, ranks: tuple[int, ...]) -> None:
        some = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
        super().__init__(
            f"ranks {some} saved {file!r} in the same checkpoint, with different content",
            "give it a name of its own on each rank, such as f'shard-{rank}', or save it on one rank only",
        )
        self.file = file
        self.ranks = ranks
        self.args = (file, ranks)


class JournalFormatError(StorageError, TrainingFailedError):
    """The run's journal has a format that this version of Everstep doesn't read. Never retried."""


class AgentVersionError(TrainingFailedError):
    """The agent of a host speaks another version of the protocol than this driver. Never retried."""

    def __init__(self, host: str, found: int, expected: int) -> None:
        super().__init__(
            f"the agent of host {host} speaks version {found} of Everstep's protocol, and this driver "
            f"version {expected}",
            "install the same version of Everstep on every host and where the script runs",
        )
        self.host = host
        self.found = found
        self.expected = expected
        self.args = (host, found, expected)


class RunOwnedError(TrainingFailedError):
    """Another driver has this run, and lives."""


class FencedError(TrainingFailedError):
    """Another driver, the ``holder``, has taken this run over. This one has stopped, and changed nothing
    since.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(f"the run was taken over by {holder}")
        self.holder = holder
        self.args = (holder,)


class DamagedCheckpointError(StorageError):
    """A file of a checkpoint is not what its manifest says. ``file`` is the first one that was found."""

    def __init__(self, checkpoint: str, file: str, damage: str) -> None:
        super().__init__(
            f"checkpoint {checkpoint} is damaged: {file} {damage}",
            "restore an older one, or put the folder back as it was",
        )
        self.checkpoint = checkpoint
        self.file = file
        self.damage = damage
        self.args = (checkpoint, file, damage)


class LostSnapshotError(EverstepError):
    """A snapshot in a host's memory, from which a rank was to start, can't be restored. The run starts from
    storage instead.
    """

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(f"the snapshot of rank {rank} in memory {problem}")
        self.rank = rank
        self.problem = problem
        self.args = (rank, problem)


def signal_name(number: int) -> str:
    """``SIGKILL``, for example."""
    try:
        return signals.Signals(number).name
    except ValueError:  # real-time signals have no name of their own
        return f"signal {number}"


def _how_it_ended(exit_code: int | None, signal: int | None) -> str:
    if signal is not None:
        return f"was killed by {signal_name(signal)}"
    if exit_code is not None:
        return f"exited with code {exit_code}"
    return "failed"


def _one_line(error: BaseException) -> str:
    text = str(error)
    return (
        text if isinstance(error, EverstepError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    )


def _as_worker_error(rank: int, error: Exception) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    return WorkerError(rank, reason=f"raised {type(error).__name__}: {error}".rstrip(": "))


def _describe(error_message: str, failures: Sequence[WorkerError], first: WorkerError | None) -> str:
    if first is None:
        return f"Training failed: {error_message}"
    parts = [f"Training failed: {first.message}"]
    if error_message:
        parts.append(error_message)
    if first.traceback:
        parts.append(f"\nTraceback of rank {first.rank}:\n{first.traceback.rstrip()}")
    if first.log_tail:
        source = f" ({first.log_path})" if first.log_path else ""
        lines = "\n".join(f"  | {line}" for line in first.log_tail)
        parts.append(f"\nLast lines of rank {first.rank}'s log{source}:\n{lines}")
    elif first.log_path:
        parts.append(f"\nLog of rank {first.rank}: {first.log_path}")
    others = [failure.message for failure in failures if failure.rank != first.rank]
    if others:
        parts.append("\nAfter it: " + "; ".join(others))
    return "\n".join(parts)
