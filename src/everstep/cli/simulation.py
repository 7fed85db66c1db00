"""The simulator's commands: ``sim-check`` looks for mistakes of the brain, ``simulate`` answers what-ifs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from everstep.engine.sim.hunt import Found, Tally

_LAST_LINES = 40


def _jobs() -> int:
    return os.cpu_count() or 1


@click.command("sim-check")
@click.option("--schedules", type=click.IntRange(min=1), default=10_000, show_default=True, help="How many.")
@click.option("--seed", type=click.IntRange(min=0), help="The first one's; drawn if not given, and printed.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; by default one for each core.")
@click.option("--plant", metavar="NAME", help="Put a known mistake into the brain; 'list' names them.")
@click.option("--story", is_flag=True, help="Print all that happened: of one schedule, or of what fails.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def sim_check(
    schedules: int, seed: int | None, jobs: int | None, plant: str | None, story: bool, as_json: bool
) -> None:
    """Run the brain through fresh schedules of faults, in virtual time.

    After every event it is checked that what must always hold does. Exit code 1 if it doesn't, with the
    seed, the shortest story that still fails, and the command that replays it. With --plant the exit code
    is 1 if the mistake is found, as it should be.
    """
    from everstep.engine.sim.hunt import hunt
    from everstep.engine.sim.plants import PLANTS

    if plant == "list":
        width = max(map(len, PLANTS))
        for known in PLANTS.values():
            click.echo(f"{known.name:{width}}  {known.mistake}")
        return
    if plant is not None and plant not in PLANTS:
        raise click.UsageError(f"no mistake is called {plant!r}: there is {', '.join(PLANTS)}")
    first = random.SystemRandom().randrange(10**9) if seed is None else seed
    if story and schedules == 1 and _tell_one(first, plant):
        return
    with _bar(schedules, f"schedules from seed {first}", hidden=as_json) as moved:
        tally = hunt(
            first, schedules, jobs=jobs or _jobs(), plant=plant, progress=lambda t: moved(t.schedules)
        )
    if as_json:
        click.echo(json.dumps(_as_json(tally, first, plant)))
    else:
        _tell(tally, first, plant, story)
    if tally.violations:
        raise SystemExit(1)


def _tell_one(seed: int, plant: str | None) -> bool:
    """The story of a schedule that holds. False: it doesn't."""
    from everstep.engine.sim.plants import PLANTS, planted
    from everstep.engine.sim.run import Finding, run_seed

    with planted(PLANTS[plant] if plant is not None else None):
        try:
            result = run_seed(seed)
        except Finding:
            return False
    click.echo(result.story.text(), nl=False)
    click.echo(f"seed {seed} holds: {result.outcome.value}, {result.events} events")
    return True


def _tell(tally: Tally, first: int, plant: str | None, story: bool) -> None:
    for found in sorted(tally.found.values(), key=lambda found: found.seed):
        _tell_found(found, plant, story)
    speed = tally.schedules / tally.seconds if tally.seconds else 0.0
    broken = f"{tally.violations} violation{'s' if tally.violations != 1 else ''}"
    click.echo(
        f"{tally.schedules:,} schedules from seed {first} in {tally.seconds:.1f} s, "
        f"{speed:.0f} a second: {broken}"
    )
    if plant is not None:
        after = f"found after {tally.schedules:,} schedules" if tally.violations else "not found"
        click.echo(f"planted {plant}: {after}")
        return
    click.echo("  ended: " + _counts(tally.outcomes))
    click.echo("  rungs: " + _counts(tally.rungs))
    click.echo("  transitions never taken: " + (", ".join(tally.never_taken) or "none"))


def _counts(counter: dict[Any, int]) -> str:
    ordered = sorted(counter.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in ordered)


def _tell_found(found: Found, plant: str | None, story: bool) -> None:
    lines = found.story.splitlines()
    left_out = max(0, len(lines) - _LAST_LINES) if not story else 0
    click.echo(f"seed {found.seed}: {found.what}")
    click.echo(f"  shrunk from {found.faults_at_first} injected faults to {found.faults}: {found.scenario}")
    if left_out:
        click.echo(f"  … {left_out} lines before; --story shows them")
    click.echo("\n".join(lines[left_out:]))
    click.echo(f"replay: {_replay(found.seed, plant)}\n")


def _replay(seed: int, plant: str | None) -> str:
    return f"everstep sim-check --seed {seed} --schedules 1 --story" + (f" --plant {plant}" if plant else "")


def _as_json(tally: Tally, first: int, plant: str | None) -> dict[str, Any]:
    return {
        "seed": first,
        "schedules": tally.schedules,
        "seconds": round(tally.seconds, 3),
        "schedules_per_second": round(tally.schedules / tally.seconds, 1) if tally.seconds else None,
        "violations": tally.violations,
        "plant": plant,
        "outcomes": dict(tally.outcomes),
        "rungs": {rung.value: count for rung, count in tally.rungs.items()},
        "transitions_never_taken": tally.never_taken,
        "found": [
            {
                "seed": found.seed,
                "what": found.what,
                "scenario": found.scenario,
                "story": found.story.splitlines(),
                "replay": _replay(found.seed, plant),
            }
            for found in sorted(tally.found.values(), key=lambda found: found.seed)
        ],
    }


@contextmanager
def _bar(total: float, what: str, hidden: bool = False) -> Iterator[Callable[[float], None]]:
    """A progress bar on a terminal; nothing elsewhere. What it yields is told how far things are."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=hidden or not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


COMMANDS = (sim_check,)
