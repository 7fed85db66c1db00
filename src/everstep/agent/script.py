"""A script as it is, in place of a training function: what ``everstep run`` starts."""

from __future__ import annotations

import ast
import atexit
import concurrent.futures.thread
import importlib.util
import multiprocessing.util
import os
import runpy
import sys
import threading
from pathlib import Path

_runs_here = False
"""This process is a script's, or was forked from one."""


def is_script_here() -> bool:
    """Whether ``everstep run`` has started what runs in this process."""
    return _runs_here


class ScriptRun:
    """Called in a worker, it is the script: ``__main__``, with its own arguments and its own folder first."""

    def __init__(self, script: str, *, is_module: bool = False) -> None:
        self.script = script
        self.is_module = is_module

    def __call__(self) -> None:
        from everstep.training import get_context

        # What a script under torchrun looks at to see whether it was restarted.
        restarts = str(get_context().get_attempt() - 1)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["EVERSTEP_RESTART_COUNT"] = restarts
        _mark()
        atexit._clear()  # of the process that this one was forked from
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        try:
            self._run()
        except SystemExit as error:
            if error.code:
                raise  # a failure, reported at once
        _end_as_python_does()

    def _run(self) -> None:
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.script).resolve().parent))
            runpy.run_path(self.script, run_name="__main__")

    def imports(self) -> list[str]:
        """Installed packages that the script names in import lines, found without running it. Its own modules
        aren't among them: they may have changed by the next attempt.
        """
        path = self._file()
        if path is None:
            return []
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            return []  # the worker says so, with the line
        names: dict[str, None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(dict.fromkeys(alias.name for alias in node.names))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names[node.module] = None
        return [name for name in names if _is_installed(name)]

    def _file(self) -> Path | None:
        if not self.is_module:
            return Path(self.script)
        found = importlib.util.find_spec(self.script)
        if found is not None and found.submodule_search_locations:
            found = importlib.util.find_spec(f"{self.script}.__main__")
        return Path(found.origin) if found is not None and found.origin else None


def _mark() -> None:
    global _runs_here
    _runs_here = True


def _end_as_python_does() -> None:
    """What Python does at the end of a script, and a worker, which goes on after it, doesn't: wait for the
    threads and processes that it started, and call what it has registered with ``atexit``.
    """
    while started := [thread for thread in threading.enumerate() if _is_awaited(thread)]:
        started[0].join()
    atexit._run_exitfuncs()


def _is_awaited(thread: threading.Thread) -> bool:
    # Those of an executor wait for more to do for ever; ours are among them.
    of_executor = thread in concurrent.futures.thread._threads_queues
    return not (thread.daemon or of_executor or thread is threading.current_thread())


def _is_installed(name: str) -> bool:
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names:
        return False
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and "site-packages" in str(found.origin or "")
