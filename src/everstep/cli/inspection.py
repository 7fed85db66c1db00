"""What workers do, use and print, now: ``stacks``, ``top``, ``logs``; and what may go wrong: ``doctor``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep.cli.runs import RunCommand
from everstep.wording import named

if TYPE_CHECKING:
    from rich.table import Table

    from everstep.observe.registry import LiveWorker
    from everstep.observe.usage import Usage
    from everstep.process.gpus import GpuUse
    from everstep.protocol.stacks import Stacks

_POLL_S = 0.5
_WIDE = 160


@click.command(cls=RunCommand)
@click.argument("run")
@click.option("--threads", is_flag=True, help="Every thread, not only the main one.")
def stacks(run: str, threads: bool) -> None:
    """Where the workers of a run are now: their Python stacks.

    Equal stacks are shown together, the rarest first. RUN is the name of a run on this machine (see
    `everstep ps`). Workers on other machines are left out.
    """
    import asyncio

    from everstep.observe import actions

    live = actions.live_run(run)
    workers = sorted((w for w in live.workers if w.alive), key=lambda worker: worker.rank)
    found = asyncio.run(_take(workers))
    for ranks, taken in _grouped(found):
        click.echo(f"=== {named('rank', ranks)}\n")
        click.echo(_text(taken, threads) + "\n")
    missing = [str(w.rank) for w in live.workers if not w.alive]
    if missing:
        click.echo(f"not on this machine, or gone: rank {', '.join(missing)}", err=True)


async def _take(workers: list[LiveWorker]) -> dict[int, Stacks]:
    import asyncio

    taken = await asyncio.gather(*(_take_one(worker) for worker in workers))
    return {worker.rank: one for worker, one in zip(workers, taken, strict=True)}


async def _take_one(worker: LiveWorker) -> Stacks:
    from everstep.agent.watch import take_stacks
    from everstep.protocol.progress import page_of
    from everstep.protocol.stacks import NONE

    page = page_of(worker.pid)
    if page is None:
        return NONE
    try:
        return await take_stacks(worker.pid, page)
    finally:
        page.close()


def _grouped(found: dict[int, Stacks]) -> list[tuple[list[int], Stacks]]:
    groups: dict[object, list[int]] = {}
    for rank, taken in found.items():
        groups.setdefault(taken.main, []).append(rank)
    by_rarity = sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))
    return [(ranks, found[ranks[0]]) for ranks in by_rarity]


def _text(taken: Stacks, threads: bool) -> str:
    from everstep.protocol.stacks import text_of

    none = "no Python stack could be taken: it is stopped, or blocked in the kernel"
    return (taken.text.rstrip() if threads else text_of(taken.main)) or none


# ---------------------------------------------------------------------- logs


@click.command(cls=RunCommand)
@click.argument("run")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank's.")
@click.option("--attempt", type=click.IntRange(min=1), help="Of this attempt; by default the newest.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is printed, until Ctrl+C.")
def logs(run: str, rank: int | None, attempt: int | None, follow: bool) -> None:
    """What the workers of a run have printed.

    RUN is the address of a run's folder, storage_path/name; or the name alone, for one that is live on this
    machine or in ~/everstep_results. Logs lie in the run's folder, or, if that is in an object store, on the
    machines of the workers: there the last lines of ranks that failed are all that others can see.
    """
    from everstep.journal.history import log_folder
    from everstep.observe.reading import find_run

    store = find_run(run).store
    folder = log_folder(store)
    if not folder.is_dir():
        tails = {Path(f.path): store.read(f.path) or b"" for f in store.list("logs")}
        if not tails:
            raise click.ClickException(f"there are no logs of {run} on this machine, nor in its storage")
        for path, data in sorted(tails.items()):
            _print(path, data)
        return
    reader = Logs(folder, rank, attempt)
    try:
        while True:
            for path, data in reader.news(unfinished=not follow):
                _print(path, data)
            if not follow:
                return
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        if not follow:
            raise


class Logs:
    """The files of one attempt, and of those that follow it, read on and on."""

    def __init__(self, folder: Path, rank: int | None, attempt: int | None) -> None:
        self._folder = folder
        self._files = f"rank-{rank:05d}.log" if rank is not None else "rank-*.log"
        self._fixed = attempt
        attempts = self._attempts()
        self._first = attempt if attempt is not None else max(attempts, default=1)
        self._read: dict[Path, int] = {}
        if attempt is not None and attempt not in attempts:
            known = ", ".join(map(str, sorted(attempts))) or "none"
            raise click.ClickException(f"there is no attempt {attempt} in {folder}; there is {known}")
        ranks = {_number(path) for path in folder.glob("attempt-*/rank-*.log*")}
        if rank is not None and ranks and rank not in ranks:
            known = ", ".join(map(str, sorted(ranks)))
            raise click.ClickException(f"there is no rank {rank} in {folder}; there is {known}")

    def _attempts(self) -> set[int]:
        return {_number(path) for path in self._folder.glob("attempt-*")}

    def news(self, unfinished: bool) -> Iterator[tuple[Path, bytes]]:
        """What was printed since the last call, in whole lines; ``unfinished``: and the beginning of the
        next.
        """
        for folder in sorted(self._folder.glob("attempt-*")):
            attempt = _number(folder)
            if attempt < self._first or (self._fixed is not None and attempt != self._fixed):
                continue
            for path in sorted(folder.glob(self._files)):
                begun = self._read.get(path, 0)
                if path.stat().st_size < begun:
                    begun = 0  # it was rotated
                with path.open("rb") as file:
                    file.seek(begun)
                    data = file.read()
                if not unfinished:
                    data = data[: data.rfind(b"\n") + 1]
                self._read[path] = begun + len(data)
                if data:
                    yield path, data


def _number(path: Path) -> int:
    """Of the attempt, or of the rank, that a folder or file of logs is named after."""
    return int(path.name.split("-")[1].split(".")[0])


def _print(path: Path, data: bytes) -> None:
    for line in data.decode(errors="replace").splitlines():
        click.echo(f"[rank {_number(path)}] {line}")


# ---------------------------------------------------------------------- top


@click.command(cls=RunCommand)
@click.argument("run")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to measure.",
)
@click.option("--once", is_flag=True, help="Measure once, and end.")
def top(run: str, every: float, once: bool) -> None:
    """How fast the workers of a run are, and what they use.

    Reports, collectives, processors, memory and NVIDIA GPUs of each. RUN is the name of a run on this machine
    (see `everstep ps`). Workers on other machines are left out. A worker's figures are those of all processes
    that it has started. Ends with Ctrl+C, or with the run.
    """
    from rich.console import Console
    from rich.live import Live

    from everstep.observe import actions, usage
    from everstep.observe.registry import live_runs

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)  # in a file or a pipe, nothing has to be cut
    before = usage.sample(actions.live_run(run).workers)
    with Live(console=console, auto_refresh=False, transient=once) as screen:
        try:
            while (live := live_runs().get(run)) is not None:
                time.sleep(every)
                now = usage.sample(live.workers)
                table = _usage_table(usage.between(before, now), len(live.workers) - len(now))
                before = now
                if once or not console.is_terminal:
                    console.print(table)
                else:
                    screen.update(table, refresh=True)
                if once:
                    return
        except KeyboardInterrupt:
            pass


def _usage_table(rows: list[Usage], elsewhere: int) -> Table:
    from rich.table import Table

    from everstep.process.sizes import in_units

    table = Table(box=None, pad_edge=False, caption=_elsewhere(elsewhere), caption_justify="left")
    with_gpus = any(row.gpu is not None for row in rows)
    table.collapse_padding = with_gpus  # so that 80 columns are enough
    # On one host it is the same in every row, and 80 columns are too few.
    several = len({row.worker.host for row in rows}) > 1
    for head in ("RANK", *(("SLICE", "HOST") if several else ()), "DOING"):
        table.add_column(head, no_wrap=True)
    on_gpus = ("GPU", "GPU MEMORY") if with_gpus else ()
    for head in ("REPORTS", "REPORTS/S", "COLLECTIVES/S", "CPU", "MEMORY", *on_gpus):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.worker.rank),
            *((row.worker.slice, row.worker.host) if several else ()),
            row.doing,
            f"{row.reports:,}",
            f"{row.reports_per_s:.1f}",
            f"{row.collectives_per_s:.1f}",
            f"{100 * row.processors:.0f} %",
            in_units(row.memory),
            *(_on_gpus(row.gpu) if with_gpus else ()),
        )
    return table


def _on_gpus(use: GpuUse | None) -> tuple[str, str]:
    from everstep.process.sizes import in_units

    if use is None:
        return "", ""
    return (
        f"{100 * use.busy:.0f} %" if use.busy is not None else "?",
        in_units(use.memory) if use.memory is not None else "?",
    )


def _elsewhere(workers: int) -> str | None:
    from everstep.wording import count

    return f"{count(workers, 'worker')} on other machines, or just gone" if workers else None


# ---------------------------------------------------------------------- doctor


@click.command(cls=RunCommand)
@click.argument("storage", required=False)
def doctor(storage: str | None) -> None:
    """Check this machine for what would break a run.

    Each finding says what to do about it. With STORAGE, also whether a run can be kept there; that writes a
    small object, and removes it. The exit code is 1 if something is bad.
    """
    from everstep.observe.checkup import Health, examine

    found = []
    for finding in examine(storage):
        found.append(finding.verdict)
        click.echo(f"{finding.verdict.value:4}  {finding.what:14}  {finding.seen}")
        if finding.remedy:
            click.echo(f"{'':22}→ {finding.remedy}")
    if Health.BAD in found:
        raise click.exceptions.Exit(1)


COMMANDS = (stacks, logs, top, doctor)
