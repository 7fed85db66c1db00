"""How long some lines of Python take in a fresh process, the interpreter's own start not counted."""

from __future__ import annotations

import os
import subprocess
import sys


def seconds_to_run(lines: str, **environment: str) -> float:
    timed = f"import time; began = time.perf_counter()\n{lines}\nprint(time.perf_counter() - began)"
    done = subprocess.run(
        [sys.executable, "-c", timed],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return float(done.stdout.split()[-1])
