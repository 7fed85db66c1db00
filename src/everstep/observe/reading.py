"""Runs as their journals have them: found by address or name, read once or on and on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from everstep.config import DEFAULT_STORAGE_PATH
from everstep.control.commands import Recovered, RecoveryDecided
from everstep.errors import JournalFormatError, NoRunError
from everstep.journal import journal, records
from everstep.journal.history import History
from everstep.journal.lease import is_dead
from everstep.journal.records import AnyRecord
from everstep.observe.registry import live_runs, workers_left
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.store import Store, open_store

_LOOKED_AT, _NAMED = 50, 5
"""Folders of a storage path in which runs are looked for, and how many of them are named."""


class Tail:
    """A journal, read on and on while its driver writes it and puts old objects together.

    Compaction keeps the order of records, and only adds to their number. So where the next object was put
    away before we read it, everything is read again, and the records that we had are skipped.
    """

    def __init__(self, store: Store) -> None:
        self._log = store.child(journal.FOLDER)
        self._next = 1
        self._seen = 0
        self.damage: list[str] = []
        """What is missing or can't be read."""

    def news(self) -> Iterator[AnyRecord]:
        """The records since the last call, or all."""
        while True:
            name = journal.key_of(self._next)
            data = self._log.read(name)
            if data is not None:
                fresh = list(records.decode(data, lambda what, name=name: self._note(f"{name} {what}")))  # type: ignore[misc]
                self._next += 1
            elif journal.numbers_in(f.path for f in self._log.list(after=name)):
                scan = complete(journal.scan_journal(ImmediateStore(self._log)))
                fresh, self._next = list(scan.records())[self._seen :], scan.next
                self.damage = [damage.removeprefix(f"{self._log.address()}/") for damage in scan.damage]
            else:
                return
            self._seen += len(fresh)
            yield from fresh

    def _note(self, damage: str) -> None:
        if damage not in self.damage:
            self.damage.append(damage)


class JournalClock:
    """UNIX time of records: each driver counts from a start of its own, which is in ``Opened``."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def of(self, record: AnyRecord) -> float | None:
        if isinstance(record, records.Opened):
            self._offset = record.wall - record.at
        at = getattr(record, "at", None)
        return None if at is None else self.at(at)

    def at(self, at: float) -> float | None:
        """An instant of the driver that wrote last."""
        return None if self._offset is None else self._offset + at


class Facts:
    """What a journal says, as ``runs`` and ``show`` print it. Only ``news`` reads from it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.history: History = History()
        self.opened: list[records.Opened] = []
        self.limits: dict[str, int] = {}
        self.recoveries: list[tuple[float | None, Recovered]] = []
        self.clock = JournalClock()
        self._tail = Tail(store)
        self.newest: float | None = None
        """Of the last record that has a time."""

    def news(self) -> Iterator[tuple[AnyRecord, float | None]]:
        """Read what was written since the last call. Yields each record, once it is taken in, with its UNIX
        time.
        """
        for record in self._tail.news():
            self._apply(record)
            when = self.clock.of(record)
            self.newest = when if when is not None else self.newest
            match record:
                case records.Opened():
                    self.opened.append(record)
                case RecoveryDecided():
                    self.limits[record.budget] = record.limit
                case Recovered():
                    self.recoveries.append((when, record))
                case _:
                    pass
            yield record, when

    def _apply(self, record: AnyRecord) -> None:
        try:
            self.history.apply(record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JournalFormatError(
                f"the journal of {self.store.address()} has metrics that can't be read: {error}",
                "Everstep did not write it like that; its checkpoints can be read as Checkpoint(path)",
            ) from error

    @property
    def written(self) -> float | None:
        """When it was last written to. Metrics have no time of their own: a folder's time stamp says it."""
        return (_changed(self.store) if self.store.is_local else None) or self.newest

    @property
    def damage(self) -> list[str]:
        """Objects of the journal that are missing or can't be read."""
        return self._tail.damage

    @property
    def is_run(self) -> bool:
        return self.history.owner is not None

    @property
    def is_interrupted(self) -> bool:
        """Nobody closed it, and its driver is proven dead."""
        owner = self.history.owner
        return owner is not None and not self.history.outcome and is_dead(owner)

    @property
    def workers_left(self) -> int:
        """Workers that train on although their driver has died, as far as this machine knows."""
        return workers_left(self.store.address()) if self.is_interrupted else 0

    @property
    def state(self) -> str:
        if self.history.outcome:
            return self.history.outcome
        if self.is_interrupted:
            left = self.workers_left
            train = "1 worker trains on" if left == 1 else f"{left} workers train on"
            return f"interrupted, {train}" if left else "interrupted"
        return f"running under lease {self.history.lease} by {self.history.owner}"


def _changed(store: Store) -> float | None:
    try:
        return os.stat(store.address(journal.FOLDER)).st_mtime
    except OSError:
        return None


def read_facts(store: Store) -> Facts:
    """All that its journal has by now."""
    facts = Facts(store)
    for _ in facts.news():
        pass
    return facts


def _runs_in(storage: Store) -> list[str]:
    """The addresses of a few runs under this path."""
    children = [storage.child(name) for name in storage.folders()[:_LOOKED_AT]]
    return [child.address() for child in children if child.child(journal.FOLDER).list()][:_NAMED]


def find_run(text: str) -> Facts:
    """The run that a user means: by its address, or by a name that leaves no doubt."""
    places = [text]
    bare = "/" not in text and text not in ("", ".", "..", "~")
    if bare:
        live = live_runs().get(text)
        places += [live.folder] if live is not None else []
        places.append(f"{DEFAULT_STORAGE_PATH}/{text}")
    stores = {store.address(): store for store in map(open_store, places)}
    found = [facts for facts in map(read_facts, stores.values()) if facts.is_run]
    if len(found) > 1:
        raise NoRunError(
            f"several runs are called {text}; give the address of one: "
            + ", ".join(facts.store.address() for facts in found)
        )
    if not found:
        for store in stores.values():
            if inside := _runs_in(store):
                raise NoRunError(
                    f"{text} is not a run, but a storage path with runs in it.",
                    f"Give the address of one: {', '.join(inside)}",
                )
        looked = f" (looked in {', '.join(stores)})" if bare else ""
        raise NoRunError(
            f"{text} is not a run: it has no journal{looked}.",
            "Give the address of its folder, storage_path/name; `everstep runs STORAGE` lists them",
        )
    return found[0]
