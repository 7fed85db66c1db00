"""Which driver owns a run. Taking it is a record in the journal; a driver that finds another's record where
its own should be has lost it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from everstep.errors import RunOwnedError, StorageError
from everstep.journal import journal, records
from everstep.journal.counters import RunCounters
from everstep.journal.history import History
from everstep.journal.journal import Journal
from everstep.journal.records import Opened, Owner
from everstep.process import kernel
from everstep.process.clock import Clock
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.shared import last_marked

_LOOK_S = 0.2
_LISTED_S = 60.0
"""How long a list may lag behind what can be read. After that, the journal is damaged."""


@dataclass(frozen=True)
class Lease:
    """A run that is ours: its journal, and what it said before."""

    number: int
    journal: Journal
    history: History
    """What the journal says, our own opening included."""
    before: Opened | None
    """By which the run was taken before."""
    damage: list[str]
    """What of the journal is missing or can't be read."""
    figures: RunCounters
    """What is durable of it, in numbers."""

    @property
    def precedence(self) -> int:
        """By which agents tell drivers apart: the later one has the higher. Of two that have the same number,
        since the record by which the run was taken is lost, and its marker too, the one that has taken it
        later.
        """
        opened = self.history.opened
        assert opened is not None, "it is our own"
        return self.number << 32 | int(opened.wall) & 0xFFFFFFFF

    async def mend(self, say: Callable[[str], None]) -> None:
        """A damaged journal gets a new beginning, of what can still be read."""
        for damage in self.damage:
            say(f"the journal is damaged: {damage}. What else is in storage is kept")
        if self.damage:
            await self.journal.start_anew(self.history.as_records())


async def take(
    store: AsyncStore,
    opened: Callable[[int], Opened],
    clock: Clock,
    say: Callable[[str], None],
    *,
    is_gone: Callable[[Owner], bool] | None = None,
    is_over: Callable[[History], bool] = lambda _: False,
    compact_after: int = journal.COMPACT_AFTER,
    token: Callable[[], str] = journal.random_token,
) -> Lease | History:
    """Become the run's owner. At once if nobody is, or if the owner is proven dead; else after its lease has
    lapsed. If the run ``is_over``, it is left as it is, and its history returned.

    A lease lapses by silence, seen from here: no clocks are compared. An owner that writes meanwhile lives,
    and keeps its run.
    """
    log = store.child(journal.FOLDER)
    outdated_since: float | None = None
    while True:
        scan = await journal.scan_journal(log)
        if scan.is_outdated:
            outdated_since = clock.now() if outdated_since is None else outdated_since
            if clock.now() - outdated_since < _LISTED_S:
                await asyncio.sleep(_LOOK_S)
                continue
            if scan.vanished:
                raise _lags(log, scan.vanished[0])
            scan.damage += [f"what was written before {log.address(name)} is missing" for name in scan.past]
        history = History.of(scan.records())
        if is_over(history):
            return history
        lease = max(scan.next, history.lease + 1, await last_marked(store) + 1)
        if history.owner is not None and not history.outcome:
            ttl_s = max(opened(lease).ttl_s, history.ttl_s)
            await _wait_out(log, scan.next, history.owner, is_gone or is_dead, ttl_s, clock, say)
        record = opened(lease)  # of now: who has taken the run later takes precedence
        record = msgspec.structs.replace(record, run_id=history.run_id or record.nonce)
        key, data = journal.key_of(scan.next), records.encode(record)
        # An answer may be so late that the record is lost, and somebody else's in its place.
        if (
            await log.create(key, data)
            and not await _is_passed(log, scan.next)
            and await log.read(key) == data
        ):
            before = history.opened
            history.apply(record)
            figures = RunCounters.of([*scan.records(), record])
            mine = Journal(
                log,
                scan.next + 1,
                scan.first,
                scan.archives,
                compact_after,
                figures.apply,
                data,
                token,
                {*scan.openings, scan.next},
            )
            return Lease(lease, mine, history, before, scan.damage, figures)
        if scan.is_outdated:
            raise _lags(log, key)


def _lags(log: AsyncStore, name: str) -> StorageError:
    return StorageError(
        f"the list of {log.address()} lags behind what can be read there, for longer than {_LISTED_S:g} s: "
        f"see {name}",
        "try again in a minute; if that is no help, use a store whose lists are consistent",
    )


async def _is_passed(log: AsyncStore, number: int) -> bool:
    """Whether it was free because of a compaction: then it is no place in the sequence. What stands after it
    may be missing from a list that is old; what says so beside it is asked for by name.
    """
    after = journal.numbers_in(file.path for file in await log.list(after=journal.key_of(number)))
    return bool(after) or await log.exists(journal.past_of(number))


def stop_request(lease: int) -> str:
    """The object that asks the owner of this lease to stop. Of a lease that is over, it means nothing."""
    return f"requests/stop-{lease}"


def is_dead(owner: Owner) -> bool:
    """Whether it is proven: this machine, not restarted since, and no such process among those that can be
    seen from here.
    """
    here = records.this_process(owner.engine)
    if owner == here:
        return True  # an earlier fit() of this process, which has returned: this one asks for the run now
    known = bool(owner.boot) and bool(owner.pid_namespace)
    if not known or (owner.host, owner.boot, owner.pid_namespace) != (
        here.host,
        here.boot,
        here.pid_namespace,
    ):
        return False
    return not kernel.is_alive(owner.pid) or kernel.start_time(owner.pid) != owner.started


async def _wait_out(
    log: AsyncStore,
    number: int,
    owner: Owner,
    is_gone: Callable[[Owner], bool],
    ttl_s: float,
    clock: Clock,
    say: Callable[[str], None],
) -> None:
    deadline = clock.now() + ttl_s
    told = -1
    while not is_gone(owner) and (left := deadline - clock.now()) > 0:
        if await log.exists(journal.key_of(number)):
            raise RunOwnedError(
                f"the run is driven by {owner}, which is alive",
                "stop that one first (everstep stop), or give this run another name",
            )
        if int(left) // 5 != told:
            told = int(left) // 5
            say(f"the run belongs to {owner}; if it stays silent for {left:.0f} s more, it is taken over")
        await asyncio.sleep(min(_LOOK_S, left))
