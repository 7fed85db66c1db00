"""A training function that the worker loads itself, rather than its template.

What it has captured can't be loaded in a process that is forked from later: a handle of a Ray actor needs a
connection, and that has threads.
"""

from __future__ import annotations

from typing import Any

import cloudpickle


class LoadedByWorker:
    """Stands for the function until it is called."""

    def __init__(self, code: bytes) -> None:
        self._code = code

    def __call__(self, *arguments: Any) -> Any:
        return cloudpickle.loads(self._code)(*arguments)
