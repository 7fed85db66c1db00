"""The benchmarks run: Everstep's side of each, once. How fast it was is no matter here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.figures import Row, Sample
from processes import LIMIT_S

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )


def figures_of(name: str, file: Path, *arguments: str) -> dict[str, Any]:
    done = bench(name, "--no-peer", "--json", str(file), *arguments)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(file.read_bytes())["benchmarks"]
    assert found["name"] == name
    for row in found["rows"]:
        assert row["what"] in done.stdout
        assert min(row["everstep"]["values"]) > 0
        assert row["peer"] is row["ratio"] is None
    return dict(found)


def test_recovery_kills_a_rank_in_every_round(tmp_path: Path) -> None:
    found = figures_of("recovery", tmp_path / "figures.json", "--rounds", "2")
    assert found["rows"][0]["everstep"]["rounds"] == 2
    assert any("milliseconds by phase" in note for note in found["notes"])
    assert not any("left over" in note for note in found["notes"])


def test_an_unchanged_script_is_killed_in_every_round(tmp_path: Path) -> None:
    found = figures_of("scripts", tmp_path / "figures.json", "--rounds", "2", "--workers", "2")
    assert found["rows"][0]["everstep"]["rounds"] == 2


def test_start_shows_an_import_of_torch_for_scale(tmp_path: Path) -> None:
    found = figures_of("start", tmp_path / "figures.json", "--rounds", "1")
    assert [row["side"] for row in found["rows"]] == ["Everstep", "Python", "Python"]


def test_reports_are_all_in_the_result(tmp_path: Path) -> None:
    figures_of("reports", tmp_path / "figures.json", "--rounds", "1", "--reports", "500")


def test_steps_are_taken_with_and_without_everstep(tmp_path: Path) -> None:
    found = figures_of("overhead", tmp_path / "figures.json", "--rounds", "1", "--steps", "5")
    assert {row["against"] for row in found["rows"]} == {"plain Python"}
    done = bench("overhead", "--rounds", "1", "--steps", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("% of it") == 2


def test_the_page_of_a_large_run_is_written_and_opened(tmp_path: Path) -> None:
    found = figures_of("pages", tmp_path / "figures.json", "--rounds", "1", "--incidents", "20")
    assert any("20 incidents" in row["what"] for row in found["rows"])


def test_data_is_loaded_beside_a_plain_loader(tmp_path: Path) -> None:
    found = figures_of("data", tmp_path / "figures.json", "--rounds", "1")
    assert {row["against"] for row in found["rows"]} == {"DataLoader", "Ray Train"}
    (cursor,) = re.findall(r"the cursor at sample 10⁹ has (\d+) bytes", " ".join(found["notes"]))
    assert int(cursor) <= 256


def test_imports_are_timed_in_fresh_processes(tmp_path: Path) -> None:
    figures_of("imports", tmp_path / "figures.json", "--rounds", "2")


def test_figures_go_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    done = bench("imports", "--no-peer", "--rounds", "1", "--write", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("before\n<!-- figures: begin -->\n")
    assert text.endswith("<!-- figures: end -->\nafter\n")
    assert "| imports: the package | Everstep |" in text
    assert "old" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["speed"], "no benchmark is called 'speed'"), (["imports", "--rounds", "0"], "0 is less than 1")],
)
def test_a_bad_argument_is_named(arguments: list[str], said: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_paired_rounds_are_compared_pair_by_pair() -> None:
    """A machine that was slow for some of the rounds was so for both sides."""
    ours, theirs = Sample((100.0, 50.0, 99.0)), Sample((100.0, 50.0, 100.0))
    row = Row("samples", "/s", ours, theirs, paired=True)
    assert row.ratio == 1.0
    assert row.ratios == Sample((1.0, 1.0, 0.99))
    assert Row("samples", "/s", ours, theirs).ratio == 0.99
    assert Row("time", "s", ours, theirs, paired=True).ratios == Sample((1.0, 1.0, 100 / 99))
