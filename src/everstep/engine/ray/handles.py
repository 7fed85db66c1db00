"""Handles of Ray actors that a training function or its config brings along.

Only a process that is connected to Ray can load one, and workers aren't. So a handle travels with the address
of its cluster, and the worker that loads it joins that cluster first.
"""

from __future__ import annotations

import io
import logging
from typing import Any

import cloudpickle
import ray
from ray.actor import ActorHandle


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as ``cloudpickle`` does, and handles as ours."""

    handles = 0

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ray.ObjectRef):
            # It would arrive as a number, without its owner: ray.get() would wait for ever.
            raise TypeError("only Ray's own calls can take an ObjectRef along: pass what ray.get() gives")
        if not isinstance(obj, ActorHandle):
            return super().reducer_override(obj)
        self.handles += 1
        _, state = obj.__reduce__()
        context = ray.get_runtime_context()
        return restore, (context.gcs_address, context.namespace, state)


def dumps(value: Any) -> tuple[bytes, bool]:
    """Pickled, and whether there are handles in it."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(value)
    return out.getvalue(), pickler.handles > 0


def restore(address: str, namespace: str, state: tuple[Any, ...]) -> ActorHandle:
    """In the worker: a handle again."""
    if not ray.is_initialized():
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    return ActorHandle._deserialization_helper(*state)
