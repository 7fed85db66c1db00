"""One world for each test, which ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .runs import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.until.touch()  # also after a failure
