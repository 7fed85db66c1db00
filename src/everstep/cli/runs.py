"""What there is to know about runs, from their storage alone: ``runs``, ``show``, ``events`` and ``stop``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from everstep.journal.history import History
    from everstep.observe.reading import Facts

_POLL_S = 0.5
_SHOWN = 5
"""How many of a run's checkpoints are shown: the newest ones."""


class RunCommand(click.Command):
    """A command whose errors are printed as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        from everstep.errors import EverstepError

        try:
            return super().invoke(ctx)
        except EverstepError as error:
            raise click.ClickException(str(error)) from error


@click.command(cls=RunCommand)
@click.argument("storage", required=False)
def runs(storage: str | None) -> None:
    """The runs under a storage path, and how they stand.

    STORAGE is what RunConfig(storage_path=…) was: a folder, or s3://bucket/prefix and the like. By default
    it is ~/everstep_results.
    """
    from everstep.config import DEFAULT_STORAGE_PATH
    from everstep.observe.reading import read_facts
    from everstep.storage.store import open_store

    store = open_store(storage or DEFAULT_STORAGE_PATH)
    if storage and store.is_local and not Path(store.address()).is_dir():
        raise click.ClickException(f"there is no folder {store.address()}")
    rows = []
    for name in store.folders():
        facts = read_facts(store.child(name))
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
    heads = ["NAME", "STATE", "ATTEMPTS", "CHECKPOINTS", "NEWEST", "REPORTS", "LAST WRITTEN"]
    for line in _table([heads, *rows], right={2, 3, 5}):
        click.echo(line)


@click.command(cls=RunCommand)
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="State and ledger as JSON.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a page there: timeline, incidents, metrics, checkpoints and ledger, in one file.",
)
def show(run: str, as_json: bool, html: Path | None) -> None:
    """One run: state, cause, goodput, checkpoints, recoveries.

    RUN is the address of a run's folder, storage_path/name; or the name alone, for one that is live on this
    machine or in ~/everstep_results.
    """
    import msgspec

    from everstep.observe.display import describe_recovery, describe_straggler
    from everstep.observe.lines import metrics_in_words
    from everstep.observe.reading import find_run

    facts = find_run(run)
    if html is not None:
        _write_page(facts, html)
        return
    if as_json:
        click.echo(_as_json(facts))
        return
    history, opened = facts.history, facts.opened[-1]
    least, most = opened.workers_min, opened.workers_max
    lines = [
        ("run", opened.name),
        ("address", facts.store.address()),
        ("state", facts.state),
    ]
    if history.outcome == "failed":
        lines.append(("first cause", history.message or "unknown"))
    elif history.outcome and history.message not in ("", history.outcome):
        lines.append(("message", history.message))
    elif facts.is_interrupted:
        lines += [("", line) for line in _interrupted(facts)]
    lines += [
        ("first opened", _stamp(facts.opened[0].wall)),
        ("last written", _stamp(facts.written)),
        ("workers", f"{least}" if least == most else f"{least} to {most}"),
        ("attempts", str(history.last_epoch)),
        ("drivers", str(len(facts.opened))),
    ]
    if opened.metrics_url and not history.outcome and not facts.is_interrupted:
        lines.append(("prometheus", f"{opened.metrics_url} of {history.owner}"))
    lines += [
        ("budget", f"{budget}: {spent} spent{_limit(facts.limits.get(budget))}")
        for budget, spent in history.spent.items()
    ] or [("budget", "no recovery so far")]
    lines.append(("goodput", _time_spent(history)))
    lines += [("straggler", describe_straggler(one)) for one in history.slow(history.last_epoch)]
    rows = history.metrics
    reports = f"{len(rows)}"
    if rows:
        reports += f"; the last: {metrics_in_words(msgspec.msgpack.decode(rows[-1]))}"
    lines.append(("reports", reports))
    for head, text in lines:
        _say(f"{head:13} {text}")

    kept = sorted(history.checkpoints.values(), key=lambda k: (k.ref.epoch, k.ref.index))
    newest = f", the newest {_SHOWN}" if len(kept) > _SHOWN else ""
    click.echo(f"\ncheckpoints: {len(kept)}{newest}")
    table = [
        [each.ref.folder, metrics_in_words(each.metrics), each.external or ""] for each in kept[-_SHOWN:]
    ]
    for line in _table(table):
        _say(f"  {line}")
    if history.damaged:
        _say(f"  damaged, no longer used: {', '.join(sorted(history.damaged))}")
    click.echo(f"\nrecoveries: {len(facts.recoveries)}")
    for when, recovery in facts.recoveries:
        _say(f"  {_stamp(when)}  {describe_recovery(recovery)}")


def _interrupted(facts: Facts) -> list[str]:
    gone = f"{facts.history.owner}, its driver, is gone: the same command again"
    if not facts.workers_left:
        return [f"{gone} resumes it"]
    return [
        f"{gone} takes its workers over, and no step is lost",
        "they end by themselves after Deadlines.orphan_s (300 s by default)",
    ]


def _write_page(facts: Facts, target: Path) -> None:
    from everstep.observe.page import static_page
    from everstep.observe.view import RunView

    view = RunView(facts.store)
    view.refresh()
    try:
        target.write_text(static_page(view.as_plain()), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"can't write {target}: {error.strerror}") from error
    click.echo(f"wrote {target}")


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
        "address": facts.store.address(),
        "state": "interrupted" if facts.is_interrupted else facts.state,
        "workers_left": facts.workers_left,
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
    from everstep.journal.records import Closed, Opened
    from everstep.observe.lines import in_words, to_json
    from everstep.observe.reading import JournalClock, Tail, find_run

    tail, clock = Tail(find_run(run).store), JournalClock()
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
    from everstep.observe.actions import request_stop
    from everstep.observe.reading import find_run

    facts = find_run(run)
    history, name = facts.history, facts.opened[-1].name
    asked = request_stop(facts)
    if not wait:
        click.echo(asked)
        return
    click.echo(f"waiting for {history.owner} to stop {name} (at most {timeout:g} s)", err=True)
    _await_end(facts, name, timeout)


def _await_end(facts: Facts, name: str, timeout: float) -> None:
    from everstep.journal.history import History
    from everstep.journal.lease import is_dead
    from everstep.observe.lines import ending_in_words
    from everstep.observe.reading import Tail

    tail, history, lease = Tail(facts.store), History(), facts.history.lease
    deadline = time.monotonic() + timeout
    while True:
        # Before reading: what it wrote before its death is read, then.
        dead = facts.history.owner is not None and is_dead(facts.history.owner)
        for record in tail.news():
            history.apply(record)
            if history.lease == lease and history.outcome:
                _say(f"{name} has ended: {ending_in_words(history.outcome, history.message)}")
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


def _limit(limit: int | None) -> str:
    return "" if limit is None else ", no limit" if limit < 0 else f" of {limit}"


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
