"""``everstep run``: what torchrun starts, unchanged, and it survives."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import click

_REFUSED = {
    "--rdzv-backend": "Leave it out: workers find each other through Everstep",
    "--rdzv-endpoint": "Leave it out: workers find each other through Everstep",
    "--rdzv-id": "Leave it out, or give the run a name with --name",
    "--rdzv-conf": "Leave it out: workers find each other through Everstep",
    "--node-rank": "Leave it out, and start the command once: with --engine ray, workers run on all nodes",
    "--master-addr": "Leave it out: workers find each other through Everstep",
    "--master-port": "Leave it out: workers find each other through Everstep",
    "--local-addr": "Leave it out",
    "--role": "Leave it out: there is one role",
    "--monitor-interval": "Leave it out: a death is noticed at once",
    "--start-method": "Leave it out: workers are forked from a process that has imported what they need",
    "--no-python": "Give a Python script, or -m and a module",
    "--run-path": "Leave it out: scripts run as __main__ already",
    "--log-dir": "Leave it out: the logs of all ranks are in the run's folder, under --storage-path",
    "--redirects": "Leave it out: the output of all ranks is kept in the run's folder",
    "-r": "Leave it out: the output of all ranks is kept in the run's folder",
    "--tee": "Leave it out: the output of all ranks is shown and kept; --show-ranks chooses whose is shown",
    "-t": "Leave it out: the output of all ranks is shown and kept; --show-ranks chooses whose is shown",
    "--logs-specs": "Leave it out",
}
"""torchrun's options that make no sense here, with what to do instead."""


class _Refused(click.Option):
    """One that is named, and not ignored."""

    def __init__(self, names: list[str], remedy: str) -> None:
        super().__init__(names, hidden=True, expose_value=False, callback=self._refuse, default=None)
        self._remedy = remedy

    def _refuse(self, context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value is not None:
            raise click.UsageError(f"{self.opts[0]} isn't an option here. {self._remedy}.")


@click.command(
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        # torchrun takes both --nproc_per_node and --nproc-per-node.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
)
@click.option("--nproc-per-node", default="1", metavar="N", help="Workers: a number, `gpu`, `cpu` or `auto`.")
@click.option(
    "--nnodes",
    default="1",
    metavar="N|MIN:MAX",
    help="Hosts. More than one needs `--engine ray`; a range is elastic.",
)
@click.option(
    "--max-restarts", default=0, type=click.IntRange(min=-1), help="-1: no limit.", show_default=True
)
@click.option("--standalone", is_flag=True, help="As by default: on this machine.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as with `python -m`.")
@click.option(
    "--framework",
    default="torch",
    type=click.Choice(["torch", "jax"]),
    show_default=True,
    help="With `jax`, processes are one `jax.distributed` job when the script begins.",
)
@click.option("--engine", default="auto", type=click.Choice(["auto", "local", "ray"]), show_default=True)
@click.option("--name", metavar="NAME", help="The run's name. The same name again resumes it.")
@click.option(
    "--storage-path", metavar="PATH", help="Where the run's journal, logs and checkpoints are kept."
)
@click.option("--show-ranks", metavar="RANKS", default="all", help="Whose output is shown: `0,1` or `all`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    nproc_per_node: str,
    nnodes: str,
    max_restarts: int,
    standalone: bool,
    module: bool,
    framework: str,
    engine: str,
    name: str | None,
    storage_path: str | None,
    show_ranks: str,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a script on several workers, as torchrun does, and restart only what fails.

    The script needs no change: it finds torchrun's variables (with --framework jax, jax.distributed ready),
    and runs as __main__ with its own arguments.
    Workers are forked from a process that has imported what the script's import lines name.
    """
    from everstep.config import DEFAULT_STORAGE_PATH, FailureConfig, RunConfig, ScalingConfig
    from everstep.control.deadlines import Deadlines
    from everstep.driver.scripts import launch
    from everstep.errors import EverstepError

    least, most = _hosts(nnodes)
    if most > 1 and engine != "ray":
        raise click.UsageError(f"--nnodes {nnodes} needs --engine ray: this machine is one host.")
    if standalone and engine == "ray":
        raise click.UsageError("--standalone means this machine: leave it out, or use --engine local.")
    if module:
        _require_module(script)
    elif not Path(script).is_file():
        raise click.UsageError(f"there is no file {script!r}.")
    workers = _per_host(nproc_per_node)
    total: int | tuple[int, int] = workers * most if least == most else (workers * least, workers * most)
    # Not resolved: a script that is a link looks for what lies beside the link, as under `python`.
    path = script if module else os.path.abspath(script)
    sys.argv = [path, *arguments]
    try:
        launch(
            path,
            is_module=module,
            framework=framework,
            scaling=ScalingConfig(num_workers=total),
            run=RunConfig(
                name=name,
                storage_path=storage_path or DEFAULT_STORAGE_PATH,
                failure_config=FailureConfig(max_failures=max_restarts),
                # Short pauses: what a script saves can't be seen, so a failure after hours of training looks
                # like another one at the start.
                deadlines=Deadlines(backoff_first_s=0.1, backoff_max_s=1.0, healthy_s=10.0),
                log_ranks=_ranks(show_ranks, workers * most),
            ),
            engine="local" if standalone else engine,
        )
    except EverstepError as error:
        click.echo(f"everstep: {error}", err=True)
        raise SystemExit(1) from error


run.params.extend(_Refused([name], remedy) for name, remedy in _REFUSED.items())


def _hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise click.BadParameter(f"{text!r} is neither a number nor MIN:MAX.", param_hint="--nnodes")
    return found


def _require_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())  # as `python -m` does, and the command `everstep` itself doesn't
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise click.UsageError(f"there is no module {name!r} here: {error}.") from error
    if found is None:
        raise click.UsageError(f"there is no module {name!r} in {os.getcwd()}, and none is installed.")


def _per_host(text: str) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text not in ("auto", "gpu", "cpu"):
        raise click.BadParameter(
            f"{text!r} is neither a number nor gpu, cpu or auto.", param_hint="--nproc-per-node"
        )
    if text != "cpu":
        from everstep.backend.torch import gpus_here

        gpus = gpus_here()
        if gpus:
            return gpus
        if text == "gpu":
            raise click.BadParameter("torch sees no GPU here.", param_hint="--nproc-per-node")
    return os.cpu_count() or 1


def _ranks(text: str, workers: int) -> tuple[int, ...]:
    if text == "all":
        return tuple(range(workers))
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} isn't a list of ranks such as 0,1.", param_hint="--show-ranks"
        ) from None
