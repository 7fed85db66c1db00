"""Work beside training on a Ray cluster: a task, wherever Ray has room for it."""

from __future__ import annotations

import asyncio

import ray
from ray.exceptions import RayError, RayTaskError

from everstep.engine.base import Aside, AsideDiedError, AsideFailedError
from everstep.protocol import framing
from everstep.protocol.script import call


async def run_aside(work: Aside) -> bytes:
    """Until it is done. Cancelled, its process is ended."""
    try:
        task = ray.remote(call).options(**work.options).remote(work.code, work.script)
    except (TypeError, ValueError) as error:
        raise AsideFailedError(f"Ray doesn't take ray_remote_kwargs={work.options!r}: {error}") from error
    try:
        return bytes(await asyncio.wrap_future(task.future()))
    except asyncio.CancelledError:
        ray.cancel(task, force=True)
        raise
    except RayTaskError as error:
        raise AsideFailedError(framing.described(error.cause)) from error
    except RayError as error:
        raise AsideDiedError(str(error)) from error
