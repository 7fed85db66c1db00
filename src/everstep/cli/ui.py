"""The page of runs, in a browser: ``ui``."""

from __future__ import annotations

import click

from everstep.cli.runs import RunCommand

_PORT = 8484


@click.command(cls=RunCommand)
@click.argument("storage", required=False)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_PORT,
    show_default=True,
    help="To listen on, on loopback; 0 takes any that is free.",
)
def ui(storage: str | None, port: int) -> None:
    """Show runs in the browser, live. Ends with Ctrl+C.

    Each run has a page with its timeline, incidents, metrics and checkpoints.

    STORAGE is what RunConfig(storage_path=…) was: a folder, or s3://bucket/prefix and the like. Without it,
    the runs in ~/everstep_results are shown, and those that are live on this machine.

    It listens on 127.0.0.1 alone. Stopping a run or killing a part of it needs the token in the address that
    is printed; without it, the page only shows.
    """
    from everstep.config import DEFAULT_STORAGE_PATH
    from everstep.observe.run_cache import RunCache
    from everstep.observe.server import PageServer

    runs = RunCache(storage or DEFAULT_STORAGE_PATH, with_live=storage is None)
    try:
        server = PageServer(runs, port)
    except OSError as error:
        raise click.ClickException(
            f"can't listen on port {port} of this machine: {error.strerror}. Give another with --port, or 0"
        ) from error
    with server:
        try:
            click.echo(f"runs in {runs.address}")
            click.echo("(the token is what stopping and killing needs: share the address without it)")
            click.echo(f"open {server.address}#token={server.token}")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            server.closing.set()


COMMANDS = (ui,)
