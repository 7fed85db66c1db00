"""``python -m bench [NAME …]``: run the benchmarks, and print each beside its peer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

from bench import (
    checkpoints,
    data,
    imports,
    overhead,
    pages,
    ray_recovery,
    recovery,
    replica_groups,
    reports,
    scripts,
    start,
    state,
)
from bench.figures import Outcome, as_json, as_markdown, show, this_machine, write_into
from bench.options import Options

BENCHMARKS: dict[str, ModuleType] = {
    "imports": imports,
    "start": start,
    "recovery": recovery,
    "scripts": scripts,
    "ray_recovery": ray_recovery,
    "replica_groups": replica_groups,
    "reports": reports,
    "overhead": overhead,
    "checkpoints": checkpoints,
    "data": data,
    "state": state,
    "pages": pages,
}


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    machine = this_machine()
    for line in machine.lines():
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    outcomes: list[Outcome] = []
    for name in given.names or BENCHMARKS:
        module = BENCHMARKS[name]
        rounds = given.rounds or module.ROUNDS
        peer_rounds = given.peer_rounds or min(module.PEER_ROUNDS, rounds)
        options = Options(
            rounds,
            0 if given.no_peer else peer_rounds,
            lambda line: print(line, file=sys.stderr, flush=True),
            workers=given.workers,
            reports=given.reports,
            peer_reports=given.peer_reports,
            steps=given.steps,
            incidents=given.incidents,
            seed=given.seed,
        )
        outcomes.append(module.measure(options))
        show(outcomes[-1], console)
        # After each, so that a later one that fails doesn't cost what was found.
        if given.json is not None:
            given.json.write_text(json.dumps(as_json(machine, outcomes), indent=1) + "\n")
    if given.write is not None:
        write_into(given.write, as_markdown(machine, outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = ", ".join(BENCHMARKS)
    # `choices` would refuse an empty list here.
    parser.add_argument("names", nargs="*", type=_known, metavar="NAME", help=f"of {names}; by default all")
    parser.add_argument("--rounds", type=_at_least_one, help="of Everstep (default: each benchmark's own)")
    parser.add_argument("--peer-rounds", type=_at_least_one, help="of Ray Train (the same)")
    parser.add_argument("--no-peer", action="store_true", help="Everstep alone")
    parser.add_argument("--workers", type=_at_least_one, default=4)
    parser.add_argument("--reports", type=_at_least_one, default=100_000, help="of each worker in a round")
    parser.add_argument("--peer-reports", type=_at_least_one, default=6, help="the same, of Ray Train's")
    parser.add_argument(
        "--steps", type=_at_least_one, default=1_000, help="of each side in a round of overhead"
    )
    parser.add_argument(
        "--incidents", type=_at_least_one, default=10_000, help="of the run whose page is opened"
    )
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed, and when")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put them into a page, between its marks")
    return parser


def _known(name: str) -> str:
    if name not in BENCHMARKS:
        raise argparse.ArgumentTypeError(
            f"no benchmark is called {name!r}: there are {', '.join(BENCHMARKS)}"
        )
    return name


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    main()
