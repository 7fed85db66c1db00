"""Prints the public surface of the installed Ray Train v2 as JSON. Run as a script; starts no cluster.

A process of its own, because whether Ray Train is v2 is decided by the environment when it is first imported.
"""

from __future__ import annotations

import os

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import enum
import importlib
import inspect
import json
from typing import Any

MODULES = {
    "ray.train": None,
    "ray.train.torch": None,
    "ray.train.v2.jax": None,
    "ray.train.collective": None,
    "ray.train.v2.torch.torchft_config": ["TorchftConfig"],  # public by its use, it has no __all__
}


def main() -> None:
    surface = {}
    public: dict[type, str] = {}
    for module_name, names in MODULES.items():
        module = importlib.import_module(module_name)
        for name in names or module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                public[value] = name
    for module_name, names in MODULES.items():
        module = importlib.import_module(module_name)
        surface[module_name] = {
            name: describe(getattr(module, name), public) for name in names or module.__all__
        }
    print(json.dumps(surface))


def describe(value: Any, public: dict[type, str]) -> dict[str, Any]:
    """Its parameters; and of a class its members, with theirs and the oldest public class that has them."""
    if not inspect.isclass(value):
        return {"parameters": parameters(value) if callable(value) else {}, "members": {}}
    own = {} if issubclass(value, enum.Enum) else parameters(value)
    hidden = set(dir(Exception)) if issubclass(value, BaseException) else set()
    members = {}
    for name in dir(value):
        if name.startswith("_") or name in own or name in hidden:
            continue
        member = getattr(value, name)
        owner = [public[base] for base in value.__mro__ if base in public and hasattr(base, name)][-1]
        is_method = inspect.isroutine(member) and callable(member)
        members[name] = {"parameters": parameters(member) if is_method else {}, "from": owner}
    return {"parameters": own, "members": members}


def parameters(function: Any) -> dict[str, Any]:
    """Name to default of every parameter that can be named; a default that isn't plain is ``"…"``."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return {}
    found = {}
    for parameter in signature.parameters.values():
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variable or parameter.name == "self" or parameter.name.startswith("_"):
            continue
        plain = isinstance(parameter.default, (bool, int, float, str))
        found[parameter.name] = parameter.default if plain else "…"
    return found


main()
