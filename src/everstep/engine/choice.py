"""The engines by name, and how each is made. ``base`` has their interface.

An engine is imported when it is made: the command line needs the names alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from everstep.errors import ConfigError

if TYPE_CHECKING:
    from everstep.engine.base import Engine

AUTO = "auto"


def _local() -> Engine:
    from everstep.engine.local.engine import LocalEngine

    return LocalEngine()


def _ray() -> Engine:
    try:
        from everstep.engine.ray.engine import RayEngine
    except ImportError as error:
        raise ConfigError(
            f"engine='ray' needs Ray, which can't be imported here ({error}).",
            "pip install 'everstep[ray]', or use engine='local'.",
            "Trainer.engine",
        ) from error
    return RayEngine()


ENGINES: Mapping[str, Callable[[], Engine]] = {"local": _local, "ray": _ray}
NAMES = (AUTO, *ENGINES)
"""What ``Trainer(engine=…)`` and ``everstep run --engine`` take."""


def make_engine(engine: object) -> Engine:
    """``engine``: one of ``NAMES``, a cluster of virtual hosts, or an engine."""
    from everstep.engine.local.cluster import LocalCluster
    from everstep.engine.local.engine import LocalEngine

    if isinstance(engine, LocalCluster):
        return LocalEngine(engine)
    if isinstance(engine, str):
        return ENGINES[_nearest() if engine == AUTO else engine]()
    return engine  # type: ignore[return-value]


def _nearest() -> str:
    """Ray, if the environment or this process refers to a Ray cluster. Never imports Ray to find out."""
    ray = sys.modules.get("ray")
    near = bool(os.environ.get("RAY_ADDRESS")) or bool(ray is not None and ray.is_initialized())
    return "ray" if near else "local"
