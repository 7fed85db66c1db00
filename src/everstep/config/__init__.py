"""How a run is asked for: ``ScalingConfig``, ``RunConfig``, ``FailureConfig``, ``CheckpointConfig``,
``MemoryConfig``, ``LoggingConfig``.

Names and meanings are Ray Train v2's; what is ours comes last in each class. Every value is checked when it
is made, and frozen. Whether this machine can serve what is asked is found out in ``fit()``, by the engine.
"""

from everstep.config.checkpoints import CheckpointConfig, MemoryConfig
from everstep.config.failures import FailureConfig
from everstep.config.run import DEFAULT_STORAGE_PATH, LoggingConfig, RunConfig, override_from_environment
from everstep.config.scaling import PlacementStrategy, ScalingConfig

__all__ = [
    "DEFAULT_STORAGE_PATH",
    "CheckpointConfig",
    "FailureConfig",
    "LoggingConfig",
    "MemoryConfig",
    "PlacementStrategy",
    "RunConfig",
    "ScalingConfig",
    "override_from_environment",
]
