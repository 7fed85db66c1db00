"""The README: its script restores at another world size, and its links lead somewhere, also on PyPI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from everstep import Result
from processes import LIMIT_S

from .pages import PAGES, ROOT, blocks

sys.path.insert(0, str(ROOT / "scripts"))

import readme_for_pypi

README = PAGES["README.md"].read_text()
SCRIPT = next(block.code for block in blocks("README.md") if block.language == "python")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _train(folder: Path, *, workers: int, steps: int) -> Result:
    """The README's script with these numbers, going on where an earlier one has finished."""
    code = SCRIPT
    for there, here in (
        ("num_workers=(2, 4)", f"num_workers={workers}"),
        ('"steps": 1000', f'"steps": {steps}'),
        ('name="mine"', 'name="mine", if_finished="continue"'),
    ):
        assert there in code
        code = code.replace(there, here)
    script = folder / "train.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Result.from_path(str(folder / "everstep_results" / "mine"))


def test_the_torch_script_restores_at_another_world_size(tmp_path: Path) -> None:
    first = _train(tmp_path, workers=2, steps=5)
    assert len(first.metrics_history) == 5
    second = _train(tmp_path, workers=1, steps=8)
    assert len(second.metrics_history) == 8, "three more, and none again"


def test_links_lead_to_files_that_are_there() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_on_pypi_links_lead_to_the_repository() -> None:
    shown = readme_for_pypi.absolute(README, PROJECT["urls"]["Repository"])
    assert not re.search(r"\]\((?!https?:)", shown)
    assert f"]({PROJECT['urls']['Repository']}/raw/main/docs/images/panel.svg)" in shown
    assert f"]({PROJECT['urls']['Repository']}/blob/main/docs/tutorial.md)" in shown


def test_the_site_links_to_the_same_repository() -> None:
    assert f"repository: {PROJECT['urls']['Repository']}\n" in (ROOT / "mkdocs.yml").read_text()


def test_pictures_fetch_nothing() -> None:
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        assert "url(http" not in picture.read_text(), picture.name
        assert "@import" not in picture.read_text(), picture.name
