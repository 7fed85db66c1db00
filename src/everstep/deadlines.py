"""Every time limit that a user may need to change, in one place, with its default.

Nothing waits without a deadline. A setting here is an argument (``RunConfig(deadlines=Deadlines(…))``); an
environment variable ``EVERSTEP_<NAME>`` only overrides it, and that is read where configs are made, not here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Time limits, in seconds. Those that depend on each other are checked when made."""

    heartbeat_interval_s: float = 0.25
    """How often an agent sends a heartbeat. Raise it, with ``heartbeat_timeout_s``, on clusters of thousands
    of hosts.
    """
    heartbeat_timeout_s: float = 1.5
    """How long an agent may be silent before its host counts as lost. Raise it if healthy hosts are declared
    lost (overcommitted CPUs, virtual machines that are paused or migrated); lower it to notice a lost machine
    sooner.
    """
    take_over_s: float = 30.0
    """How long a new driver waits for an answer of an agent that an earlier one left behind and that is not
    known to be dead. Its workers train on meanwhile; after this, their host counts as lost. Raise it on
    machines that are so busy that an agent may need longer.
    """
    reserve_s: float = 300.0
    """One attempt at reserving every slice of a start. Raise it if the autoscaler takes longer than this to
    bring up a slice.
    """
    prepare_s: float = 300.0
    """Importing the training function's module and the framework on a host. Raise it if that takes minutes,
    as from a slow network file system.
    """
    probe_s: float = 20.0
    """The first forked worker finishing one operation; if it doesn't, workers start as fresh processes. Raise
    it on machines that are very busy while a run starts.
    """
    start_s: float = 120.0
    """From the order to start workers to the last of them being ready, rendezvous included. Raise it for
    thousands of workers, or where NCCL takes minutes to connect.
    """
    settle_s: float = 0.05
    """After a failure that looks like the consequence of another, how long to wait for its cause. Raise it if
    errors name a broken collective rather than the rank that died.
    """
    finish_report_s: float = 5.0
    """After a failure, how long healthy ranks may take to finish the report that the failed one had made.
    Raise it if saving takes longer and ranks often fail right after a report; 0 doesn't wait.
    """
    together_s: float = 0.2
    """Replica groups that fail within this time of each other are replaced together. Raise it where one cause
    takes several groups down over seconds.
    """
    stop_grace_s: float = 5.0
    """How long workers may take to exit when a run is stopped. Raise it if the training function cleans up
    for longer on SIGTERM.
    """
    kill_s: float = 10.0
    """How long killed workers may take to be gone before their host counts as lost. Raise it where processes
    hang in the kernel for long (large GPU memory, dead network mounts).
    """
    leave_s: float = 10.0
    """Shutting the framework down at a worker's normal end. Raise it if the last collectives of a large job
    take longer.
    """
    report_wait_s: float = 600.0
    """How long ``report`` may wait for ranks that are too far behind, before it fails. Raise it if single
    steps or evaluations take longer than this on some ranks only.
    """
    upload_wait_s: float = 30.0
    """How long a restart waits, at most, for a checkpoint that all ranks have reported and that is still
    being uploaded: never longer than it takes to train again what only that one holds. Raise it if an upload
    takes longer; 0 never waits.
    """
    final_upload_s: float = 600.0
    """How long the end of a run waits for uploads. Raise it for checkpoints that take longer than ten minutes
    to upload.
    """
    report_warn_s: float = 5.0
    """After this long, the ranks are named that have not made a report in which others have saved a
    checkpoint. Raise it if ranks take turns that are longer, and the warning is no news.
    """
    commit_warn_s: float = 60.0
    """After this long, a warning names what an uncommitted checkpoint waits for. Raise it if uploads normally
    take longer.
    """
    memory_wait_s: float = 600.0
    """How long a run that has too few hosts left keeps those that have its state in memory, while it waits
    for others. Then it gives them back, and goes on from storage later. Raise it where hosts are replaced
    more slowly than checkpoints are written; lower it if several runs share hosts that are scarce.
    """
    capacity_log_s: float = 30.0
    """How often a waiting run says again what it waits for. Raise it for shorter logs."""
    hang_s: float = 24.0
    """A worker that other ranks wait for, or are ahead of, and that should have made progress by now, counts
    as hung once it has been stuck for this long: its main thread in one and the same call, and neither it nor
    its child processes used a processor, read or wrote. Also one in which no Python code could run for this
    long. Raise it if a healthy rank can sit in one call for longer while the others wait; lower it to restart
    sooner.
    """
    hang_idle_s: float = 900.0
    """Workers that are still, none of them behind the others, count as hung after this long, and ten times
    as long as they have taken between two reports: nothing says that they don't wait for something. Raise it
    if all ranks wait for longer, as for data that arrives daily.
    """
    hang_first_s: float = 600.0
    """The same before its first report. Raise it if loading data or compiling takes longer."""
    hang_restore_s: float = 300.0
    """The same while it reads the checkpoint that it starts from. Raise it for large states on slow storage.
    """
    hang_checkpoint_s: float = 300.0
    """The same while it saves one. Raise it for large states on slow storage."""
    hang_pause_s: float = 3600.0
    """How long a ``pause()`` may take that says nothing else. Raise it, or say so in the ``pause()``, for
    evaluations that take longer.
    """
    hang_busy_s: float = 1800.0
    """A worker that trains and is busy counts as hung as well, after this much longer than usual without
    progress. Raise it if single steps may take half an hour longer than others.
    """
    hang_look_s: float = 1.0
    """How often an agent looks at the progress of its workers. Raise it on hosts with hundreds of workers."""
    examine_s: float = 10.0
    """How long agents may take to find out where workers that stand still are. Raise it on machines that are
    very busy.
    """
    backoff_first_s: float = 1.0
    """The pause before the second recovery in a row; the first is immediate. Lower it, with ``healthy_s``,
    where failures are frequent and independent of each other.
    """
    backoff_factor: float = 2.0
    """How much longer each further pause is (a factor, not seconds). Lower it to 1 for equal pauses."""
    backoff_max_s: float = 60.0
    """The longest pause between two recoveries. Lower it if waiting a minute costs more than failed starts.
    """
    first_start_attempts: int = 5
    """Starts in a row that may fail in the same way before the run has ever trained (a number, not seconds).
    Then it ends with that cause, whatever its budgets are. Raise it where first starts often fail for reasons
    that pass.
    """
    healthy_s: float = 60.0
    """Training this long without a failure resets the backoff. Lower it where failures are frequent and
    independent of each other.
    """
    set_aside_s: float = 600.0
    """How long a host that keeps failing is left out, if there is other capacity. Raise it if broken hosts
    stay broken until somebody repairs them.
    """
    set_aside_after: int = 3
    """Failures of one host within ``set_aside_s`` after which it is left out (a number, not seconds). Raise
    it where healthy hosts fail often; lower it to distrust hosts sooner.
    """
    notice_s: float = 30.0
    """How long after its deadline a preemption notice still counts; a host that is alive then is used again.
    Raise it if machines are taken away later than they announce.
    """
    storage_s: float = 60.0
    """One operation on a small object in remote storage, retries included. Raise it to sit out longer outages
    of the store before an upload fails.
    """
    storage_answer_s: float = 5.0
    """One request about a small object; after this, the connection counts as stalled. Raise it for a store
    with slow answers.
    """
    storage_piece_s: float = 30.0
    """The same for a piece of a file (8 MiB). Raise it on links slower than about 0.3 MiB/s."""
    boundary_s: float = 3600.0
    """After a take-over with changed code, how long workers may train on with the previous version if they
    save nothing. They restart with the new code at their next checkpoint. Raise it if checkpoints are further
    apart than an hour; lower it to have new code sooner, at the price of redone steps.
    """
    last_checkpoint_s: float = 10.0
    """How long a run that is stopped from outside waits for the last checkpoint. Raise it if saving takes
    longer.
    """
    closing_s: float = 3.0
    """How long the last records of a run may take to be written when it ends. Raise it for slow remote
    storage.
    """
    trackers_s: float = 30.0
    """How long TensorBoard, Weights & Biases or MLflow may take to log the rest when a run ends. Raise it for
    a slow connection to them.
    """
    orphan_s: float = 300.0
    """How long agents keep training after their driver was killed. Raise it if you need longer to start the
    script again; lower it to free the machines sooner.
    """

    @property
    def asleep_s(self) -> float:
        """A process that does something so much later than it was due did not run meanwhile, or was starved:
        what others have sent in that time is still to be read.
        """
        return self.heartbeat_interval_s + self.heartbeat_timeout_s / 3

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
        if self.hang_look_s <= 0:
            raise ValueError("Deadlines.hang_look_s must be above 0")
        if self.hang_s < 2 * self.hang_look_s:
            raise ValueError(
                f"Deadlines.hang_s ({self.hang_s}) must be at least twice hang_look_s ({self.hang_look_s})"
            )
        if self.backoff_factor < 1:
            raise ValueError(f"Deadlines.backoff_factor must be at least 1, got {self.backoff_factor}")
        if self.backoff_max_s < self.backoff_first_s:
            raise ValueError(
                f"Deadlines.backoff_max_s ({self.backoff_max_s}) must not be below "
                f"backoff_first_s ({self.backoff_first_s})"
            )
