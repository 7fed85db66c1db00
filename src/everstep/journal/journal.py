"""The journal: the one record of a run. What happened, what was decided, and every metric of rank 0.

It is one sequence of numbered objects, each made with put-if-absent. Taking the run is a record in it; so a
driver that was paused and replaced collides at its next append, and stops. Old objects are put together into
archives, which a later object names, and are deleted then; but not those by which the run was taken, since
that is where a driver that was replaced appends when it wakes up. Other numbers become free again. Whoever
takes the run appends at one of these only if what it knows of the journal is old: an object beside the
sequence (``past_of``) says so of each number that may then seem to be the next.

A list of a folder may lag behind, in some stores: what was just made is missing from it, and what was just
deleted is still in it. So nothing is decided by a list alone. What it lacks is asked for by name, and one
that names what can't be read is looked at again.

Objects are made whole or not at all. One that is missing or that can't be read is damage: it is named, and
everything else is read.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from everstep.errors import FencedError, JournalFormatError, StorageError
from everstep.journal.records import AnyRecord, Compacted, Opened, decode, encode
from everstep.storage import layout
from everstep.storage.asynchronous import AsyncStore, ImmediateStore, complete
from everstep.storage.store import FileRecord, Store, open_store

FOLDER = layout.JOURNAL
key_of = layout.key_of
COMPACT_AFTER = 200
"""How many small objects are put into an archive."""
MOST_BYTES = 4 << 20
"""Of one object, so that a slow store can take it within a deadline."""
MOST_ARCHIVED = 2 * MOST_BYTES
"""Archives are put together up to this size."""

_ARCHIVE = "archive-"
_ARCHIVED = re.compile(rf"{_ARCHIVE}([0-9]{{10,}})-[0-9a-f]+")
_PAST_NUMBER = re.compile(r"past-([0-9]{10,})")
_LOOKS = 20
_PAUSE_S = 1.0


class JournalRemovedError(StorageError):
    """What was written before is gone. ``Journal.start_anew`` puts a new beginning there."""


def numbers_in(names: Iterable[str]) -> list[int]:
    """Of the numbered objects among these. Other files in a folder are somebody else's."""
    return [int(name) for name in names if layout.is_numbered(name)]


def past_of(number: int) -> str:
    """The object that says that this number was used, although it is free: what it held is in an archive."""
    return f"past-{key_of(number)}"


def random_token() -> str:
    return secrets.token_hex(4)


class Journal:
    """A driver's access to the journal. ``append`` collects; ``flush`` makes durable, or raises
    ``FencedError``.
    """

    def __init__(
        self,
        store: AsyncStore,
        number: int,
        first: int,
        archives: Sequence[str],
        compact_after: int = COMPACT_AFTER,
        durable: Callable[[AnyRecord], None] = lambda record: None,
        last: bytes | None = None,
        token: Callable[[], str] = random_token,
        openings: Collection[int] = (),
    ) -> None:
        """``durable`` is called with each record that this journal has written, once it is there. ``last`` is
        the object that the next one comes after, if it is ours. ``token`` makes the names of archives unique.
        ``openings``: the numbers at which the run was taken.
        """
        self._store = store
        self._durable = durable
        self._compact_after = compact_after
        self._next = number
        self._first = first
        self._archives = [*archives]
        self._last = last
        self._token = token
        self._openings = frozenset(openings)
        # A deque, of which one thread appends while another takes: nothing falls in between.
        self._waiting: deque[tuple[AnyRecord, bytes]] = deque()
        self._unsure = b""
        """What is being written, and may or may not be there already."""
        self._unsure_of: list[AnyRecord] = []
        """The records in it."""
        self._flushing = asyncio.Lock()
        self._lost: FencedError | None = None

    def append(self, record: AnyRecord) -> None:
        self._waiting.append((record, encode(record)))

    @property
    def has_news(self) -> bool:
        return bool(self._waiting or self._unsure)

    async def flush(self) -> bool:
        """Write what was appended. True if there was something. What storage refuses is tried again the next
        time. Once this returns, this driver owned the run after the last record was written.
        """
        async with self._flushing:
            wrote = False
            while self.has_news:
                await self._write_some()
                wrote = True
            return wrote

    async def _write_some(self) -> None:
        if self._lost is not None:
            raise self._lost
        if not self._unsure:
            self._unsure_of, self._unsure = self._batch()
        # An error may hide that it was written: the same bytes again then find themselves.
        if not await self._store.create(key_of(self._next), self._unsure):
            raise await self._fenced()
        await self._check_place()
        self._last, self._unsure = self._unsure, b""
        self._next += 1
        for record in self._unsure_of:
            self._durable(record)

    def _batch(self) -> tuple[list[AnyRecord], bytes]:
        first, encoded = self._waiting.popleft()
        found, batch = [first], bytearray(encoded)
        while self._waiting and len(batch) + len(self._waiting[0][1]) <= MOST_BYTES:
            record, encoded = self._waiting.popleft()
            found.append(record)
            batch += encoded
        return found, bytes(batch)

    async def _check_place(self) -> None:
        """What was written counts if nothing stands after it, and what it goes on from is there, and ours: if
        our last object was lost, another driver may have taken the run in its place.
        """
        names = {file.path for file in await self._store.list()}
        after = [key_of(number) for number in sorted(numbers_in(names), reverse=True) if number > self._next]
        if await self._is_any_there(after) or not await self._is_last_ours():
            raise await self._fenced()
        needed = {*self._archives, key_of(self._next)}
        needed |= {key_of(self._next - 1)} if self._next > self._first else set()
        for name in sorted(needed - names):
            if not await self._store.exists(name):
                raise JournalRemovedError(
                    f"the journal of {self._store.address()} was removed or replaced while the run uses it",
                    "leave the folder of a run alone while it runs",
                )

    async def _is_any_there(self, names: Iterable[str]) -> bool:
        for name in names:
            if await self._store.exists(name):
                return True
        return False

    async def _is_last_ours(self) -> bool:
        """Also if it is gone."""
        if self._last is None or self._next == self._first:
            return True
        return await self._store.read(key_of(self._next - 1)) in (None, self._last)

    async def _fenced(self) -> FencedError:
        """Another driver has written after us, or what we would have written. That is known from here on,
        also if who it was is never found out: whoever waits for this may be cancelled.
        """
        by = "another driver"
        self._lost = FencedError(by)
        try:
            scan = await scan_journal(self._store)
            openings = [record for record in scan.records() if isinstance(record, Opened)]
            by = str(openings[-1].owner) if openings else by
        except JournalFormatError:
            by = "a driver of another version of Everstep"
        self._lost = FencedError(by)
        return self._lost

    # ------------------------------------------------------------------ compaction

    @property
    def is_long(self) -> bool:
        return self._next - self._first >= self._compact_after

    async def compact(self) -> None:
        """Put many small objects into a large one. Nothing is forgotten by it. For one task at a time, beside
        any number of flushes.
        """
        first, last = self._first, self._next
        sizes = {file.path: file.size for file in await self._store.list()}
        small = [key_of(number) for number in range(first, last)]
        merged = self._to_merge(sizes, sum(sizes.get(name, 0) for name in small))
        found = [await self._whole(name) for name in [*merged, *small]]
        name = f"{_ARCHIVE}{last:010d}-{self._token()}"
        await self._store.create(name, b"".join(found))
        if self._first != first:
            return  # there is a new beginning by now, which has all of it
        archives = [*(a for a in self._archives if a not in merged), name]
        await self._write_compacted(Compacted(archives, last))
        if self._first != first:
            return
        before, self._first, self._archives = self._archives, last, archives
        await self._delete_superseded(sizes, before)

    async def _delete_superseded(self, listed: Collection[str], archives: Sequence[str]) -> None:
        """``archives``: those that counted until now. What says that they are old outlives them."""
        # The numbers that come after what stays, and after what may still be listed.
        ends = {*(number + 1 for number in self._openings), *_archived([*archives, *self._archives])}
        past = {past_of(number) for number in ends if number < self._first}
        for name in sorted(past - {*listed}):
            await self._store.create(name, b"")
        await self._store.delete([name for name in listed if name not in past and self._is_superseded(name)])

    def _is_superseded(self, name: str) -> bool:
        """Whether an object is archived; or was left by a driver that was replaced, or by a compaction that
        was cut off.
        """
        if layout.is_numbered(name):
            return int(name) < self._first and int(name) not in self._openings
        if _PAST_NUMBER.fullmatch(name):
            return True
        return bool(_ARCHIVED.fullmatch(name)) and name not in self._archives

    def _to_merge(self, sizes: dict[str, int], size: int) -> list[str]:
        """The last archives, as long as they aren't much larger than what comes after them."""
        merged: list[str] = []
        for name in reversed(self._archives):
            more = sizes.get(name, 0)
            if more > 2 * size or size + more > MOST_ARCHIVED:
                break
            merged.insert(0, name)
            size += more
        return merged

    async def _whole(self, name: str) -> bytes:
        """An object as it was written: nothing is deleted because of one that can't be read."""
        data = await self._store.read(name)
        damage: list[str] = []
        for _ in decode(data or b"", damage.append):
            pass
        if data is None or damage:
            damage = damage if data is not None else ["is missing"]
            raise StorageError(f"the journal is damaged: {self._store.address(name)} {damage[0]}")
        return data

    async def _write_compacted(self, snapshot: Compacted) -> None:
        """Until it is durable: what is archived counts from then on, and not before."""
        self.append(snapshot)
        while True:
            try:
                await self.flush()
                return
            except JournalRemovedError:
                raise
            except StorageError:
                await asyncio.sleep(_PAUSE_S)

    async def start_anew(self, records: Iterable[AnyRecord]) -> None:
        """Put a new beginning in place of what is damaged or gone: these records, and all that comes from
        now on. What was appended and not written must be among them.
        """
        async with self._flushing:
            if self._lost is not None:
                raise self._lost
            covered = len(self._waiting)
            data = b"".join(map(encode, records))
            number = self._next + bool(self._unsure)  # this one may have been used
            name = f"{_ARCHIVE}{number:010d}-{self._token()}"
            await self._store.create(name, data)
            among = [*self._unsure_of] if self._unsure else []
            among += [self._waiting.popleft()[0] for _ in range(covered)]
            old, archives = range(self._first, number), self._archives
            self._next = self._first = number
            self._archives = [name]
            self._unsure_of, self._unsure = among, encode(Compacted([name], number))
            await self._write_some()
            await self._delete_superseded([key_of(number) for number in old], archives)


# ---------------------------------------------------------------------- reading


class Scan:
    """A journal as it was at one time: what it says, and where the next object goes."""

    def __init__(self) -> None:
        self.archives: list[str] = []
        self.first = 1
        self.next = 1
        self.damage: list[str] = []
        """What is missing or can't be read."""
        self.listed: tuple[str, ...] = ()
        self.vanished: list[str] = []
        """What is listed and isn't there: it was deleted meanwhile, or the list lags behind."""
        self.past: list[str] = []
        """What says that there is more than was found: the list lags behind, or all of that is lost."""
        self._numbered: dict[int, list[AnyRecord]] = {}
        """What the numbered objects say that are there."""
        self._records: list[AnyRecord] = []

    @property
    def is_whole(self) -> bool:
        return not self.damage

    def records(self) -> Iterator[AnyRecord]:
        """Every record that can be read, in order."""
        return iter(self._records)

    async def read(self, store: AsyncStore) -> None:
        self.listed = _names(await store.list())
        listed = {*numbers_in(self.listed)}
        # An archive is made of all that came before its number: also where nothing of it is left.
        archived = max(_archived(self.listed), default=1)
        past = [int(found[1]) for name in self.listed if (found := _PAST_NUMBER.fullmatch(name))]
        self.next = max([archived - 1, *past, *listed]) + 1
        while (unlisted := await self._first_there(store, self.next, self.next + 1)) is not None:
            listed.add(unlisted)
            self.next = unlisted + 1
        snapshot: Compacted | None = None
        missing: list[int] = []
        number = self.next
        # From the end: whatever an archive holds may still be there as numbered objects, too.
        while (number := number - 1) >= self.first:
            may_be_unlisted = number not in listed and (snapshot is not None or number >= archived)
            if number not in listed and not (may_be_unlisted and await store.exists(key_of(number))):
                missing.append(number)
                continue
            self._numbered[number] = await self._read(store, key_of(number))
            if snapshot is None and (snapshot := _last_compacted(self._numbered[number])) is not None:
                self.first = snapshot.upto or number
        if snapshot is None and missing:
            snapshot = await self._without_snapshot(store)
        self._name_missing(store, [number for number in missing if number >= self.first])
        self.archives = [*snapshot.archives] if snapshot is not None else []
        for name in self.archives:
            self._records += await self._read(store, name)
        for number in sorted(self._numbered):
            if number >= self.first:
                self._records += self._numbered[number]
        # Also if the record by which the run was taken last is lost, and its number seems to be the next.
        ends = {*_archived(self.listed), *(number + 1 for number in (*self.openings, self.next))}
        for number in sorted(ends):
            if number >= self.first and await store.exists(past_of(number)):
                self.past.append(past_of(number))

    @property
    def is_outdated(self) -> bool:
        return bool(self.vanished or self.past)

    async def _first_there(self, store: AsyncStore, *numbers: int) -> int | None:
        """The first of these that is there. Where one is lost, what comes after it is no less there."""
        for number in numbers:
            if await store.exists(key_of(number)):
                return number
        return None

    @property
    def openings(self) -> set[int]:
        """The numbers at which the run was taken."""
        taken = {record.lease for record in self._records if isinstance(record, Opened)}
        return taken | {n for n, some in self._numbered.items() if any(isinstance(r, Opened) for r in some)}

    async def _without_snapshot(self, store: AsyncStore) -> Compacted | None:
        """What names the archives is lost. Those that are there still hold all that came before the number of
        the last. One that was put into a later one had only not been deleted yet.
        """
        archives = sorted(name for name in self.listed if _ARCHIVED.fullmatch(name))
        if not archives:
            return None
        self.first = max(_archived(archives))
        self._damaged(store, archives[-1], "is named by no record that can be read")
        found = {name: await store.read(name) for name in archives}
        self.vanished += [name for name, data in found.items() if data is None]
        read = [found[name] or b"" for name in archives]
        kept = [name for at, name in enumerate(archives) if not any(read[at] in it for it in read[at + 1 :])]
        return Compacted(kept, self.first)

    def has_only_grown(self, names: Sequence[str]) -> bool:
        """Whether this list of names goes on from ours. What comes and goes while a folder is listed may be
        missing from a list, although at every instant something is there.
        """
        newer = {*numbers_in(names)} - self._numbered.keys()
        archived = max(_archived(names), default=0)
        return (
            {*self.listed} <= {*names}
            and newer == {*range(self.next, self.next + len(newer))}
            and archived <= self.next + len(newer)
        )

    def _name_missing(self, store: AsyncStore, numbers: Sequence[int]) -> None:
        """From the highest down."""
        while numbers:
            many = next((n for n, number in enumerate(numbers) if number != numbers[0] - n), len(numbers))
            rest = f" to {key_of(numbers[0])}" if many > 1 else ""
            self._damaged(store, key_of(numbers[many - 1]) + rest, "is missing")
            numbers = numbers[many:]

    async def _read(self, store: AsyncStore, name: str) -> list[AnyRecord]:
        data = await store.read(name)
        if data is None:
            self._damaged(store, name, "is missing")
            if name in self.listed:
                self.vanished.append(name)
            return []
        return [*decode(data, lambda damage: self._damaged(store, name, damage))]

    def _damaged(self, store: AsyncStore, name: str, damage: str) -> None:
        self.damage.append(f"{store.address()}/{name} {damage}")


async def scan_journal(store: AsyncStore) -> Scan:
    """Read a journal while its owner may be compacting it: what was listed is then in an archive by now. What
    is missing in two looks between which nothing has changed is missing for good, unless it is listed: then
    the list lags behind.
    """
    before: Scan | None = None
    for _ in range(_LOOKS):
        scan = Scan()
        await scan.read(store)
        settled = scan.is_whole and not scan.is_outdated and scan.has_only_grown(_names(await store.list()))
        unchanged = before is not None and (scan.damage, scan.listed) == (before.damage, before.listed)
        if settled or (unchanged and not scan.is_outdated):
            return scan
        before = scan
    return scan


def _names(files: Sequence[FileRecord]) -> tuple[str, ...]:
    return tuple(file.path for file in files)


def _archived(names: Sequence[str]) -> list[int]:
    """The numbers at which archives were made."""
    return [int(found[1]) for name in names if (found := _ARCHIVED.fullmatch(name))]


def _last_compacted(records: Iterable[AnyRecord]) -> Compacted | None:
    snapshots = [record for record in records if isinstance(record, Compacted)]
    return snapshots[-1] if snapshots else None


def read(run: Store | Path | str) -> Iterator[AnyRecord]:
    """Every record of a run that can be read, in order."""
    store = open_store(str(run)) if isinstance(run, Path | str) else run
    return complete(scan_journal(ImmediateStore(store).child(FOLDER))).records()
