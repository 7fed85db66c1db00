"""What is reported as metrics: as bytes, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from everstep.errors import ConfigError, TooLargeError
from everstep.protocol import framing

_encoder = msgspec.msgpack.Encoder(enc_hook=framing.encode_odd)
_DEEPEST = 4
_MOST_LEVELS = 100
"""That metrics may be nested: readers have to follow."""
_NESTS = (dict, list, tuple, set, frozenset)
_PLAIN = frozenset((float, int, str))
"""What nearly all metrics are: where there is nothing else, nothing is nested."""
NO_METRICS = msgspec.Raw(msgspec.msgpack.encode({}))


def encode_metrics(metrics: dict[str, Any]) -> bytes:
    if not isinstance(metrics, dict):
        raise ConfigError(f"report(metrics) got {type(metrics).__name__}", "give it a dict", field="metrics")
    if not _PLAIN.issuperset(map(type, metrics.values())) and _is_too_deep(metrics):
        raise _too_deep(next(key for key in metrics if _is_too_deep({key: metrics[key]})))
    try:
        return _encoder.encode(metrics)
    except RecursionError:  # by way of the user's own classes
        raise _too_deep(next(iter(metrics))) from None
    except (TypeError, ValueError, OverflowError) as error:
        for key, value in metrics.items():
            try:
                _encoder.encode({key: value})
            except (TypeError, ValueError, OverflowError) as reason:
                raise ConfigError(
                    f"report(metrics): {key!r} can't be reported: {reason}",
                    "report numbers, strings, lists and dicts of them; a tensor with .item() or .tolist()",
                    field="metrics",
                ) from error
        raise


def _is_too_deep(metrics: dict[Any, Any]) -> bool:
    """Also if it contains itself. Level by level, each container once: there may be many ways to one."""
    level = _containers(metrics)
    for _ in range(_MOST_LEVELS - 1):
        if not level:
            return False
        once = {id(one): one for one in level}
        level = [inner for one in once.values() for inner in _containers(one)]
    return bool(level)


def _containers(outer: Any) -> list[Any]:
    inner = outer.values() if isinstance(outer, dict) else outer
    return [one for one in inner if isinstance(one, _NESTS)]


def _too_deep(key: object) -> ConfigError:
    return ConfigError(
        f"report(metrics): {key!r} is nested more than {_MOST_LEVELS} levels deep, or contains itself",
        "report numbers, strings, lists and dicts of them, with fewer levels",
        field="metrics",
    )


def flat_numbers(metrics: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    """Numbers alone; those in nested dicts are called ``a/b``."""
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from flat_numbers(value, f"{name}/", depth + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            try:
                yield name, float(value)
            except OverflowError:
                yield name, math.inf if value > 0 else -math.inf


def too_large(metrics: dict[str, Any], size: int) -> TooLargeError:
    sizes = {key: len(_encoder.encode(value)) for key, value in metrics.items()}
    largest = max(sizes, key=lambda key: sizes[key])
    return TooLargeError(
        f"report(metrics) of {framing.as_size(size)}, of which {largest!r} has "
        f"{framing.as_size(sizes[largest])}: at most {framing.as_size(framing.MAX_PAYLOAD)} can be "
        "reported at once",
        "save large values as files of a checkpoint, and report numbers about them",
    )


def find_metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """The number called ``name``, or found by following ``a/b`` through nested dicts. Names may have slashes
    of their own.
    """
    try:
        found = _found(metrics, name)
        return None if found is None else float(found)
    except (TypeError, ValueError):
        return None


def _found(metrics: Mapping[str, Any], name: str) -> Any:
    if (found := metrics.get(name)) is not None:
        return found
    nested = (
        _found(value, name.removeprefix(f"{key}/"))
        for key, value in metrics.items()
        if isinstance(value, Mapping) and name.startswith(f"{key}/")
    )
    return next((found for found in nested if found is not None), None)
