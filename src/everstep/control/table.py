"""The phases of a run, and of a restart, as a table. ``make reference`` draws the docs' diagram from it.

A restart takes some replica groups, or all workers, from wherever they are back to training. Restarting
everything moves the run itself through these phases; restarting some groups moves only them, while the run
stays RUNNING.
"""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    NEW = "new"
    """The run isn't open yet. Groups that never had a place begin where a run does: their restart is new,
    too.
    """
    SETTLING = "settling"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    WAITING = "waiting"
    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


P = Phase

TRANSITIONS: dict[tuple[Phase, Phase], str] = {
    (P.NEW, P.PLACING): "the run is opened",
    (P.NEW, P.WAITING): "opened, too little capacity",
    (P.NEW, P.RUNNING): "an earlier driver's workers are adopted",
    (P.RUNNING, P.SETTLING): "a failure: its cause, or a report of healthy ranks, is waited for",
    (P.RUNNING, P.STOPPING): "a failure, a resize, a preemption",
    (P.SETTLING, P.STOPPING): "the cause has shown itself and the report is finished, or time is up",
    (P.STOPPING, P.BACKOFF): "workers gone, not the first recovery in a row",
    (P.STOPPING, P.PLACING): "workers gone",
    (P.STOPPING, P.WAITING): "workers gone, too little capacity",
    (P.BACKOFF, P.PLACING): "paused long enough",
    (P.BACKOFF, P.WAITING): "paused long enough, too little capacity",
    (P.WAITING, P.PLACING): "enough whole slices are free",
    (P.PLACING, P.WAITING): "what was planned is gone, too little is left",
    (P.PLACING, P.BACKOFF): "a reservation or a host's preparation failed",
    (P.PLACING, P.STARTING): "every host is reserved and ready",
    (P.STARTING, P.STOPPING): "a worker failed before all were ready",
    (P.STARTING, P.RUNNING): "every worker is ready",
    (P.RUNNING, P.ENDING): "every rank returned, or the user stops",
    (P.SETTLING, P.ENDING): "the user stops",
    (P.STOPPING, P.ENDING): "a budget is spent, or the user stops",
    (P.BACKOFF, P.ENDING): "the user stops",
    (P.WAITING, P.ENDING): "the user stops",
    (P.PLACING, P.ENDING): "can't be retried, or the user stops",
    (P.STARTING, P.ENDING): "can't be retried, or the user stops",
    (P.NEW, P.ENDING): "the user stops",
    (P.ENDING, P.ENDED): "workers gone, reservations given back",
}
"""Every change of phase that is allowed, and when it happens. Losing the lease ends a run from anywhere."""
