"""torchrun's options: how those for log files are written, and what to do instead of those that make no sense
here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from everstep.driver.output_files import StreamChoice

_FLAGS = {
    "--no-python": "Give a Python script, or -m and a module",
    "--run-path": "Leave it out: scripts run as __main__ already",
    "--virtual-local-rank": "Leave it out, and choose the device by LOCAL_RANK",
}
_WITH_VALUE = {
    "--rdzv-backend": "Leave it out: workers find each other through Everstep",
    "--rdzv-endpoint": "Leave it out: workers find each other through Everstep",
    "--rdzv-id": "Leave it out, or give the run a name with --name",
    "--rdzv-conf": "Leave it out: workers find each other through Everstep",
    "--node-rank": "Leave it out, and start the command once: with --engine ray, workers run on all nodes",
    "--master-addr": "Leave it out: workers find each other through Everstep",
    "--master-port": "Leave it out: workers find each other through Everstep",
    "--local-addr": "Leave it out: workers find each other through Everstep",
    "--role": "Leave it out: there is one role",
    "--monitor-interval": "Leave it out: a death is noticed at once",
    "--start-method": "Leave it out: workers are forked from a process that has imported what they need",
    "--event-log-handler": "Leave it out: `everstep events` shows what happened to a run",
    "--logs-specs": "Leave it out: --redirects, --tee and --log-dir say where output goes",
    "--duplicate-stdout-filters": "Leave it out, and search what --tee wrote or `everstep logs` shows",
    "--duplicate-stderr-filters": "Leave it out, and search what --tee wrote or `everstep logs` shows",
    "--numa-binding": "Leave it out, or start the command with numactl",
    "--signals-to-handle": "Leave it out: SIGINT and SIGTERM stop the run",
    "--shutdown-timeout": "Leave it out; EVERSTEP_STOP_GRACE_S=30 gives workers 30 s when the run is stopped",
}

_ONE = re.compile(r"[0-3]")
_BY_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


class StreamsType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Streams by torchrun's numbers: one for all ranks, or one for each local rank that is named."""

    name = "streams"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> StreamChoice:
        from everstep.driver.output_files import Std, StreamChoice

        if isinstance(value, StreamChoice):
            return value
        value = value.removeprefix("=")  # torchrun takes -r=3 for -r 3
        if _ONE.fullmatch(value):
            return StreamChoice(Std(int(value)))
        if _BY_RANK.fullmatch(value):
            pairs = (pair.split(":") for pair in value.split(","))
            return StreamChoice(Std.NONE, {int(rank): Std(int(streams)) for rank, streams in pairs})
        raise click.BadParameter(
            f"{value!r} names no streams. Write 1 for stdout, 2 for stderr, 3 for both or 0 for none; or one "
            "of these for each local rank, as in 0:3,1:2.",
            ctx,
            param,
        )


class LocalRanksType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Local ranks, separated by commas."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> frozenset[int]:
        if isinstance(value, frozenset):
            return value
        ranks = value.split(",")
        if not all(rank.strip().isdecimal() for rank in ranks):
            raise click.BadParameter(
                f"{value!r} isn't a list of local ranks. Write 0,1 for example.", ctx, param
            )
        return frozenset(map(int, ranks))


class RefusedOption(click.Option):
    """An option of torchrun's that is an error here, with what to do instead."""

    def __init__(self, name: str, remedy: str, *, is_flag: bool) -> None:
        super().__init__(
            [name], hidden=True, expose_value=False, callback=self._refuse, default=None, is_flag=is_flag
        )
        self._remedy = remedy

    def _refuse(self, context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value not in (None, False):
            raise click.UsageError(f"{self.opts[0]} isn't an option here. {self._remedy}.")


def refused() -> list[RefusedOption]:
    """torchrun's options that make no sense here."""
    with_value = [RefusedOption(name, remedy, is_flag=False) for name, remedy in _WITH_VALUE.items()]
    return with_value + [RefusedOption(name, remedy, is_flag=True) for name, remedy in _FLAGS.items()]
