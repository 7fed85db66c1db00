"""What Everstep costs a step of 10 ms that is reported: hang detection, stragglers, step times, the journal.

Beside the same steps in plain Python processes, in turns. Once a step waits, as for an accelerator; once it
keeps a processor busy, of which there are no more than workers, so that agent and driver are in its way, too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.sides import BenchError, Drive
from bench.stepping import rounds_of_a_step

TITLE = "a step of 10 ms with report(), beside plain Python"
ROUNDS, PEER_ROUNDS = 6, 6


def measure(options: Options) -> Outcome:
    workers = len(os.sched_getaffinity(0))
    rows = []
    for what, rounds in (("waits", 0), ("computes", rounds_of_a_step())):
        config = {"steps": options.steps, "rounds": rounds, "workers": workers}
        ours: list[float] = []
        plain: list[float] = []
        for at in range(options.rounds):
            if options.peer_rounds and at % 2:
                plain.append(_plainly(config))
            ours.append(_with_everstep(config))
            if options.peer_rounds and not at % 2:
                plain.append(_plainly(config))
            options.say(f"overhead: a step that {what}: {at + 1} of {options.rounds}")
        rows.append(
            Row(
                f"a step that {what}, of {workers} workers",
                "ms",
                Sample(tuple(ours)),
                Sample(tuple(plain)) if plain else None,
                against="plain Python",
                paired=True,
            )
        )
    shares = tuple(_share(row) for row in rows if row.ratios is not None)
    return Outcome("overhead", TITLE, tuple(rows), shares)


def _share(row: Row) -> str:
    """A ratio near 1 says little, in which more is better."""
    assert row.ratios is not None
    low, middle, high = (100 * (1 / row.ratios.quantile(q) - 1) for q in (0.9, 0.5, 0.1))
    return f"Everstep: {row.what}: {middle:+.2f} % of it (p10 .. p90: {low:+.2f} .. {high:+.2f} %)"


def _with_everstep(config: dict[str, Any]) -> float:
    with Drive("everstep", "stepping:take_steps", config, config["workers"], torch=False) as drive:
        drive.outcome()
        return _step(drive.folder, config["workers"])


def _plainly(config: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        order = json.dumps({**config, "folder": folder})
        command = [sys.executable, "-m", "bench.stepping", order]
        ranks = [
            subprocess.Popen(command, cwd=Path(__file__).parent.parent, env={**os.environ, "RANK": str(rank)})
            for rank in range(config["workers"])
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise BenchError("plain Python: a process failed")
        return _step(Path(folder), config["workers"])


def _step(folder: Path, workers: int) -> float:
    return statistics.mean(json.loads((folder / f"rank-{rank}.json").read_bytes()) for rank in range(workers))
