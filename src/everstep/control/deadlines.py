"""Every time limit of Everstep, in one place, with its default.

Nothing waits without a deadline. A setting here is an argument (``RunConfig(deadlines=Deadlines(…))``); an
environment variable ``EVERSTEP_<NAME>`` only overrides it, and that is read where configs are made, not here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Time limits, in seconds. Those that depend on each other are checked when made."""

    heartbeat_interval_s: float = 0.25
    """How often an agent says that it lives."""
    heartbeat_timeout_s: float = 1.5
    """Silence of an agent after which its host counts as lost."""
    reserve_s: float = 300.0
    """One attempt at reserving every slice of a start."""
    prepare_s: float = 300.0
    """An agent getting its template ready: importing the user's module and the framework."""
    probe_s: float = 20.0
    """The template's first fork finishing one operation; after that, fresh processes are used."""
    start_s: float = 120.0
    """From the order to start workers to the last of them being ready, rendezvous included."""
    settle_s: float = 0.05
    """After a failure that looks like an echo, how long the cause may take to show itself."""
    finish_report_s: float = 5.0
    """After a failure, how long healthy ranks may take to finish the report that the failed one had made."""
    together_s: float = 0.2
    """Replica groups that fail within this time of each other are one incident, and replaced together."""
    stop_grace_s: float = 5.0
    """How long workers may take to stop by themselves when the user ends a run."""
    kill_s: float = 10.0
    """How long killed workers may take to be gone before their host counts as lost."""
    leave_s: float = 10.0
    """Shutting the framework down at a worker's normal end."""
    report_wait_s: float = 600.0
    """How long ``report`` may wait for ranks that are too far behind."""
    upload_wait_s: float = 30.0
    """How long a restart waits, at most, for a checkpoint that all ranks have reported and that is still
    being uploaded: never longer than it takes to train again what only that one holds.
    """
    final_upload_s: float = 600.0
    """The same when a run ends."""
    report_warn_s: float = 5.0
    """After this long, ranks that have not made a report that others have saved a checkpoint in are named."""
    commit_warn_s: float = 60.0
    """After this long, a checkpoint that is not committed yet is warned about, whatever it waits for."""
    capacity_log_s: float = 30.0
    """How often to say again what a waiting run is waiting for."""
    backoff_first_s: float = 1.0
    """Pause before the second recovery in a row; the first is immediate."""
    backoff_factor: float = 2.0
    backoff_max_s: float = 60.0
    first_start_attempts: int = 5
    """Starts in a row that may fail in the same way before the run has ever trained. Then it ends with that
    cause, whatever its budgets are.
    """
    healthy_s: float = 60.0
    """Training this long without a failure forgets earlier ones for backoff."""
    set_aside_s: float = 600.0
    """How long a host that keeps failing is left out, if there is other capacity."""
    set_aside_after: int = 3
    """Failures of one host within ``set_aside_s`` after which it is left out."""
    notice_s: float = 30.0
    """How long after its deadline a preemption notice still counts.

    A host that lives on then is used again.
    """
    storage_s: float = 60.0
    """One operation on a small object in remote storage, retries included."""
    storage_answer_s: float = 5.0
    """One request about a small object. Longer than this, and the connection counts as stalled."""
    storage_piece_s: float = 30.0
    """The same for a piece of a file."""
    boundary_s: float = 3600.0
    """How long workers that were taken over may train on with the code of before, if they save nothing.

    They are restarted with the new code at their next checkpoint.
    """
    last_checkpoint_s: float = 10.0
    """How long a run that is stopped from outside waits for the checkpoint that it asks for."""
    closing_s: float = 3.0
    """How long the last records of a run may take to be written, when it ends."""
    orphan_s: float = 300.0
    """How long agents keep training after their driver died without a word."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"Deadlines.{field.name} must be a number of at least 0, got {value!r}")
        if self.heartbeat_interval_s <= 0:
            raise ValueError("Deadlines.heartbeat_interval_s must be above 0")
        if self.heartbeat_timeout_s < 3 * self.heartbeat_interval_s:
            raise ValueError(
                f"Deadlines.heartbeat_timeout_s ({self.heartbeat_timeout_s}) must be at least three times "
                f"heartbeat_interval_s ({self.heartbeat_interval_s}), or a busy host counts as lost"
            )
        if self.backoff_factor < 1:
            raise ValueError(f"Deadlines.backoff_factor must be at least 1, got {self.backoff_factor}")
        if self.backoff_max_s < self.backoff_first_s:
            raise ValueError(
                f"Deadlines.backoff_max_s ({self.backoff_max_s}) must not be below "
                f"backoff_first_s ({self.backoff_first_s})"
            )
