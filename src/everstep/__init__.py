"""Everstep keeps distributed training running.

The public names, and nothing else. Each is imported when it is first asked for, so that ``import everstep``
costs next to nothing and brings in no framework.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # as type checkers know it; `typing` costs more than all the rest of this file

if TYPE_CHECKING:
    from everstep.callbacks import (
        TrainRunContext as TrainRunContext,
        UserCallback as UserCallback,
    )
    from everstep.checkpoint import (
        Checkpoint as Checkpoint,
        CheckpointConsistencyMode as CheckpointConsistencyMode,
        CheckpointUploadMode as CheckpointUploadMode,
        ReportedCheckpoint as ReportedCheckpoint,
        ReportedCheckpointStatus as ReportedCheckpointStatus,
    )
    from everstep.config import (
        CheckpointConfig as CheckpointConfig,
        FailureConfig as FailureConfig,
        LoggingConfig as LoggingConfig,
        MemoryConfig as MemoryConfig,
        RunConfig as RunConfig,
        ScalingConfig as ScalingConfig,
    )
    from everstep.context import (
        TrainContext as TrainContext,
    )
    from everstep.deadlines import (
        Deadlines as Deadlines,
    )
    from everstep.driver.result import Result as Result
    from everstep.errors import (
        ConfigError as ConfigError,
        ControllerError as ControllerError,
        EverstepError as EverstepError,
        FunctionLoadError as FunctionLoadError,
        InfeasibleResourcesError as InfeasibleResourcesError,
        NCCLHangError as NCCLHangError,
        PreemptionError as PreemptionError,
        RefusedError as RefusedError,
        ReturnValueError as ReturnValueError,
        StorageAccessError as StorageAccessError,
        StorageError as StorageError,
        TooLargeError as TooLargeError,
        TrainingFailedError as TrainingFailedError,
        WorkerError as WorkerError,
        WorkerGroupError as WorkerGroupError,
    )
    from everstep.preemption import (
        PreemptionInfo as PreemptionInfo,
    )
    from everstep.refusals import (
        BackendConfig as BackendConfig,
        DataConfig as DataConfig,
        SyncConfig as SyncConfig,
    )
    from everstep.trainer import (
        Trainer as Trainer,
    )
    from everstep.training import (
        get_all_reported_checkpoints as get_all_reported_checkpoints,
        get_checkpoint as get_checkpoint,
        get_context as get_context,
        get_dataset_shard as get_dataset_shard,
        get_preemption_info as get_preemption_info,
        heartbeat as heartbeat,
        pause as pause,
        report as report,
        should_checkpoint as should_checkpoint,
    )
    from everstep.validation import (
        ValidationConfig as ValidationConfig,
        ValidationFn as ValidationFn,
        ValidationTaskConfig as ValidationTaskConfig,
    )
    from everstep.worker.datasets import TRAIN_DATASET_KEY as TRAIN_DATASET_KEY

    from . import collective as collective

_HOMES = {
    "context": ("TrainContext",),
    "callbacks": ("TrainRunContext", "UserCallback"),
    "checkpoint": (
        "Checkpoint",
        "CheckpointConsistencyMode",
        "CheckpointUploadMode",
        "ReportedCheckpoint",
        "ReportedCheckpointStatus",
    ),
    "config": (
        "CheckpointConfig",
        "FailureConfig",
        "LoggingConfig",
        "MemoryConfig",
        "RunConfig",
        "ScalingConfig",
    ),
    "deadlines": ("Deadlines",),
    "driver.result": ("Result",),
    "errors": (
        "ConfigError",
        "ControllerError",
        "EverstepError",
        "FunctionLoadError",
        "InfeasibleResourcesError",
        "NCCLHangError",
        "PreemptionError",
        "RefusedError",
        "ReturnValueError",
        "StorageAccessError",
        "StorageError",
        "TooLargeError",
        "TrainingFailedError",
        "WorkerError",
        "WorkerGroupError",
    ),
    "preemption": ("PreemptionInfo",),
    "refusals": (
        "BackendConfig",
        "DataConfig",
        "SyncConfig",
    ),
    "validation": ("ValidationConfig", "ValidationFn", "ValidationTaskConfig"),
    "training": (
        "get_all_reported_checkpoints",
        "get_checkpoint",
        "get_context",
        "get_dataset_shard",
        "get_preemption_info",
        "heartbeat",
        "pause",
        "report",
        "should_checkpoint",
    ),
    "trainer": ("Trainer",),
    "worker.datasets": ("TRAIN_DATASET_KEY",),
}
_HOME_OF = {name: f"everstep.{module}" for module, names in _HOMES.items() for name in names}
_MODULES = frozenset({"collective", "data", "jax", "testing", "torch"})

__all__ = ["__version__", "collective", *_HOME_OF]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"everstep.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # the next access doesn't come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
