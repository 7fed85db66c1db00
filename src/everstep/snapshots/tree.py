"""A state as a tree: what isn't a tensor as JSON, and tensors by name.

Dicts with string keys, lists, numbers, strings and None look in JSON as they do in Python. What JSON doesn't
have is an object with one key: ``{"$tensor": name}``, ``{"$tuple": […]}``, ``{"$dict": [[key, value], …]}``,
``{"$counter": [[key, count], …]}``, ``{"$bytes": base64}`` and ``{"$int": hexadecimal}`` of a long one.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from everstep.errors import ConfigError

Path = tuple[Any, ...]
"""Keys and positions from the root of a state to a value in it."""
_LONG = 1 << 12
"""Bits of a number from which on it isn't written in decimal digits: Python reads only so many."""


class Flattened:
    """A state that has been taken apart."""

    def __init__(self, values: Mapping[str, Any], is_tensor: Callable[[Any], bool]) -> None:
        self.tensors: dict[str, Any] = {}
        self._is_tensor = is_tensor
        self.tree = {name: self._part(name, value) for name, value in values.items()}

    def _part(self, name: str, value: Any) -> Any:
        try:
            return self._encode(value, (name,))
        except RecursionError:
            raise ConfigError(
                f"{name} in the state contains itself, or is nested too deeply",
                "keep tensors, numbers, strings, and dicts, lists and tuples of them in a state",
                f"State.{name}",
            ) from None

    def _encode(self, value: Any, path: Path) -> Any:
        # Training waits for this. What there is most of comes first.
        if self._is_tensor(value):
            return {"$tensor": self._named(value, path)}
        if isinstance(value, int) and value.bit_length() > _LONG:
            return {"$int": hex(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Counter):
            return {"$counter": self._pairs(value, path)}
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str) or key[:1] == "$":
                    return {"$dict": self._pairs(value, path)}
            return {key: self._encode(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._encode(item, (*path, place)) for place, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        raise ConfigError(
            f"{as_text(path)} in the state is a {type(value).__module__}.{type(value).__qualname__}, which "
            "can't be saved",
            "keep tensors, numbers, strings, and dicts, lists and tuples of them in a state; give anything "
            "else state_dict() and load_state_dict()",
            f"State.{path[0]}",
        )

    def _pairs(self, value: Mapping[Any, Any], path: Path) -> list[list[Any]]:
        return [[self._encode(k, (*path, k)), self._encode(v, (*path, k))] for k, v in value.items()]

    def _named(self, tensor: Any, path: Path) -> str:
        name = "/".join(map(str, path)).encode(errors="backslashreplace").decode()
        while name in self.tensors:  # the keys 0 and "0" of one dict
            name += "'"
        self.tensors[name] = tensor
        return name


def rebuild(tree: Mapping[str, Any], tensor: Callable[[str, Path], Any]) -> dict[str, Any]:
    """The values that a tree was made of. ``tensor(name, path)`` gives a tensor."""

    def decode(value: Any, path: Path) -> Any:
        if isinstance(value, list):
            return [decode(item, (*path, place)) for place, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        for key, content in value.items():
            if not key.startswith("$"):
                break
            return special(key, content, path)
        return {key: decode(item, (*path, key)) for key, item in value.items()}

    def special(kind: str, content: Any, path: Path) -> Any:
        match kind:
            case "$tensor":
                return tensor(content, path)
            case "$tuple":
                return tuple(decode(item, (*path, place)) for place, item in enumerate(content))
            case "$int":
                return int(content, 16)
            case "$bytes":
                return base64.b64decode(content)
            case _:
                keys = [decode(key, path) for key, _ in content]
                values = [decode(pair[1], (*path, key)) for key, pair in zip(keys, content, strict=True)]
                pairs = dict(zip(keys, values, strict=True))
                return Counter(pairs) if kind == "$counter" else pairs

    return {name: decode(value, (name,)) for name, value in tree.items()}


def as_text(path: Path) -> str:
    """A place in a state, as a user would write it."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])
