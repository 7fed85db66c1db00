"""A state that is all on a GPU: what snapshots of it cost, and how soon training goes on after a kill.

``python -m bench.state_gpu [torch] [jax]`` on a machine with one GPU. One worker trains without snapshots,
and with one about every second, in turns: the slowdown is what its steps take more, on average, than in the
turns before and after. Then it gets SIGKILL at random instants, again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.recovery import all_stepped, phases_of
from bench.sides import Drive
from bench.steps import Attempt, attempts_since, newest_of_each_rank

GPT = {"vocabulary": 50257, "length": 1024, "width": 1024, "layers": 25, "batch": 5}
"""368 million parameters: 4.4 GB with AdamW's state, in fp32."""
LAYERS = {"width": 2048, "layers": 20, "batch": 4096}
"""84 million parameters: 1.0 GB with Adam's state."""
SMALL = {"vocabulary": 64, "length": 32, "width": 64, "layers": 2, "batch": 4}
"""To try it where there is no GPU."""
LOOPS = {"torch": ("gpu_loops:train_gpt", GPT), "jax": ("gpu_loops:train_layers", LAYERS)}
_WARM_S, _LOOK_S = 15.0, 20.0
"""Registering 9 GB with the GPU took 2 to 9 s, twice that beside training."""
_QUIET_S = (2.5, 4.0)
"""Between a recovery and the next kill: long enough for a snapshot."""


class Run:
    """One worker that trains, with or without snapshots."""

    def __init__(self, framework: str, every_s: float | None, small: bool) -> None:
        loop, config = LOOPS[framework]
        self._drive = Drive(
            "everstep",
            loop,
            {**config, **SMALL} if small else dict(config),
            1,
            framework=framework,
            gpu=not small,
            every_s=every_s,
        )

    def __enter__(self) -> Run:
        self._drive.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._drive.__exit__(*error)

    def step_s(self) -> float:
        """What a step takes on average, over a while."""
        all_stepped(self._drive, 0.0, 1, "at the start")
        time.sleep(_WARM_S)
        since = time.monotonic()
        time.sleep(_LOOK_S)
        times = [when for when in self._worker(0.0).times() if when >= since]
        return (times[-1] - times[0]) / (len(times) - 1)

    def kill(self, rounds: int, dice: random.Random) -> list[dict[str, Any]]:
        """What came of each kill."""
        found: list[dict[str, Any]] = []
        since = 0.0
        for _ in range(rounds):
            time.sleep(dice.uniform(*_QUIET_S))
            worker = self._worker(since)
            since = time.monotonic()
            os.kill(worker.pid, signal.SIGKILL)
            when, step = all_stepped(self._drive, since, 1, "after a kill")[0]
            last = worker.last()
            assert last is not None, "a worker that made no step was not killed"
            found.append({"took_s": when - since, "steps_lost": last[1] + 1 - step, "phases": {}})
            _say(f"killed: {found[-1]['took_s']:.3f} s, {found[-1]['steps_lost']} steps lost")
            found[-1]["phases"] = self._phases(since)
        return found

    def _worker(self, since: float) -> Attempt:
        return newest_of_each_rank(attempts_since(self._drive.folder, since))[0]

    def _phases(self, since: float) -> dict[str, float]:
        """Seconds after the kill."""
        lines = (self._drive.folder / "phases.jsonl").read_text().splitlines()
        return {name: at - since for name, at in json.loads(lines[-1]).items()}

    def finish(self) -> list[str]:
        """Returns where the states that were restored came from, and Everstep's own account of the time."""
        (self._drive.folder / "stop").touch()
        self._drive.outcome()
        return phases_of(self._drive.folder / "storage" / "run")


def measure(framework: str, rounds: int, kills: int, small: bool, seed: int) -> dict[str, Any]:
    """Without snapshots and with them in turns; after the last turn with them, the kills."""
    plain, with_snapshots = [], []
    found: dict[str, Any] = {"framework": framework}
    for turn in range(2 * rounds + 1):
        every_s = 1.0 if turn % 2 else None
        with Run(framework, every_s, small) as run:
            took = run.step_s()
            _say(f"{framework}: a step takes {took * 1000:.2f} ms with a snapshot every {every_s} s")
            (plain if every_s is None else with_snapshots).append(took)
            if turn == 2 * rounds - 1:
                found["kills"] = run.kill(kills, random.Random(seed))
            notes = run.finish()
            found["notes"] = notes if every_s is not None else found.get("notes", [])
    found["plain_step_s"], found["step_s"] = plain, with_snapshots
    beside = [(before + after) / 2 for before, after in pairwise(plain)]
    slower = [100 * (took / rest - 1) for took, rest in zip(with_snapshots, beside, strict=True)]
    found["slower_percent"] = slower
    found["median_s"] = statistics.median(kill["took_s"] for kill in found["kills"])
    found["steps_lost"] = max(kill["steps_lost"] for kill in found["kills"])
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.state_gpu", description=__doc__)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help="torch, jax; by default both")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns with snapshots, each between two without"
    )
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a small state on the CPU, to try this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    outcomes = []
    for framework in given.frameworks or LOOPS:
        outcomes.append(measure(framework, given.rounds, given.kills, given.small, given.seed))
        found = outcomes[-1]
        slower = sorted(found["slower_percent"])
        print(
            f"{framework}: {statistics.median(slower):.2f}% slower (median of {len(slower)}, "
            f"{slower[0]:.2f} .. {slower[-1]:.2f}); SIGKILL to the next step {found['median_s']:.3f} s "
            f"(median of {len(found['kills'])}); at most {found['steps_lost']} steps lost, of "
            f"{found['step_s'][-1] * 1000:.1f} ms",
            flush=True,
        )
        for note in found["notes"]:
            print(f"  {note}", flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(outcomes, indent=1) + "\n")


if __name__ == "__main__":
    main()
