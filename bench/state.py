"""From the kill of a worker to the next step of *all* ranks, which keep a large state in memory.

Every rank takes a snapshot of its whole state after each step. The floor is what the machine needs for the
copies alone: as many processes at once, each of which copies as much out of shared memory into fresh memory,
and reads it once more for the digest.
"""

from __future__ import annotations

import mmap
import os
import time

from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.recovery import kill_again_and_again

TITLE = "SIGKILL of a random rank to the next step of all ranks, with a large state in memory"
ROUNDS, PEER_ROUNDS = 10, 1
MIB = 256


def measure(options: Options) -> Outcome:
    notes: list[str] = []
    config = {"step_s": 0.01, "mib": float(MIB)}
    ours = kill_again_and_again(
        "everstep", options.rounds, options, notes, function="loops:keep_state", config=config
    )
    floor = Sample(tuple(_copies(options.workers) for _ in range(options.rounds)))
    row = Row(
        f"kill to next step of {options.workers} ranks of {MIB} MiB", "s", ours, floor, against="copies alone"
    )
    return Outcome("state", TITLE, (row,), tuple(notes))


def _copies(processes: int) -> float:
    """Seconds until the last of so many processes has got its state back."""
    import torch  # before the forks, as a template has it

    source = mmap.mmap(-1, MIB << 20)
    source.write(os.urandom(1 << 20) * MIB)
    began = time.monotonic()
    children = []
    for _ in range(processes):
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            shared = torch.frombuffer(source, dtype=torch.int64)
            int(shared.sum())
            shared.clone()
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return time.monotonic() - began
