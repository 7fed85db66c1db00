"""The training function of the reports benchmark. It needs no framework, and imports none."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

train: Any
if os.environ.get("EVERSTEP_BENCH_SIDE") == "ray":
    import ray.train

    train = ray.train
else:
    import everstep

    train = everstep


def report_many(config: dict[str, Any]) -> None:
    """Report as fast as that goes, and note how fast it went."""
    rank = train.get_context().get_world_rank()
    count = config["reports"]
    train.report({"loss": 0.0, "k": 0})  # the first one meets nobody's queue yet
    began = time.monotonic()
    for k in range(1, count + 1):
        train.report({"loss": 1.0 / k, "k": k})
    ended = time.monotonic()
    note = Path(config["folder"]) / f"rank-{rank}.json"
    note.write_text(json.dumps({"began": began, "ended": ended, "count": count}))
