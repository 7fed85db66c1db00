"""Work beside training on a Ray cluster: a task, wherever Ray has room for it."""

from __future__ import annotations

import asyncio

import ray
from ray.exceptions import RayError, RayTaskError

from everstep.engine.base import SideTask, SideTaskDiedError, SideTaskFailedError
from everstep.protocol import framing
from everstep.protocol.script import call


async def run_side_task(work: SideTask) -> bytes:
    """Until it is done. Cancelled, its process is ended."""
    try:
        task = ray.remote(call).options(**work.options).remote(work.code, work.script)
    except (TypeError, ValueError) as error:
        raise SideTaskFailedError(f"Ray doesn't take ray_remote_kwargs={work.options!r}: {error}") from error
    try:
        return bytes(await asyncio.wrap_future(task.future()))
    except asyncio.CancelledError:
        ray.cancel(task, force=True)
        raise
    except RayTaskError as error:
        raise SideTaskFailedError(framing.described(error.cause)) from error
    except RayError as error:
        raise SideTaskDiedError(str(error)) from error
