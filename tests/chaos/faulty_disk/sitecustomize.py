"""A disk that breaks as told. Every Python that has this folder on its PYTHONPATH imports this at its start.

The file that EVERSTEP_TEST_DISK names says what is wrong with the disk now: ``full``, ``broken``, ``slow``
and how many bytes it takes a second, or nothing. Only what Everstep writes to a folder of runs feels it; of
``full attacked.py``, only what the process of that script writes.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "everstep.storage.folder"


class BreakOnImport(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            break_writes(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def break_writes(module: Any) -> None:
    write = module.Draft.write

    def broken_write(self: Any, data: memoryview) -> None:
        suffer(len(data))
        write(self, data)

    module.Draft.write = broken_write


def suffer(size: int) -> None:
    try:
        with open(os.environ["EVERSTEP_TEST_DISK"]) as told:
            what = told.read().split()
    except FileNotFoundError:
        return
    match what:
        case ["full", script] if not any(word.endswith(script) for word in sys.orig_argv):
            pass  # workers have the script's own sys.argv, and were started otherwise
        case ["full", *_]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case ["broken"]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        case ["slow", rate]:
            time.sleep(size / float(rate))
        case _:
            pass


if "EVERSTEP_TEST_DISK" in os.environ:
    sys.meta_path.insert(0, BreakOnImport())
