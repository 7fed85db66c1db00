"""The user's function, made ready for its journey: pickled, with what its template should import."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

from everstep.agent.loaded_by_worker import LoadedByWorker
from everstep.agent.script import ScriptRun
from everstep.backend.base import Backend, packages_of
from everstep.driver.changes import SCALING
from everstep.errors import ConfigError, FunctionLoadError
from everstep.protocol import framing

# Importing these starts threads or talks to a cluster: not before a fork.
_NOT_BEFORE_A_FORK = frozenset({"ray", "tensorflow", "everstep", "__future__"})


def pickle_function(function: Any, backend: Backend) -> bytes:
    """The function and its backend, or an error that names the object which can't travel."""
    try:
        code, for_worker = _dumps(function)
        if for_worker:
            function = LoadedByWorker(code)
        return bytes(cloudpickle.dumps((function, backend)))
    except Exception as error:  # objects raise whatever they like from their own __reduce__
        culprit = _culprit(function)
        raise FunctionLoadError(
            f"the training function can't be pickled: {culprit or error}",
            "make it inside the training function, or pass what it is made from in train_loop_config",
        ) from error


def check_validation(function: Any) -> None:
    """Whether the function that validates checkpoints can travel, before anything starts."""
    try:
        cloudpickle.dumps(function)
    except Exception as error:
        raise FunctionLoadError(
            f"ValidationConfig.fn can't be pickled: {_culprit(function) or error}",
            "make what it needs inside it, or hand it over in fn_kwargs",
        ) from error


def pickle_arguments(config: Mapping[str, Any] | None, datasets: Mapping[str, Any]) -> bytes:
    """What the function is called with, the config or nothing, and the data sets that it can ask for."""
    arguments = () if config is None else (dict(config),)
    try:
        return _dumps((arguments, dict(datasets)))[0]
    except Exception as error:
        for name, value in _given(config, datasets).items():
            if not _travels(value):
                raise FunctionLoadError(
                    f"{name} can't be pickled: {type(value).__name__} ({error})",
                    "make it inside the training function",
                ) from error
        raise FunctionLoadError(f"train_loop_config can't be pickled: {error}") from error


def _given(config: Mapping[str, Any] | None, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """All that is handed to the training function, by the name that it has in the user's script."""
    return {
        **{f"train_loop_config[{key!r}]": value for key, value in (config or {}).items()},
        **{f"datasets[{name!r}]": value for name, value in datasets.items()},
    }


def check_framework(backend: Backend) -> None:
    """Refuse to start workers in this environment without the packages that they can't do without."""
    for package in packages_of(backend):
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise FunctionLoadError(
                f"the workers need {package}, which isn't installed for {sys.executable}",
                f"install it there, for example with pip install {package}",
            )


def check_size(
    function: Any,
    code: bytes,
    config: Mapping[str, Any] | None,
    datasets: Mapping[str, Any],
    arguments: bytes,
) -> None:
    """Refuse what is too large to be sent to the workers, and name it."""
    size = len(code) + len(arguments)
    if size <= framing.MAX_PAYLOAD:
        return
    if len(code) >= len(arguments):
        what, parts = "the training function", {repr(n): v for n, v in _used(function).items()}
    else:
        what = "train_loop_config, with the data sets," if datasets else "train_loop_config"
        parts = _given(config, datasets)
    sizes = {name: _size(value) for name, value in parts.items()}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    most = f", most of it {largest} ({framing.as_size(sizes[largest])})" if largest else ""
    raise FunctionLoadError(
        f"{what} is too large to be sent to the workers: {framing.as_size(max(len(code), len(arguments)))} "
        f"pickled{most}. Function and config together may have {framing.as_size(framing.MAX_PAYLOAD)}",
        "load it inside the training function, from a path that you give in train_loop_config",
    )


def _size(value: Any) -> int:
    try:
        return len(cloudpickle.dumps(value))
    except Exception:  # by itself it may not travel; then it isn't what we look for
        return 0


def _dumps(value: Any) -> tuple[bytes, bool]:
    """Pickled, and whether only a worker can load it: there are handles of Ray actors in it."""
    if "ray" not in sys.modules:
        return bytes(cloudpickle.dumps(value)), False
    from everstep.engine.ray import handles

    return handles.dumps(value)


def _travels(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:  # as above: anything may be raised, and all of it means no
        return False
    return True


def _culprit(function: Any) -> str:
    """The global or captured variable that stops the function from being pickled."""
    for name, value in _used(function).items():
        if value is not function and not _travels(value):
            return f"it uses {name!r}, a {type(value).__module__}.{type(value).__qualname__}"
    return ""


def _used(function: Any) -> dict[str, Any]:
    """The global and captured variables of a function, by name."""
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return {}
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not yet assigned
    names = {name for inner in _codes(code) for name in inner.co_names}
    found.update((n, v) for n, v in getattr(function, "__globals__", {}).items() if n in names)
    return found


def _codes(code: CodeType) -> list[CodeType]:
    out = [code]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            out += _codes(constant)
    return out


def imports_of(function: Any, seen: tuple[Any, ...] = ()) -> list[str]:
    """Modules that the function imports in its body: the template can do that once, for all workers.

    Functions that it has captured (a decorator's, a partial's) count as its own.
    """
    if isinstance(function, functools.partial):
        return imports_of(function.func, seen)
    if isinstance(function, ScriptRun):
        return function.imports()
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    names: dict[str, None] = {}
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not yet assigned
            captured = cell.cell_contents
            known = any(captured is one for one in (function, *seen))
            if not known and isinstance(captured, FunctionType | functools.partial):
                names.update(dict.fromkeys(imports_of(captured, (function, *seen))))
    for inner in _codes(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname == "IMPORT_NAME":
                name = str(instruction.argval)
                if name and name.split(".")[0] not in _NOT_BEFORE_A_FORK:
                    names[name] = None
    return list(names)


def given_variables(runtime_env: Mapping[str, Any]) -> dict[str, str]:
    """Variables that the user sets for the workers, on any host."""
    return {"PYTHONUNBUFFERED": "1", **{str(k): str(v) for k, v in runtime_env.get("env_vars", {}).items()}}


def template_environment(runtime_env: Mapping[str, Any]) -> dict[str, str]:
    """What the template is started with: frameworks read some variables when they are imported."""
    env = {**os.environ, **given_variables(runtime_env)}
    env["PYTHONPATH"] = os.pathsep.join(python_path(runtime_env))
    return env


def working_folder(runtime_env: Mapping[str, Any]) -> str:
    return str(runtime_env.get("working_dir") or _here())


def check_working_folder(runtime_env: Mapping[str, Any]) -> None:
    """Refuse to start workers in a folder that was removed since it was given."""
    folder = working_folder(runtime_env)
    if "://" not in folder and not os.path.isdir(folder):
        raise ConfigError(
            f"worker_runtime_env['working_dir'] is {folder!r}, which was removed",
            "make it again, or give another",
            "RunConfig.worker_runtime_env.working_dir",
        )


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working folder of this process was removed, and workers start in it",
            "change to one that exists, or give RunConfig(worker_runtime_env={'working_dir': …})",
        ) from None


def python_path(runtime_env: Mapping[str, Any]) -> list[str]:
    """This process's own path, so that a module beside the user's script is found; the script's folder is its
    first entry.
    """
    path = [p or str(_here()) for p in sys.path]
    folder = runtime_env.get("working_dir")
    return [str(folder), *path] if folder else path


def fingerprint(function: Any, config: Mapping[str, Any] | None, scaling: object) -> str:
    """Whether this is the code that runs already: the same for the same script, in any process.

    Made of the config, the function's code and the text of the user's modules that are loaded. Not of its
    pickle, which differs from process to process.
    """
    digest = hashlib.sha256()
    for part in (_canonical(config), _canonical(scaling), _code_text(function)):
        digest.update(part.encode() + b"\0")
    for path in sorted(_user_files()):
        with contextlib.suppress(OSError):
            digest.update(path.encode() + b"\0" + Path(path).read_bytes() + b"\0")
    return digest.hexdigest()


def code_digests(function: Any, scaling: object) -> dict[str, str]:
    """Of each thing that ``fingerprint`` is made of, but for the config, by its name or its path."""
    found = {"the training function": _code_text(function).encode(), SCALING: _canonical(scaling).encode()}
    for path in _user_files():
        with contextlib.suppress(OSError):
            found[path] = Path(path).read_bytes()
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in found.items()}


def config_digest(config: Mapping[str, Any] | None) -> str:
    return hashlib.sha256(_canonical(config).encode()).hexdigest()


def _canonical(value: Any, above: tuple[int, ...] = ()) -> str:
    """``above``: what it is in, by identity. What contains itself is named by how far up it begins."""
    if id(value) in above:
        return f"^{len(above) - above.index(id(value))}"
    inside = functools.partial(_canonical, above=(*above, id(value)))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k!r}:{inside(v)}" for k, v in sorted(value.items(), key=repr)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(inside, value)) + "]"
    if value is None or isinstance(value, str | bytes | int | float | bool):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return inside({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, FunctionType):
        return _code_text(value, (*above, id(value)))
    # An object's address is in its repr, and says nothing.
    return _ADDRESS.sub("", f"{type(value).__module__}.{type(value).__qualname__}:{value!r}")


def _code_text(function: Any, above: tuple[int, ...] = ()) -> str:
    inside = functools.partial(_canonical, above=above or (id(function),))
    if isinstance(function, functools.partial):
        return _code_text(function.func, above) + inside(list(function.args)) + inside(function.keywords)
    code = getattr(function, "__code__", None)
    if code is None:
        return inside(vars(function)) if hasattr(function, "__dict__") else repr(type(function))
    parts = []
    for inner in _codes(code):
        constants = [c for c in inner.co_consts if not isinstance(c, CodeType)]
        parts.append(f"{inner.co_name}{inner.co_code.hex()}{inner.co_names}{constants!r}")
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _assigned(cell)]
    captured = [c for c in cells if c is not function]
    return "|".join(parts) + inside(getattr(function, "__defaults__", None)) + inside(captured)


def _assigned(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - whether it can be read is the question
    except ValueError:
        return False
    return True


def _user_files() -> list[str]:
    """Source files of loaded modules that are neither Python's own nor installed, nor ours."""
    places = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = str(Path(__file__).parents[1])
    found = []
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and path.endswith(".py") and not path.startswith((*places, ours)):
            found.append(os.path.abspath(path))
    return found


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
