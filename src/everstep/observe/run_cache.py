"""The runs that a server shows, each read on as its journal grows. Any thread may ask."""

from __future__ import annotations

import threading
import time
from typing import Any

from everstep.errors import EverstepError, JournalFormatError, NoRunError
from everstep.observe import actions, usage
from everstep.observe.page import as_json
from everstep.observe.registry import LiveRun, LiveWorker, live_runs
from everstep.observe.view import RunView
from everstep.storage.store import Store, open_store

REFRESH_S = 0.5
"""A journal in a folder is not read more often."""
REMOTE_REFRESH_S = 5.0
"""One in a bucket: every time takes a request or two, which somebody pays for."""
_ENDED = 10
"""A run that has ended may be resumed. Its journal is read more rarely, by this factor."""


class CachedRun:
    """One run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._view = RunView(store)
        self._lock = threading.Lock()
        self._refreshed: float | None = None
        self._version = 0
        self._error: EverstepError | None = None
        self._made: tuple[object, bytes] = (None, b"")
        self.cost_s = 0.0
        """What it takes to put its page together."""
        self._workers = WorkersNow()

    def version(self) -> tuple[int, str]:
        """Another one whenever there is something new."""
        with self._lock:
            self._refresh()
            return self._mark()

    def page(self) -> bytes:
        """As JSON."""
        with self._lock:
            self._refresh()
            self._check()
            if self._made[0] != self._mark():
                began = time.monotonic()
                self._made = (self._mark(), as_json(self._view.as_plain()).encode())
                self.cost_s = time.monotonic() - began
            return self._made[1]

    def summary(self) -> dict[str, Any] | None:
        """For a list; ``None`` if it is no run."""
        with self._lock:
            self._refresh()
            if self._error is None and not self._view.facts.is_run:
                return None
            self._check()
            return self._view.summary()

    def stop(self) -> str:
        with self._lock:
            self._refresh()
            self._check()
            return actions.request_stop(self._view.facts)

    def live(self) -> LiveRun:
        """Its processes on this machine."""
        with self._lock:
            self._refresh()
            self._check()
            name = self._view.facts.opened[-1].name
        live = actions.live_run(name)
        if live.folder != self._store.address():
            raise actions.ActionError(f"the run that is live here as {name} is another one: {live.folder}")
        return live

    def usage(self) -> bytes:
        """What its workers on this machine do and use, as JSON; empty, if it isn't live here."""
        try:
            workers = self.live().workers
        except EverstepError:
            return b""
        with self._lock:
            return as_json(self._workers.usage(workers)).encode()

    def _refresh(self) -> None:
        if isinstance(self._error, JournalFormatError):
            return  # that doesn't pass
        if self._refreshed is not None and time.monotonic() - self._refreshed < self._pause_s():
            return
        try:
            self._version += self._view.refresh()
            self._error = None
        except EverstepError as error:
            self._error = error
        self._refreshed = time.monotonic()

    def _pause_s(self) -> float:
        pause_s = REFRESH_S if self._store.is_local else REMOTE_REFRESH_S
        return pause_s * (_ENDED if self._view.facts.history.outcome else 1)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._view.facts.is_run:
            raise NoRunError(f"{self._store.address()} is not a run: it has no journal")

    def _mark(self) -> tuple[int, str]:
        facts = self._view.facts
        return self._version, str(self._error or (facts.state if facts.is_run else ""))


class WorkersNow:
    """What workers use, between one sample and the next. All pages that ask in between get the same."""

    def __init__(self) -> None:
        self._before: dict[int, usage.UsageSample] = {}
        self._sampled: float | None = None
        self._found: dict[str, Any] = {}

    def usage(self, workers: list[LiveWorker]) -> dict[str, Any]:
        if self._sampled is None or time.monotonic() - self._sampled >= REFRESH_S:
            now = usage.sample(workers)
            rows = usage.between(self._before, now)
            self._before, self._sampled = now, time.monotonic()
            self._found = {"workers": [_plain(row) for row in rows], "elsewhere": len(workers) - len(now)}
        return self._found


def _plain(row: usage.Usage) -> dict[str, Any]:
    return {
        "rank": row.worker.rank,
        "slice": row.worker.slice,
        "host": row.worker.host,
        "doing": row.doing,
        "reports": row.reports,
        "rate": row.reports_per_s,
        "processors": row.processors,
        "memory": row.memory,
        "gpus": row.gpu._asdict() if row.gpu is not None else None,
    }


class RunCache:
    """The runs under a storage path; or, without one, the user's own and those that are live here."""

    def __init__(self, storage: str, *, with_live: bool) -> None:
        self._store = open_store(storage)
        self._with_live = with_live
        self._cached: dict[str, CachedRun] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._store.address()

    def run(self, name: str) -> CachedRun:
        """One of those that are listed: a request can't name another place."""
        found = self._found()
        if name not in found:
            raise NoRunError(f"there is no run {name!r} in {self.address}")
        return found[name]

    def version(self) -> tuple[Any, ...]:
        return tuple((name, cached.version()) for name, cached in self._found().items())

    def page(self) -> bytes:
        runs: list[dict[str, Any]] = []
        for name, cached in self._found().items():
            try:
                summary = cached.summary()
            except EverstepError as error:
                runs.append({"id": name, "name": name, "error": str(error)})
                continue
            if summary is not None:
                runs.append({**summary, "id": name})
        runs.sort(key=lambda run: -(run.get("written") or 0.0))
        return as_json({"address": self.address, "runs": runs}).encode()

    def _found(self) -> dict[str, CachedRun]:
        stores = {name: self._store.child(name) for name in self._store.folders()}
        if self._with_live:
            known = {store.address() for store in stores.values()}
            live = [run.folder for run in live_runs().values() if run.folder not in known]
            stores |= {folder: open_store(folder) for folder in live}
        with self._lock:
            self._cached = {
                name: self._cached.get(name) or CachedRun(store) for name, store in stores.items()
            }
            return dict(self._cached)
