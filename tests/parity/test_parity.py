"""What docs/from-ray-train.md calls the same is the same: one small function under Ray Train and under
Everstep, and what they see compared. And whole scripts, of which only the imports differ.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from processes import LIMIT_S
from test_from_ray_train import items_that_are

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "from_ray_train"
NEEDED = ("ray", "pyarrow", "pandas", "torch", "jax")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason=f"needs {', '.join(NEEDED)}: both sides run here",
)

Seen = dict[str, dict[str, Any]]
"""By side, and by row or script."""


def seen_by(side: str, what: str) -> dict[str, Any]:
    """In a process of its own; one Ray cluster serves all of its runs."""
    with tempfile.TemporaryDirectory(prefix="ep", ignore_cleanup_errors=True) as out:
        done = subprocess.run(
            [sys.executable, str(HERE / "both.py"), side, what, out],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "RAY_TMPDIR": out},
        )
        assert done.returncode == 0, done.stderr[-6000:]
        found: dict[str, Any] = json.loads(Path(out, "seen.json").read_text())
        return found


@pytest.fixture(scope="module")
def rows_seen() -> Seen:
    return {side: seen_by(side, "rows") for side in ("everstep", "ray")}


@pytest.fixture(scope="module")
def examples_seen() -> dict[str, Any]:
    return seen_by("everstep", "examples")


@pytest.fixture(scope="module")
def examples_seen_by_ray() -> dict[str, Any]:
    return seen_by("ray", "examples")


def rows() -> list[str]:
    """Every name, member and argument that the page calls the same."""
    return sorted({str(item).partition(": ")[2] for item in items_that_are("same")})


def test_every_row_that_says_same_is_tried(rows_seen: Seen) -> None:
    assert sorted(set(rows()) - set(rows_seen["everstep"])) == []


@pytest.mark.parametrize("row", rows())
def test_it_is_the_same(row: str, rows_seen: Seen) -> None:
    assert rows_seen["everstep"][row] == rows_seen["ray"][row]


SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
BOTH = json.loads((HERE / "examples.json").read_text())
"""What each example gives on both sides. Ray Train takes three minutes of a processor for them, so that it
is asked again by ``make soak`` only.
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_gives_what_it_gives_under_ray_train(script: str, examples_seen: dict[str, Any]) -> None:
    assert examples_seen[script] == BOTH[script]


@pytest.mark.soak
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_still_gives_that_under_ray_train(
    script: str, examples_seen_by_ray: dict[str, Any]
) -> None:
    assert examples_seen_by_ray[script] == BOTH[script]


@pytest.mark.soak
def test_a_tune_trial_runs_a_trainer_as_the_page_says(examples_seen_by_ray: dict[str, Any]) -> None:
    assert examples_seen_by_ray["tune"] == [0.02, 0.2]
