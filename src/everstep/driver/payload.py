"""The user's function, made ready for its journey: pickled, with what its template should import."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

from everstep.backend.base import Backend
from everstep.errors import FunctionLoadError

# Importing these starts threads or talks to a cluster: not before a fork.
_NOT_BEFORE_A_FORK = frozenset({"ray", "tensorflow", "everstep", "__future__"})


def pickle_function(function: Any, backend: Backend) -> bytes:
    """The function and its backend, or an error that names the object which can't travel."""
    try:
        return bytes(cloudpickle.dumps((function, backend)))
    except Exception as error:  # objects raise whatever they like from their own __reduce__
        culprit = _culprit(function)
        raise FunctionLoadError(
            f"the training function can't be pickled: {culprit or error}",
            "make it inside the training function, or pass what it is made from in train_loop_config",
        ) from error


def pickle_arguments(config: Mapping[str, Any] | None) -> bytes:
    """What the function is called with: the config, or nothing."""
    arguments = () if config is None else (dict(config),)
    try:
        return bytes(cloudpickle.dumps(arguments))
    except Exception as error:
        for key, value in (config or {}).items():
            if not _travels(value):
                raise FunctionLoadError(
                    f"train_loop_config[{key!r}] can't be pickled: {type(value).__name__} ({error})",
                    "make it inside the training function",
                ) from error
        raise FunctionLoadError(f"train_loop_config can't be pickled: {error}") from error


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # as above: anything may be raised, and all of it means no
        return False
    return True


def _culprit(function: Any) -> str:
    """The global or captured variable that stops the function from being pickled."""
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return ""
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not yet assigned
    names = {name for inner in _codes(code) for name in inner.co_names}
    found.update((n, v) for n, v in getattr(function, "__globals__", {}).items() if n in names)
    for name, value in found.items():
        if value is not function and not _travels(value):
            return f"it uses {name!r}, a {type(value).__module__}.{type(value).__qualname__}"
    return ""


def _codes(code: CodeType) -> list[CodeType]:
    out = [code]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            out += _codes(constant)
    return out


def imports_of(function: Any) -> list[str]:
    """Modules that the function imports in its body: the template can do that once, for all workers.

    Functions that it has captured (a decorator's, a partial's) count as its own.
    """
    if isinstance(function, functools.partial):
        return imports_of(function.func)
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    names: dict[str, None] = {}
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not yet assigned
            captured = cell.cell_contents
            if captured is not function and isinstance(captured, FunctionType | functools.partial):
                names.update(dict.fromkeys(imports_of(captured)))
    for inner in _codes(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname == "IMPORT_NAME":
                name = str(instruction.argval)
                if name and name.split(".")[0] not in _NOT_BEFORE_A_FORK:
                    names[name] = None
    return list(names)


def template_environment(runtime_env: Mapping[str, Any]) -> dict[str, str]:
    """What the template is started with: frameworks read some variables when they are imported."""
    env = dict(os.environ)
    env.update({str(k): str(v) for k, v in runtime_env.get("env_vars", {}).items()})
    env["PYTHONPATH"] = os.pathsep.join(python_path(runtime_env))
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


def working_folder(runtime_env: Mapping[str, Any]) -> str:
    return str(runtime_env.get("working_dir") or Path.cwd())


def python_path(runtime_env: Mapping[str, Any]) -> list[str]:
    """This process's own path, so that a module beside the user's script is found; the script's folder is its
    first entry.
    """
    path = [p or str(Path.cwd()) for p in sys.path]
    folder = runtime_env.get("working_dir")
    return [str(folder), *path] if folder else path
