"""The command ``everstep``. What a command needs is imported when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import click

from everstep import __version__
from everstep.cli import inspection, launch, operator, runs, simulation, ui
from everstep.process.kernel import SENDABLE


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="everstep")
def main() -> None:
    """Everstep keeps distributed training running."""


for command in (*runs.COMMANDS, *inspection.COMMANDS, *ui.COMMANDS, *simulation.COMMANDS):
    main.add_command(command)
main.add_command(operator.operator)
main.add_command(launch.run)


@main.command()
def ps() -> None:
    """The runs on this machine: their drivers, workers and hosts."""
    from everstep.observe.registry import live_runs

    found = live_runs()
    if not found:
        click.echo("No run is live on this machine.", err=True)
    for run in found.values():
        driver = f"driver {run.driver_pid}" if run.alive else "driver gone"
        click.echo(f"{run.name}  {driver}  attempt {run.epoch}  {run.folder}")
        width = max((len(worker.slice) for worker in run.workers), default=0)
        host_width = max((len(worker.host) for worker in run.workers), default=0)
        for worker in sorted(run.workers, key=lambda w: w.rank):
            gone = "" if worker.alive else "  gone"
            click.echo(
                f"  rank {worker.rank:<4}  pid {worker.pid:<8}  {worker.host:{host_width}}  "
                f"{worker.slice:{width}}{gone}".rstrip()
            )


@main.command(cls=runs.RunCommand)
@click.argument("run")
@click.option("--rank", type=click.IntRange(min=0), help="The worker of this rank.")
@click.option("--host", metavar="HOST", help="A host: its agent, and everything that runs on it.")
@click.option("--slice", "slice_name", metavar="SLICE", help="All hosts of a slice.")
@click.option(
    "--signal",
    "signal_name",
    type=click.Choice(SENDABLE, case_sensitive=False),
    default="KILL",
    show_default=True,
    help="STOP freezes and CONT thaws. TERM at a host or slice is the notice that it will be taken away.",
)
def kill(run: str, rank: int | None, host: str | None, slice_name: str | None, signal_name: str) -> None:
    """Break a run on purpose, to see it recover.

    RUN is the name of a run on this machine (see `everstep ps`).
    """
    if sum(target is not None for target in (rank, host, slice_name)) != 1:
        raise click.UsageError("say what to kill, with one of --rank, --host and --slice")
    from everstep.observe import actions

    live = actions.live_run(run)
    if rank is not None:
        click.echo(actions.signal_rank(live, rank, signal_name))
    elif host is not None:
        click.echo(actions.signal_host(live, host, signal_name))
    else:
        assert slice_name is not None
        click.echo("\n".join(actions.signal_slice(live, slice_name, signal_name)))


if __name__ == "__main__":
    main()
