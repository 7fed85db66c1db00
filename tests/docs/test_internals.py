"""The page for whoever changes Everstep names files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "internals.md").read_text()
SOURCE = ROOT / "src" / "everstep"


def named_in(page: str) -> list[str]:
    """Files and folders in backticks. A bare name after one with a folder is in the same folder."""
    found, folder = [], ""
    for line in page.splitlines():
        for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py|(?:[a-z_]+/)+)`", line):
            if "/" in name:
                folder = name.rpartition("/")[0] if name.endswith(".py") else name.rstrip("/")
            found.append(name if "/" in name or (SOURCE / name).exists() else f"{folder}/{name}")
    return found


def test_a_file_that_is_gone_is_noticed() -> None:
    assert named_in("| `driver/loop.py`, `pump.py` | `observe/assets/` | `trainer.py` |") == [
        "driver/loop.py",
        "driver/pump.py",
        "observe/assets/",
        "trainer.py",
    ]


def test_every_file_that_the_page_names_exists() -> None:
    named = named_in(PAGE)
    assert len(named) > 60
    assert [name for name in named if not (SOURCE / name).exists()] == []


def test_every_package_is_on_the_page() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages - {name.partition("/")[0] for name in named_in(PAGE)} == set()


@pytest.mark.parametrize("package", ["", "control", "driver", "journal", "observe"])
def test_every_module_is_on_the_page(package: str) -> None:
    modules = {str(path.relative_to(SOURCE)) for path in (SOURCE / package).glob("[!_]*.py")}
    assert modules - {*named_in(PAGE)} == set()
