"""Which of Ray's nodes a worker is on.

``ray.init`` joins a cluster through any raylet that it finds running on this machine, the head's first. Where
there are several (nodes that share a machine, or containers that share its processes), a worker might join as
another node than its own. Ray has no setting for it, so its search is replaced here once it is imported; a
worker that doesn't import Ray pays nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

VARIABLE = "EVERSTEP_RAY_NODE"
"""Set by the actor that starts an agent on a Ray node: the node's id."""

_SERVICES = "ray._private.services"


def join_through(node_id: str) -> None:
    """From here on ``ray.init`` joins through this node."""
    loaded = sys.modules.get(_SERVICES)
    if loaded is not None:
        _replace_search(loaded, node_id)
    else:
        sys.meta_path.insert(0, _OnceImported(node_id))


def _replace_search(services: ModuleType, node_id: str) -> None:
    services.find_node_ids = lambda: {node_id}  # type: ignore[attr-defined]


class _OnceImported(importlib.abc.MetaPathFinder):
    """Finds nothing itself; what the others find is changed after it has run."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _SERVICES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _replace_search(module, self._node_id)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
