"""``everstep run``: runs unchanged torchrun scripts, and restarts what fails."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.cli.torchrun_options import LocalRanksType, StreamsType, refused

if TYPE_CHECKING:
    from everstep.driver.output_files import StreamChoice


class EngineName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """One of the engines, which are asked for when it is checked or shown: no command imports them before."""

    name = "engine"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        from everstep.engine.choice import NAMES

        return f"[{'|'.join(NAMES)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from everstep.engine.choice import NAMES

        return click.Choice(NAMES).convert(value, param, ctx)


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
@click.option("--engine", default="auto", type=EngineName(), show_default=True)
@click.option("--name", metavar="NAME", help="The run's name. The same name again resumes it.")
@click.option(
    "--storage-path", metavar="PATH", help="Where the run's journal, logs and checkpoints are kept."
)
@click.option("--show-ranks", metavar="RANKS", default="all", help="Whose output is shown: `0,1` or `all`.")
@click.option(
    "--local-ranks-filter",
    type=LocalRanksType(),
    metavar="RANKS",
    help="The same by rank on its host, as in torchrun.",
)
@click.option(
    "-r",
    "--redirects",
    type=StreamsType(),
    default="0",
    metavar="STREAMS",
    help="Write these to files and don't show them: 1 stdout, 2 stderr, 3 both; or by local rank, `0:3,1:2`.",
)
@click.option(
    "-t", "--tee", type=StreamsType(), default="0", metavar="STREAMS", help="Write these to files as well."
)
@click.option(
    "--log-dir", metavar="FOLDER", default="", help="For these files; by default the run's log folder."
)
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
    local_ranks_filter: frozenset[int] | None,
    redirects: StreamChoice,
    tee: StreamChoice,
    log_dir: str,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a script as torchrun does, and restart what fails.

    The script needs no change: it finds torchrun's variables (with --framework jax, jax.distributed ready),
    and runs as __main__ with its own arguments.
    Workers are forked from a process that has imported what the script's import lines name.
    """
    from everstep.config import DEFAULT_STORAGE_PATH, FailureConfig, RunConfig, ScalingConfig
    from everstep.deadlines import Deadlines
    from everstep.driver.output_files import OutputFiles
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
            output=OutputFiles(
                redirects, tee, os.path.abspath(log_dir) if log_dir else "", local_ranks_filter
            ),
        )
    except EverstepError as error:
        click.echo(f"everstep: {_by_its_option(str(error))}", err=True)
        raise SystemExit(1) from error


run.params.extend(refused())


def _hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise click.BadParameter(f"{text!r} is neither a number nor MIN:MAX.", param_hint="--nnodes")
    return found


def _by_its_option(message: str) -> str:
    """The error with the option's name in place of the setting's: ``max_failures`` is ``--max-restarts``
    here.
    """
    return re.sub(r"(?m)^(no restart allowed \()?max_failures=", r"\1--max-restarts ", message)


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
