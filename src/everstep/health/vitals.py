"""How a worker does, as its agent sees it from outside: hangs are judged by this."""

from __future__ import annotations

import enum

import msgspec


class Stage(enum.StrEnum):
    """What a worker is doing, as far as Everstep knows without asking the training function."""

    START = "start"
    RESTORE = "restore"
    FIRST_STEP = "first step"
    TRAINING = "training"
    CHECKPOINT = "checkpoint"
    PAUSE = "pause"
    RETURNED = "returned"


class ProcessState(enum.StrEnum):
    """A process, as the kernel has it."""

    RUNNING = "running"
    STOPPED = "stopped"
    """By SIGSTOP, or the like."""
    TRACED = "traced"
    """A debugger holds it."""
    BLOCKED = "blocked in the kernel"


class StackPlace(enum.StrEnum):
    """Where its main thread is, by its Python stack."""

    UNKNOWN = ""
    WORKING = "in the training function"
    COLLECTIVE = "in a collective"
    REPORT = "in report(), waiting for other ranks"
    WAITING = "waiting for another process or thread"


class Vitals(msgspec.Struct, frozen=True):
    """Seconds are the agent's own: time in which it did not run, or in which the worker waited for a
    processor, is not in them.
    """

    rank: int
    generation: int
    stage: Stage
    quiet_s: float
    """Since it made progress: a report, a heartbeat, a collective, another stage."""
    still_s: float
    """Since it made progress, or it or a child of its used a processor, read or wrote."""
    asleep_s: float
    """Since its main thread last woke up, or made progress: all that time it was in one and the same call."""
    held_s: float
    """Since Python code could run in it: so long has a C call kept Python's lock."""
    usual_s: float
    """The longest of its recent times between two signs of progress, in this stage."""
    lull_s: float
    """The longest stillness in this stage that was over by itself."""
    reports: int
    collectives: int
    state: ProcessState = ProcessState.RUNNING
    allowed_s: float = 0.0
    """How long the training function said that this pause may take; 0: it did not say."""
    label: str = ""
    """What it calls the pause."""
    step_s: float = 0.0
    """How long it takes from one report to the next, the median of the recent ones; 0: not known."""
    device_s: float = 0.0
    """Since its GPU was given something that it has not done yet. The main thread may spin meanwhile."""


class Finding(msgspec.Struct, frozen=True):
    """A closer look at one worker."""

    vitals: Vitals
    place: StackPlace = StackPlace.UNKNOWN
    line: str = ""
    """Where it is, in one line: file, line and function of the innermost frame of the user's."""
    stack: str = ""
    """Its main thread's, innermost frame last."""
    threads: str = ""
    """Every thread's, as it came."""
