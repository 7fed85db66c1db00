"""The simulator's commands: ``sim-check`` looks for mistakes, ``simulate`` answers what-ifs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from everstep.forecast.answer import Advice, ForecastAnswer
    from everstep.forecast.question import ForecastQuestion, Policy
    from everstep.sim.hunt import Tally
    from everstep.sim.shrink import FailedSchedule

_LAST_LINES = 40


def _jobs() -> int:
    return os.cpu_count() or 1


@click.command("sim-check")
@click.option("--schedules", type=click.IntRange(min=1), default=10_000, show_default=True, help="How many.")
@click.option("--seed", type=click.IntRange(min=0), help="The first one's; drawn if not given, and printed.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; by default one for each core.")
@click.option("--plant", metavar="NAME", help="Put a known mistake into the code; 'list' names them.")
@click.option("--story", is_flag=True, help="Print all that happened: of one schedule, or of what fails.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def sim_check(
    schedules: int,
    seed: int | None,
    jobs: int | None,
    plant: str | None,
    story: bool,
    as_json: bool,
) -> None:
    """Run the production driver through random faults.

    Time is virtual. Driver, controller, journal and storage code are those of real runs; the store, hosts
    and workers are simulated. After every event, what must always hold is checked. Exit code 1 if it
    doesn't, with the seed, the shortest story that still fails, and the command that replays it. With
    --plant the exit code is 1 if the mistake is found, as it should be.
    """
    from everstep.sim.hunt import hunt
    from everstep.sim.mistakes import MISTAKES

    if plant == "list":
        width = max(map(len, MISTAKES))
        for known in MISTAKES.values():
            click.echo(f"{known.name:{width}}  {known.mistake}")
        return
    if plant is not None and plant not in MISTAKES:
        raise click.UsageError(f"no mistake is called {plant!r}: there is {', '.join(MISTAKES)}")
    first = random.SystemRandom().randrange(10**9) if seed is None else seed
    if story and schedules == 1 and _print_story(first, plant):
        return
    with _bar(schedules, f"schedules from seed {first}", hidden=as_json) as moved:
        tally = hunt(
            first, schedules, jobs=jobs or _jobs(), mistake=plant, progress=lambda t: moved(t.schedules)
        )
    found = [_shortest(bad, plant) for bad in tally.kinds]
    if as_json:
        click.echo(json.dumps(_as_json(tally, found, first, plant)))
    else:
        for finding in found:
            _print_violation(finding, plant, story)
        _print_tally(tally, first, plant)
    if tally.found or tally.interrupted:
        raise SystemExit(1 if tally.found else 130)


def _print_story(seed: int, plant: str | None) -> bool:
    """The story of a schedule that holds. False: it doesn't."""
    from everstep.sim.mistakes import MISTAKES
    from everstep.sim.planting import planted
    from everstep.sim.scenario import draw
    from everstep.sim.schedule import Schedule
    from everstep.sim.shrink import failure_of

    schedule = Schedule(draw(seed))
    with planted(MISTAKES[plant] if plant is not None else None):
        if failure_of(schedule):
            return False
    assert schedule.outcome is not None
    click.echo(schedule.story.text(), nl=False)
    click.echo(f"seed {seed} holds: {schedule.outcome.value}")
    return True


def _shortest(seed: int, plant: str | None) -> FailedSchedule:
    """What does not hold in the schedule of this seed, with as few faults as possible."""
    from everstep.sim.mistakes import MISTAKES
    from everstep.sim.planting import planted
    from everstep.sim.scenario import draw
    from everstep.sim.shrink import find, shrink

    with planted(MISTAKES[plant] if plant is not None else None):
        finding = find(draw(seed))
        assert finding is not None, f"seed {seed} failed before, and holds now"
        return shrink(finding)


def _print_tally(tally: Tally, first: int, plant: str | None) -> None:
    speed = tally.schedules / tally.seconds if tally.seconds else 0.0
    violations = len(tally.found)
    click.echo(
        f"{tally.schedules:,} schedules from seed {first} in {tally.seconds:.1f} s, "
        f"{speed:.0f} a second: {violations} violation{'s' if violations != 1 else ''}"
    )
    if plant is not None:
        after = f"found after {tally.schedules:,} schedules" if violations else "not found"
        click.echo(f"planted {plant}: {after}")
        return
    from everstep.observe.display import named_step

    click.echo("  ended: " + _counts(tally.outcomes))
    click.echo("  recovery steps: " + _counts({named_step(rung): n for rung, n in tally.rungs.items()}))
    click.echo("  transitions never taken: " + (", ".join(tally.never_taken) or "none"))


def _counts(counter: dict[Any, int]) -> str:
    ordered = sorted(counter.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in ordered)


def _print_violation(finding: FailedSchedule, plant: str | None, story: bool) -> None:
    from everstep.sim.scenario import draw

    lines = finding.story.text().splitlines()
    left_out = max(0, len(lines) - _LAST_LINES) if not story else 0
    seed, faults = finding.scenario.seed, len(finding.scenario.strikes)
    click.echo(f"seed {seed}: {finding.what}")
    click.echo(f"  shrunk from {len(draw(seed).strikes)} injected faults to {faults}: {finding}")
    if left_out:
        click.echo(f"  … {left_out} lines before; --story shows them")
    click.echo("\n".join(lines[left_out:]))
    click.echo(f"replay: {_replay(seed, plant)}\n")


def _replay(seed: int, plant: str | None) -> str:
    return f"everstep sim-check --seed {seed} --schedules 1 --story" + (f" --plant {plant}" if plant else "")


def _as_json(tally: Tally, found: list[FailedSchedule], first: int, plant: str | None) -> dict[str, Any]:
    return {
        "seed": first,
        "schedules": tally.schedules,
        "seconds": round(tally.seconds, 3),
        "schedules_per_second": round(tally.schedules / tally.seconds, 1) if tally.seconds else None,
        "violations": len(tally.found),
        "seeds": sorted(tally.found),
        "plant": plant,
        "outcomes": dict(tally.outcomes),
        "rungs": {rung.value: count for rung, count in tally.rungs.items()},
        "transitions_never_taken": tally.never_taken,
        "found": [
            {
                "seed": finding.scenario.seed,
                "what": finding.what,
                "scenario": str(finding),
                "story": finding.story.text().splitlines(),
                "replay": _replay(finding.scenario.seed, plant),
            }
            for finding in found
        ],
    }


@contextmanager
def _bar(total: float, what: str, hidden: bool = False) -> Iterator[Callable[[float], None]]:
    """A progress bar on a terminal; nothing elsewhere. Yields the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=hidden or not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


# ---------------------------------------------------------------------- simulate


@click.command()
@click.option("--preset", metavar="NAME", help="A known cluster and its failures; 'list' names them.")
@click.option("--slices", type=click.IntRange(min=1), help="How many slices the job wants.")
@click.option("--hosts-per-slice", type=click.IntRange(min=1), help="Hosts that live and die together.")
@click.option("--spares", type=click.IntRange(min=0), help="Slices more than the job wants.")
@click.option("--min-slices", type=click.IntRange(min=1), help="Elastic: train on with as few as this.")
@click.option("--replica-groups/--no-replica-groups", default=None, help="Each slice is a copy of the model.")
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True),
    help="How long. With a trace: by default as long as the trace.",
)
@click.option("--step-s", type=click.FloatRange(min=0, min_open=True), help="Seconds per step.")
@click.option(
    "--checkpoint-every-s", type=click.FloatRange(min=0, min_open=True), help="Seconds between checkpoints."
)
@click.option(
    "--checkpoint-cost-s", type=click.FloatRange(min=0), help="Seconds that training pauses per checkpoint."
)
@click.option(
    "--snapshot-every-s",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds between snapshots in memory.",
)
@click.option(
    "--snapshot-cost-s", type=click.FloatRange(min=0), help="Seconds that training pauses per snapshot."
)
@click.option("--snapshot-copies", type=click.IntRange(min=0), help="Other hosts that have each host's part.")
@click.option(
    "--replicated/--no-replicated", default=None, help="Every host has the whole state, as with DDP."
)
@click.option(
    "--mtbf", "mtbf_h", type=click.FloatRange(min=0, min_open=True), help="Hours between failures of a host."
)
@click.option("--host-share", type=click.FloatRange(0, 1), help="Share of the failures that cost the host.")
@click.option("--repair-h", type=click.FloatRange(min=0), help="Hours until a lost host is back.")
@click.option("--trace", metavar="FILE", help="Hosts that come and go: lines 'milliseconds,add|remove,node'.")
@click.option(
    "--notice-s", type=click.FloatRange(min=0), help="Seconds of warning before a host of the trace leaves."
)
@click.option(
    "--detect-s", type=click.FloatRange(min=0), help="Seconds until Everstep notices a dead worker."
)
@click.option(
    "--prepare-s", type=click.FloatRange(min=0), help="Seconds until Everstep has a new host ready."
)
@click.option(
    "--start-s",
    type=click.FloatRange(min=0),
    help="Seconds that Everstep takes to start workers on ready hosts.",
)
@click.option(
    "--restore-s", type=click.FloatRange(min=0), help="Seconds to load a checkpoint, for every policy."
)
@click.option(
    "--restore-memory-s", type=click.FloatRange(min=0), help="Seconds to restore a snapshot from memory."
)
@click.option(
    "--full-restart-s",
    type=click.FloatRange(min=0),
    help="Seconds that the other policy takes to start all workers.",
)
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="everstep, full-restart; or both.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the failures that are drawn.")
@click.option("--advice/--no-advice", default=True, help="Also simulate what might be better.")
@click.option("--plot", "plot_to", metavar="FILE", help="A picture of it (PNG, SVG or PDF).")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def simulate(
    preset: str | None,
    policies: tuple[str, ...],
    advice: bool,
    plot_to: str | None,
    as_json: bool,
    detect_s: float | None,
    prepare_s: float | None,
    start_s: float | None,
    full_restart_s: float | None,
    restore_s: float | None,
    restore_memory_s: float | None,
    **given: Any,
) -> None:
    """What will the goodput be, on this cluster, with these failures?

    The same controller as in production handles failures in virtual time. Every second of every host
    that the job wants is put in one category. Times of a recovery are as `make bench` measured them on one
    machine: give your own, or read the result as what recovery costs at best.
    """
    from everstep.forecast.answer import advise, ask
    from everstep.forecast.outages import TraceError
    from everstep.forecast.plot import PlotUnavailable, plot
    from everstep.forecast.presets import PRESETS

    if preset == "list":
        for name, known in PRESETS.items():
            click.echo(f"{name}: {known.about}\n    {known.source}")
        return
    question = _question(preset, {name: value for name, value in given.items() if value is not None})
    phases = {
        "detect_s": detect_s,
        "prepare_s": prepare_s,
        "start_s": start_s,
        "restore_s": restore_s,
        "restore_memory_s": restore_memory_s,
    }
    chosen = [_policy(name, phases, full_restart_s) for name in policies or ("everstep", "full-restart")]
    try:
        answers = []
        for policy in chosen:
            with _bar(question.seconds, policy.name, hidden=as_json) as moved:
                answers.append(ask(question, policy, moved))
        found = []
        if advice:
            with _bar(7, "what might be better", hidden=as_json) as moved:
                tried = iter(range(1, 100))
                found = advise(question, chosen[0], answers[0], lambda: moved(next(tried)))
        if plot_to is not None:
            plot(question, answers, Path(plot_to), _title(preset, question))
    except (TraceError, PlotUnavailable, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_forecast_json(preset, question, answers, found)))
    else:
        _print_forecast(preset, question, answers, found)
        if plot_to is not None:
            click.echo(f"\npicture: {plot_to}")


def _question(preset: str | None, given: dict[str, Any]) -> ForecastQuestion:
    import msgspec

    from everstep.forecast.outages import TraceError, load_trace
    from everstep.forecast.presets import PRESETS
    from everstep.forecast.question import ForecastQuestion

    if preset is not None and preset not in PRESETS:
        raise click.UsageError(f"no preset is called {preset!r}: there is {', '.join(PRESETS)}")
    if preset is not None:
        question = msgspec.structs.replace(PRESETS[preset].question, **given)
    elif "slices" not in given:
        raise click.UsageError(
            "say how large the job is, with --slices (and --hosts-per-slice), or take a --preset"
        )
    else:
        question = ForecastQuestion(**{"mtbf_h": None if "trace" in given else 5000.0, **given})
    if "trace" in given and "days" not in given:
        try:
            end = load_trace(given["trace"])[-1].at
        except (TraceError, OSError) as error:
            raise click.ClickException(str(error)) from error
        question = msgspec.structs.replace(question, days=max(end, 1.0) / 86400.0)
    if question.trace is not None and question.hosts_per_slice != 1:
        raise click.UsageError("a trace lists single hosts: it needs --hosts-per-slice 1")
    if question.min_slices is not None and question.min_slices > question.slices:
        raise click.UsageError(f"--min-slices {question.min_slices} is above --slices {question.slices}")
    return question


def _policy(name: str, phases: dict[str, float | None], full_restart_s: float | None) -> Policy:
    import msgspec

    from everstep.forecast.question import EVERSTEP, POLICIES

    if name not in POLICIES:
        raise click.UsageError(f"no policy is called {name!r}: there is {', '.join(POLICIES)}")
    policy = POLICIES[name]
    changes = {key: value for key, value in phases.items() if value is not None}
    if policy is not EVERSTEP:
        changes = {"restore_s": changes["restore_s"]} if "restore_s" in changes else {}
        if full_restart_s is not None:
            changes["start_s"] = full_restart_s
    return msgspec.structs.replace(policy, phases=msgspec.structs.replace(policy.phases, **changes))


def _title(preset: str | None, question: ForecastQuestion) -> str:
    length = f"{question.days * 24:.1f} hours" if question.days <= 3 else f"{question.days:g} days"
    size = f"{question.hosts:,} hosts"
    if question.elastic:
        size = f"{(question.min_slices or 0) * question.hosts_per_slice:,} to {size}"
    spares = f", {question.spares} spare slices" if question.spares else ""
    return f"{preset + ': ' if preset else ''}{size}{spares}, {length}"


def _print_forecast(
    preset: str | None, question: ForecastQuestion, answers: list[ForecastAnswer], advice: list[Advice]
) -> None:
    from everstep.forecast.presets import PRESETS

    click.echo(_title(preset, question))
    if preset is not None:
        click.echo(f"  {PRESETS[preset].about}\n  source: {PRESETS[preset].source}")
    rungs = list(dict.fromkeys(name for answer in answers for name in answer.restarts))
    wide = max(map(len, (*answers[0].shares, *rungs)))
    click.echo("\n" + " " * wide + "".join(f"{answer.policy:>16}" for answer in answers))
    for name in answers[0].shares:
        click.echo(f"{name:{wide}}" + "".join(f"{100 * answer.shares[name]:14.3f} %" for answer in answers))
    click.echo(f"{'goodput':{wide}}" + "".join(f"{100 * answer.goodput:14.3f} %" for answer in answers))
    click.echo("\n" + f"{'steps lost':{wide}}" + "".join(f"{answer.steps_lost:16,.0f}" for answer in answers))
    medians = "".join(f"{answer.recovery_s or 0.0:14.2f} s" for answer in answers)
    click.echo(f"{'median recovery':{wide}}" + medians)
    for rung in rungs:
        counts = "".join(f"{answer.restarts.get(rung, 0):16,}" for answer in answers)
        click.echo(f"{rung:{wide}}{counts}")
    if advice:
        click.echo(f"\nwhat would raise {answers[0].policy}'s goodput, each simulated alone:")
        for one in advice:
            click.echo(f"  +{100 * one.gain:.2f} %  {one.what}    {one.change}")


def _forecast_json(
    preset: str | None, question: ForecastQuestion, answers: list[ForecastAnswer], advice: list[Advice]
) -> dict[str, Any]:
    import msgspec

    return {
        "preset": preset,
        "question": msgspec.to_builtins(question),
        "answers": [msgspec.to_builtins(answer) for answer in answers],
        "advice": [msgspec.to_builtins(one) for one in advice],
    }


COMMANDS = (sim_check, simulate)
