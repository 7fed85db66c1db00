"""Arguments that are numbers, as Python's own: NumPy's are taken, and none of them gets into a cursor."""

from __future__ import annotations

import operator
from typing import Any

from everstep.errors import ConfigError


def index_of(value: object) -> int | None:
    """The whole number that a value is, of any type. Truth values are none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_number(field: str, value: object, least: int = 1) -> int:
    number = index_of(value)
    if number is None or number < least:
        name = field.rpartition(".")[2]
        raise ConfigError(
            f"{field} is {value!r}, expected a number of {least} or more.",
            f"Give {name}={least} or more.",
            field,
        )
    return number


def truth(field: str, value: Any) -> bool:
    if index_of(value) not in (0, 1) and type(value).__name__ not in ("bool", "bool_"):
        raise ConfigError(
            f"{field} is {value!r}, expected True or False.",
            f"Give {field.rpartition('.')[2]}=True or False.",
            field,
        )
    return bool(value)


def seed_of(value: object) -> int:
    seed = index_of(value)
    if seed is None or not -(2**63) <= seed < 2**63:
        raise ConfigError(
            f"Stream.seed is {value!r}, expected a whole number of at most 64 bits.",
            "Give seed=0.",
            "Stream.seed",
        )
    return seed
