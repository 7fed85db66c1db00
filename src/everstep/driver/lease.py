"""Who owns a run. Taking it is a record in the journal; whoever finds another's record where its own should
be has lost it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from everstep.agent import kernel
from everstep.driver import journal
from everstep.driver.history import History
from everstep.driver.journal import Journal, Opened, Owner
from everstep.errors import RunOwnedError
from everstep.storage.store import Store

_LOOK_S = 0.2


def take(
    run: Store,
    opened: Callable[[int], Opened],
    ttl_s: float,
    say: Callable[[str], None],
    proof: Callable[[str], bool] = lambda _: False,
) -> tuple[Journal, History]:
    """Become the run's owner. At once if nobody is, or if the owner is proven dead; else after its lease has
    lapsed.

    A lease lapses by silence, seen from here: no clocks are compared. An owner that writes meanwhile lives,
    and keeps its run. ``proof``: whether the engine knows that its driver of this name has ended.
    """

    def is_gone(owner: Owner) -> bool:
        return is_dead(owner) or (bool(owner.engine) and proof(owner.engine))

    log = run.child(journal.FOLDER)
    while True:
        scan = journal.Scan(run)
        history = History.of(scan.records())
        if history.owner is not None and not history.outcome and not is_gone(history.owner):
            _wait_out(log, scan.next, history.owner, is_gone, ttl_s, say)
        record = opened(history.lease + 1)
        if log.create(journal.key_of(scan.next), journal.encode(record)):
            return Journal(log, scan.next + 1, scan.first, scan.archives), history


def is_dead(owner: Owner) -> bool:
    """Whether it is proven: this machine, not restarted since, and no such process."""
    here = journal.me(owner.engine)
    if owner == here:
        return (
            True  # an earlier fit() of this very process, which has returned: this one asks for the run now
        )
    if not owner.boot or (owner.host, owner.boot) != (here.host, here.boot):
        return False
    return not kernel.is_alive(owner.pid) or kernel.start_time(owner.pid) != owner.started


def _wait_out(
    log: Store,
    number: int,
    owner: Owner,
    is_gone: Callable[[Owner], bool],
    ttl_s: float,
    say: Callable[[str], None],
) -> None:
    deadline = time.monotonic() + ttl_s
    told = -1
    while (left := deadline - time.monotonic()) > 0:
        if log.exists(journal.key_of(number)):
            raise RunOwnedError(
                f"the run is driven by {owner}, which lives",
                "stop that one first (everstep stop), or give this run another name",
            )
        if is_gone(owner):
            return
        if int(left) // 5 != told:
            told = int(left) // 5
            say(f"the run belongs to {owner}; if it stays silent for {left:.0f} s more, it is taken over")
        time.sleep(min(_LOOK_S, left))
