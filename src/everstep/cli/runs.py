"""What there is to know about runs, from their storage alone: ``runs``, ``show``, ``events`` and ``stop``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from everstep.driver.history import History
    from everstep.driver.records import AnyRecord
    from everstep.storage.store import Store

_POLL_S = 0.5
_SHOWN = 5
"""So many of a run's checkpoints are shown, the newest."""


class RunCommand(click.Command):
    """A command whose errors are told in a line."""

    def invoke(self, ctx: click.Context) -> Any:
        from everstep.errors import EverstepError

        try:
            return super().invoke(ctx)
        except EverstepError as error:
            raise click.ClickException(str(error)) from error


# ---------------------------------------------------------------------- reading


class Tail:
    """A journal, read on and on while its driver writes it and puts old objects together.

    Compaction keeps the order of records, and only adds to their number. So where the next object was put
    away before we read it, everything is read again, and as many as we had are skipped.
    """

    def __init__(self, run: Store) -> None:
        from everstep.driver import journal

        self._log = run.child(journal.FOLDER)
        self._next = 1
        self._seen = 0

    def news(self) -> Iterator[AnyRecord]:
        """The records since the last call, or all."""
        from everstep.driver import journal, records
        from everstep.storage.asynchronous import ImmediateStore, complete

        while True:
            data = self._log.read(journal.key_of(self._next))
            if data is not None:
                fresh = list(records.decode(data))
                self._next += 1
            elif journal.numbers_in(f.path for f in self._log.list(after=journal.key_of(self._next))):
                scan = complete(journal.scan_journal(ImmediateStore(self._log)))
                fresh, self._next = list(scan.records())[self._seen :], scan.next
            else:
                return
            self._seen += len(fresh)
            yield from fresh


class Clock:
    """UNIX time of records: each driver counts from a start of its own, which ``Opened`` tells."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def of(self, record: AnyRecord) -> float | None:
        from everstep.driver.records import Opened

        if isinstance(record, Opened):
            self._offset = record.wall - record.at
        at = getattr(record, "at", None)
        return None if at is None or self._offset is None else self._offset + at


class Facts:
    """What a journal says, as ``runs`` and ``show`` tell it."""

    def __init__(self, run: Store) -> None:
        from everstep.control.commands import Recovered, RecoveryDecided
        from everstep.driver import records
        from everstep.driver.history import History

        self.run = run
        self.history: History = History()
        self.opened: list[records.Opened] = []
        self.limits: dict[str, int] = {}
        self.recoveries: list[tuple[float | None, Recovered]] = []
        self.written: float | None = None
        clock = Clock()
        for record in Tail(run).news():
            self.history.apply(record)
            when = clock.of(record)
            self.written = when if when is not None else self.written
            match record:
                case records.Opened():
                    self.opened.append(record)
                case RecoveryDecided():
                    self.limits[record.budget] = record.limit
                case Recovered():
                    self.recoveries.append((when, record))
                case _:
                    pass
        if run.is_local:
            self.written = _changed(run) or self.written  # metrics alone carry no time

    @property
    def is_run(self) -> bool:
        return self.history.owner is not None

    @property
    def is_interrupted(self) -> bool:
        """Nobody closed it, and its driver is proven dead."""
        from everstep.driver.lease import is_dead

        owner = self.history.owner
        return owner is not None and not self.history.outcome and is_dead(owner)

    @property
    def state(self) -> str:
        if self.history.outcome:
            return self.history.outcome
        if self.is_interrupted:
            return "interrupted"
        return f"running under lease {self.history.lease} by {self.history.owner}"


def _changed(run: Store) -> float | None:
    import os

    from everstep.driver import journal

    try:
        return os.stat(run.address(journal.FOLDER)).st_mtime
    except OSError:
        return None


def find_run(text: str) -> Facts:
    """The run that a user means: by its address, or by a name that leaves no doubt."""
    from everstep.config import DEFAULT_STORAGE_PATH
    from everstep.driver.registry import live_runs
    from everstep.storage.store import open_store

    places = [text]
    bare = "/" not in text and text not in ("", ".", "..", "~")
    if bare:
        live = live_runs().get(text)
        places += [live.folder] if live is not None else []
        places.append(f"{DEFAULT_STORAGE_PATH}/{text}")
    stores = {store.address(): store for store in map(open_store, places)}
    found = [facts for facts in map(Facts, stores.values()) if facts.is_run]
    if len(found) > 1:
        raise click.ClickException(
            f"several runs are called {text}; give the address of one: "
            + ", ".join(facts.run.address() for facts in found)
        )
    if not found:
        looked = f" (looked in {', '.join(stores)})" if bare else ""
        raise click.ClickException(
            f"{text} is not a run: it has no journal{looked}. "
            "Give the address of its folder, storage_path/name; `everstep runs STORAGE` lists them"
        )
    return found[0]


# ---------------------------------------------------------------------- commands


@click.command(cls=RunCommand)
@click.argument("storage")
def runs(storage: str) -> None:
    """The runs under a storage path, and how they stand.

    STORAGE is what RunConfig(storage_path=…) was: a folder, or s3://bucket/prefix and the like.
    """
    from everstep.storage.store import open_store

    store = open_store(storage)
    rows = []
    for name in store.folders():
        facts = Facts(store.child(name))
        if not facts.is_run:
            continue
        history = facts.history
        newest = history.newest
        rows.append(
            [
                name,
                facts.state,
                str(history.last_epoch),
                str(len(history.checkpoints)),
                newest.ref.folder if newest is not None else "-",
                str(len(history.metrics)),
                _stamp(facts.written),
            ]
        )
    if not rows:
        click.echo(f"No run is in {store.address()}.", err=True)
        return
    heads = ["NAME", "STATE", "EPOCHS", "CHECKPOINTS", "NEWEST", "METRICS", "LAST WRITTEN"]
    for line in _table([heads, *rows], right={2, 3, 5}):
        click.echo(line)


@click.command(cls=RunCommand)
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="State and ledger as JSON.")
def show(run: str, as_json: bool) -> None:
    """One run: its state, where its time went, its checkpoints, and what it recovered from.

    RUN is the address of a run's folder, storage_path/name; or the name alone, for one that is live on this
    machine or in ~/everstep_results.
    """
    import msgspec

    from everstep.driver.display import describe_recovery

    facts = find_run(run)
    if as_json:
        click.echo(_as_json(facts))
        return
    history, opened = facts.history, facts.opened[-1]
    least, most = opened.workers_min, opened.workers_max
    lines = [
        ("run", opened.name),
        ("address", facts.run.address()),
        ("state", facts.state),
    ]
    if history.outcome == "failed":
        lines.append(("first cause", history.message or "unknown"))
    elif history.outcome and history.message not in ("", history.outcome):
        lines.append(("message", history.message))
    elif facts.is_interrupted:
        lines.append(("", f"{history.owner}, its driver, is gone: the same script again resumes it"))
    lines += [
        ("first opened", _stamp(facts.opened[0].wall)),
        ("last written", _stamp(facts.written)),
        ("workers", f"{least}" if least == most else f"{least} to {most}"),
        ("epochs", str(history.last_epoch)),
        ("drivers", str(len(facts.opened))),
    ]
    lines += [
        ("budget", f"{budget}: {spent} spent{_limit(facts.limits.get(budget))}")
        for budget, spent in history.spent.items()
    ] or [("budget", "no recovery so far")]
    lines.append(("goodput", _time_spent(history)))
    rows = history.metrics
    metrics = f"{len(rows)} rows"
    if rows:
        metrics += f"; the last: {_metrics(msgspec.msgpack.decode(rows[-1]))}"
    lines.append(("metrics", metrics))
    for head, text in lines:
        _say(f"{head:13} {text}")

    kept = sorted(history.checkpoints.values(), key=lambda k: (k.ref.epoch, k.ref.index))
    newest = f", the newest {_SHOWN}" if len(kept) > _SHOWN else ""
    click.echo(f"\ncheckpoints: {len(kept)}{newest}")
    table = [[each.ref.folder, _metrics(each.metrics), each.external or ""] for each in kept[-_SHOWN:]]
    for line in _table(table):
        _say(f"  {line}")
    if history.damaged:
        _say(f"  damaged, no longer used: {', '.join(sorted(history.damaged))}")
    click.echo(f"\nrecoveries: {len(facts.recoveries)}")
    for when, recovery in facts.recoveries:
        _say(f"  {_stamp(when)}  {describe_recovery(recovery)}")


def _time_spent(history: History) -> str:
    ledger = history.ledger.until()
    shares = [(ledger.share(category), category.value) for category in ledger.total]
    rest = ", ".join(f"{name} {100 * share:.1f} %" for share, name in shares[1:] if share > 0)
    return f"{100 * ledger.goodput:.1f} %" + (f"; {rest}" if rest else "")


def _as_json(facts: Facts) -> str:
    """The ledger in seconds times workers, by our categories and by the names of ml-goodput-measurement."""
    import json

    ledger = facts.history.ledger.until()
    found = {
        "run": facts.opened[-1].name,
        "address": facts.run.address(),
        "state": facts.state,
        "goodput": ledger.goodput,
        "seconds": {category.value: seconds for category, seconds in ledger.total.items()},
        "badput": ledger.badput(),
    }
    return json.dumps(found)


@click.command(cls=RunCommand)
@click.argument("run")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written, until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines: each record with its type and fields.")
def events(run: str, follow: bool, as_json: bool) -> None:
    """Everything that a run's journal has, in order.

    RUN is the address of a run's folder, storage_path/name; or the name alone, for one that is live on this
    machine or in ~/everstep_results.
    """
    from everstep.driver.records import Closed, Opened

    tail, clock = Tail(find_run(run).run), Clock()
    closed = False
    try:
        while True:
            for record in tail.news():
                closed = isinstance(record, Closed) or (closed and not isinstance(record, Opened))
                when = clock.of(record)
                if as_json:
                    click.echo(to_json(record, when))
                else:
                    _say(f"{_stamp(when):19}  {in_words(record)}")
            if closed or not follow:
                return
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        if not follow:
            raise


@click.command(cls=RunCommand)
@click.argument("run")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it has ended.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait.",
)
def stop(run: str, wait: bool, timeout: float) -> None:
    """Ask a run to stop, from any machine that reaches its storage.

    Its driver asks the workers for a last checkpoint, gives them a moment for it, and ends them. The same
    script again resumes the run.

    RUN is the address of a run's folder, storage_path/name; or the name alone, for one that is live on this
    machine or in ~/everstep_results.
    """
    from everstep.driver.housekeeping import stop_request

    facts = find_run(run)
    history, name = facts.history, facts.opened[-1].name
    if history.outcome:
        raise click.ClickException(f"{name} has ended already: {history.outcome}")
    if facts.is_interrupted:
        raise click.ClickException(
            f"nobody drives {name}: {history.owner} is gone. Running the script again resumes it; "
            "workers that it left behind end by themselves after their orphan time-out"
        )
    # Twice the same bytes: who asks again is told the same.
    facts.run.create(stop_request(history.lease), b"stop\n")
    if not wait:
        click.echo(f"asked {history.owner} to stop {name}")
        return
    click.echo(f"waiting for {history.owner} to stop {name} (at most {timeout:g} s)", err=True)
    _await_end(facts, name, timeout)


def _await_end(facts: Facts, name: str, timeout: float) -> None:
    from everstep.driver.history import History
    from everstep.driver.lease import is_dead

    tail, history, lease = Tail(facts.run), History(), facts.history.lease
    deadline = time.monotonic() + timeout
    while True:
        # Before the look: what it wrote before its death is seen.
        dead = facts.history.owner is not None and is_dead(facts.history.owner)
        for record in tail.news():
            history.apply(record)
            if history.lease == lease and history.outcome:
                _say(f"{name} has ended: {_ended(history.outcome, history.message)}")
                return
        if history.lease > lease:
            raise click.ClickException(
                f"{name} was taken over by {history.owner} meanwhile, which was not asked to stop"
            )
        if dead:
            raise click.ClickException(
                f"{history.owner} died without ending {name}. Running the script again resumes it; workers "
                "that it left behind end by themselves after their orphan time-out"
            )
        if time.monotonic() >= deadline:
            raise click.ClickException(
                f"{name} has not ended within {timeout:g} s. The request stays: its driver stops it when it "
                "sees that, if it lives"
            )
        time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))


# ---------------------------------------------------------------------- in words, and in JSON


def in_words(record: AnyRecord) -> str:
    """A record as one line."""
    import msgspec

    from everstep.control import commands as c
    from everstep.driver import records
    from everstep.driver.display import count, describe

    match record:
        case records.Opened():
            least, most = record.workers_min, record.workers_max
            workers = f"{least}" if least == most else f"{least} to {most}"
            return (
                f"opened by {record.owner} under lease {record.lease}; "
                f"{workers} workers, everstep {record.version}"
            )
        case records.Renewed():
            return "driver heartbeat"
        case records.TakenOver():
            return f"took over the workers of epoch {record.epoch}, which never stopped"
        case records.Committed():
            metrics = _metrics(msgspec.msgpack.decode(record.metrics))
            where = f" at {record.external}" if record.external else ""
            return f"committed {record.folder}{where}: {metrics}"
        case records.Deleted():
            return f"deleted {record.folder}"
        case records.Damaged():
            return f"{record.folder} can't be restored any more: {record.reason}"
        case records.Metrics():
            last = record.first + len(record.rows) - 1
            which = f"report {last}" if last == record.first else f"reports {record.first} to {last}"
            newest = f": {_metrics(msgspec.msgpack.decode(record.rows[-1]))}" if record.rows else ""
            return f"epoch {record.epoch}: {which}{newest}"
        case records.Closed():
            return f"ended: {_ended(record.outcome, record.message)}"
        case records.Snapshot():
            return f"what came before is in {count(len(record.archives), 'archive')} now"
        case c.PhaseChanged():
            return f"epoch {record.epoch}: {record.phase}"
        case c.CheckpointKept():
            return f"keeping {record.folder}"
        case c.FailureSeen() if record.failure.echo:
            return describe(c.FailureSeen(record.at, msgspec.structs.replace(record.failure, echo=False))) + (
                " (as a consequence)"
            )
        case _:
            return describe(record) or _tag(record)


def to_json(record: AnyRecord, when: float | None) -> str:
    """A record as a line of JSON: its type, its UNIX time where it has one, and all of its fields."""
    import json

    import msgspec

    from everstep.driver import records

    fields = msgspec.structs.asdict(record)
    match record:
        case records.Committed():
            fields["metrics"] = msgspec.msgpack.decode(record.metrics)
        case records.Metrics():
            fields["rows"] = [msgspec.msgpack.decode(row) for row in record.rows]
        case records.Closed() if record.value is not None:
            fields["value"] = msgspec.msgpack.decode(record.value)
        case _:
            pass
    plain = _finite(msgspec.to_builtins(fields, str_keys=True))
    return json.dumps({"type": _tag(record), "time": when, **plain}, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are the strings that JavaScript and Python's float() read."""
    match value:
        case float():
            if value != value:
                return "NaN"
            if value in (float("inf"), float("-inf")):
                return "Infinity" if value > 0 else "-Infinity"
            return value
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


def _tag(record: AnyRecord) -> str:
    return str(record.__struct_config__.tag)


def _ended(outcome: str, message: str) -> str:
    return f"{outcome}: {message}" if message not in ("", outcome) else outcome


def _limit(limit: int | None) -> str:
    return "" if limit is None else ", no limit" if limit < 0 else f" of {limit}"


def _metrics(metrics: dict[str, Any]) -> str:
    said = ", ".join(
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in metrics.items()
    )
    return (said if len(said) <= 200 else said[:199] + "…") or "no metrics"


def _stamp(when: float | None) -> str:
    return "" if when is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _say(text: str) -> None:
    """One line, whatever a message has in it: no line breaks, and nothing that steers a terminal."""
    click.echo("".join(char if char.isprintable() else " " for char in text).rstrip())


def _table(rows: list[list[str]], right: set[int] | None = None) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in (right or ()) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


COMMANDS = (runs, show, events, stop)
