"""``make demo`` without a terminal: it breaks training in three ways, and each is in the table."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import LIMIT_S

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax")

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_recovers_from_three_failures_and_tells_what_they_cost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO)], capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path
    )
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    assert re.search(r"everstep kill demo-\w+ --rank 1", done.stdout)
    table, _, phases = done.stdout.partition("seconds by phase")
    rows = re.split(r"^ +(?=[123]  )", table.partition("what failed")[2], flags=re.MULTILINE)[1:]
    for row, expected in zip(
        rows,
        (
            {"rank", "1:", "SIGKILL", "restart", "place", "templates,"},
            {"host", "slice-1-host-1:", "heartbeat", "replace", "lost", "hosts", "agents"},
            {"slice", "slice-0", "taken", "away", "replace", "lost", "hosts", "agents"},
        ),
        strict=True,
    ):
        assert expected <= set(row.split()), told  # as words: a cell may be folded
    assert "3 failures" in rows[-1]
    header = next(line.split() for line in phases.splitlines() if "detect" in line)
    assert header == [
        "detect", "stop", "wait", "place", "start", "rendezvous", "restore", "first", "step", "all",
    ]  # fmt: skip
    seconds = [line.split() for line in phases.splitlines() if re.match(r"\s+[123]\s+\d", line)]
    assert len(seconds) == 3
    for figures in seconds:
        # Each figure is rounded to 0.01.
        assert sum(map(float, figures[1:-1])) == pytest.approx(float(figures[-1]), abs=0.06), told
    assert "as if nothing had happened" in done.stdout
    assert not list(tmp_path.iterdir())
