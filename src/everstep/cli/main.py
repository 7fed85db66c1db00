"""The command ``everstep``. What a command needs is imported when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import click

from everstep import __version__
from everstep.cli import launch, looking, operator, runs, simulation

if TYPE_CHECKING:
    from everstep.driver.registry import LiveRun
    from everstep.engine.local.cluster import HostFile

_SIGNALS = ("KILL", "TERM", "STOP", "CONT")
_DONE = {"KILL": "killed", "TERM": "sent SIGTERM to", "STOP": "froze", "CONT": "thawed"}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="everstep")
def main() -> None:
    """Everstep keeps distributed training running."""


for command in (*runs.COMMANDS, *looking.COMMANDS, *simulation.COMMANDS):
    main.add_command(command)
main.add_command(operator.operator)
main.add_command(launch.run)


@main.command()
def ps() -> None:
    """The runs on this machine: their drivers, workers and hosts."""
    from everstep.driver.registry import live_runs

    found = live_runs()
    if not found:
        click.echo("No run is live on this machine.", err=True)
    for run in found.values():
        driver = f"driver {run.driver_pid}" if run.alive else "driver gone"
        click.echo(f"{run.name}  {driver}  epoch {run.epoch}  {run.folder}")
        width = max(len(worker.slice) for worker in run.workers)
        host_width = max(len(worker.host) for worker in run.workers)
        for worker in sorted(run.workers, key=lambda w: w.rank):
            gone = "" if worker.alive else "  gone"
            click.echo(
                f"  rank {worker.rank:<4}  pid {worker.pid:<8}  {worker.host:{host_width}}  "
                f"{worker.slice:{width}}{gone}".rstrip()
            )


@main.command()
@click.argument("run")
@click.option("--rank", type=click.IntRange(min=0), help="The worker of this rank.")
@click.option("--host", metavar="HOST", help="A host: its agent, and everything that runs on it.")
@click.option("--slice", "slice_name", metavar="SLICE", help="All hosts of a slice.")
@click.option(
    "--signal",
    "signal_name",
    type=click.Choice(_SIGNALS, case_sensitive=False),
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
    live = _find(run)
    if rank is not None:
        _signal_rank(live, rank, signal_name)
    elif host is not None:
        _signal_hosts(live, [_host(live, host)], signal_name)
    else:
        assert slice_name is not None
        _signal_hosts(live, _slice(live, slice_name), signal_name)


def _find(name: str) -> LiveRun:
    from everstep.driver.registry import live_runs

    found = live_runs()
    if not found:
        raise click.ClickException("no run is live on this machine (of this user)")
    if name not in found:
        raise click.ClickException(f"no live run is called {name!r}; there is {', '.join(found)}")
    return found[name]


def _signal_rank(run: LiveRun, rank: int, name: str) -> None:
    from everstep.agent import kernel

    worker = next((worker for worker in run.workers if worker.rank == rank), None)
    if worker is None:
        ranks = ", ".join(str(worker.rank) for worker in run.workers)
        raise click.ClickException(f"{run.name} has no rank {rank}; its ranks are {ranks}")
    if not worker.alive or not kernel.send_signal(worker.pid, _number(name)):
        raise click.ClickException(
            f"rank {rank} of {run.name} (pid {worker.pid}) is gone and being replaced: try again in a moment"
        )
    click.echo(f"{_DONE[name]} rank {rank} of {run.name}: pid {worker.pid} on {worker.host}")


def _host(run: LiveRun, name: str) -> HostFile:
    hosts = _hosts(run)
    if name not in hosts:
        raise click.ClickException(
            f"{run.name} has no live host {name!r}; there is {', '.join(sorted(hosts))}"
        )
    return hosts[name]


def _slice(run: LiveRun, name: str) -> list[HostFile]:
    hosts = _hosts(run)
    found = sorted((host for host in hosts.values() if host.slice == name), key=lambda h: h.index)
    if not found:
        slices = ", ".join(sorted({host.slice for host in hosts.values()}))
        raise click.ClickException(f"{run.name} has no live slice {name!r}; there is {slices}")
    return found


def _hosts(run: LiveRun) -> dict[str, HostFile]:
    from everstep.driver.registry import hosts_of

    hosts = hosts_of(run)
    if not hosts:
        raise click.ClickException(
            f"the hosts of {run.name} can't be found on this machine: name a worker with --rank instead"
        )
    return hosts


def _signal_hosts(run: LiveRun, hosts: list[HostFile], name: str) -> None:
    from everstep.agent import kernel

    for host in hosts:
        # A machine that is told to go tells its workers itself; any other signal hits everything on it, the
        # agent first, so that it doesn't live to report the deaths of its workers.
        below = [] if name == "TERM" else kernel.descendants(host.pid)
        ranks = [worker for worker in run.workers if worker.host == host.id]
        for pid in (host.pid, *below):
            kernel.send_signal(pid, _number(name))
        whose = ", ".join(f"rank {w.rank} pid {w.pid}" for w in ranks) or "no rank of the run"
        processes = f"agent pid {host.pid}" + (f" and {len(below)} processes below it" if below else "")
        click.echo(f"{_DONE[name]} host {host.id} ({host.slice}) of {run.name}: {processes}; {whose}")


def _number(name: str) -> int:
    return getattr(signal, f"SIG{name}").value  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
