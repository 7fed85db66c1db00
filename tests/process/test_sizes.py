"""Amounts, as people read them."""

from __future__ import annotations

import pytest

from everstep.process.sizes import in_units


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (0, "0 MiB"),
        (37 << 20, "37 MiB"),
        ((1 << 30) - 1, "1024 MiB"),
        (1 << 30, "1.0 GiB"),
        (5 << 29, "2.5 GiB"),
    ],
)
def test_small_amounts_are_told_in_mib(size: int, says: str) -> None:
    assert in_units(size) == says
