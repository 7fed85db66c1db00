"""PyTorch on Everstep: ``TorchTrainer``, and what a training function uses besides torch itself.

Names, arguments and meanings are those of ``ray.train.torch``. Torch is imported when it is first needed, so
that a driver which only starts a run doesn't wait for it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from everstep.backend.base import Backend
from everstep.backend.torch import TorchBackend, TorchConfig, joined_member
from everstep.config import RunConfig, ScalingConfig
from everstep.errors import CallError, ConfigError, RefusedError
from everstep.refusals import unknown_argument
from everstep.torchft.backend import TorchftBackend, TorchftConfig
from everstep.trainer import Trainer, TrainFunction
from everstep.validation import ValidationConfig

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from everstep.torch.state import State
    from everstep.torchft.data_parallel import FaultTolerantDDP, average_gradients

__all__ = [
    "TorchTrainer",
    "TorchCheckpoint",
    "TorchConfig",
    "TorchftConfig",
    "State",
    "FaultTolerantDDP",
    "average_gradients",
    "accelerate",
    "get_device",
    "get_devices",
    "prepare_model",
    "prepare_optimizer",
    "prepare_data_loader",
    "backward",
    "enable_reproducibility",
]

_MIXED_PRECISION = (
    "Use torch.autocast and torch.amp.GradScaler in the training function, or a library such as Lightning or "
    "Accelerate"
)


class TorchTrainer(Trainer):
    """Run a training function on N workers that are one PyTorch process group.

    Args:
        train_loop_per_worker: The training function. It takes nothing, or the config dict.
        train_loop_config: The dict that it is called with.
        torch_config: How the process group is set up. NCCL where workers have GPUs, else gloo. With a
            ``TorchftConfig``, there is one for each replica group, and torchft between them.
        scaling_config: How many workers, and what each needs. One worker by default.
        run_config: Where the run lives, and how it deals with failures.
        datasets: By name; ``get_dataset_shard(name)`` gives a worker its share.
        validation_config: The function that ``report(validation=…)`` has called with a checkpoint, beside
            training.
        engine: ``"auto"``, ``"local"``, or an engine such as ``everstep.testing.LocalCluster(…)``.
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        engine: object = "auto",
        **refused: Any,
    ) -> None:
        if "backend_config" in refused:
            raise unknown_argument("TorchTrainer", "backend_config", ["torch_config"])
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            validation_config=validation_config,
            engine=engine,
            **refused,
        )
        self.torch_config = TorchConfig() if torch_config is None else torch_config
        if not isinstance(self.torch_config, TorchConfig):
            raise ConfigError(
                f"TorchTrainer.torch_config is {torch_config!r}, expected an everstep.torch.TorchConfig.",
                "Make it with everstep.torch.TorchConfig(…).",
                "TorchTrainer.torch_config",
            )
        if isinstance(self.torch_config, TorchftConfig):
            self.scaling_config = _with_groups(self.scaling_config, self.torch_config)
            if self.torch_config.max_replica_failures is not None:
                failures = replace(
                    self.run_config.failure_config,
                    max_replica_failures=self.torch_config.max_replica_failures,
                )
                self.run_config = replace(self.run_config, failure_config=failures)

    def backend(self) -> Backend:
        if isinstance(self.torch_config, TorchftConfig):
            return TorchftBackend(self.torch_config)
        return TorchBackend(self.torch_config)


def _with_groups(scaling: ScalingConfig, config: TorchftConfig) -> ScalingConfig:
    """What the two configs say together of replica groups."""
    size = config.replica_group_size
    if scaling.replica_group_size not in (None, size):
        raise ConfigError(
            f"ScalingConfig.replica_group_size is {scaling.replica_group_size}, and "
            f"TorchftConfig.replica_group_size is {size}.",
            "Give it once, in TorchftConfig.",
            "TorchftConfig.replica_group_size",
        )
    num_workers = scaling.num_workers
    if num_workers == 0:
        raise ConfigError(
            "ScalingConfig.num_workers is 0, expected at least one replica group with TorchftConfig.",
            "Use TorchConfig to run in this process.",
            "ScalingConfig.num_workers",
        )
    if config.min_replica_groups is not None:
        least = config.min_replica_groups * size
        if scaling.elasticity_enabled and scaling.min_workers != least:
            raise ConfigError(
                f"TorchftConfig.min_replica_groups is {config.min_replica_groups}, which is {least} "
                f"workers, and ScalingConfig.num_workers is {num_workers}.",
                "Give the fewest workers once: num_workers=… as one number, or no min_replica_groups.",
                "TorchftConfig.min_replica_groups",
            )
        num_workers = (least, scaling.max_workers)
    return replace(scaling, num_workers=num_workers, replica_group_size=size)


def __getattr__(name: str) -> Any:
    """What needs torch and torchft, which are imported when it is asked for."""
    if name == "State":
        from everstep.torch.state import State

        return State
    if name in ("FaultTolerantDDP", "average_gradients"):
        from everstep.torchft import data_parallel

        return getattr(data_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class TorchCheckpoint:
    """Ray Train's, deprecated there; refused."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _refuse_torch_checkpoint()

    @classmethod
    def from_state_dict(cls, *args: object, **kwargs: object) -> NoReturn:
        """Ray Train's; refused."""
        _refuse_torch_checkpoint()

    @classmethod
    def from_model(cls, *args: object, **kwargs: object) -> NoReturn:
        """Ray Train's; refused."""
        _refuse_torch_checkpoint()


def _refuse_torch_checkpoint() -> NoReturn:
    raise RefusedError(
        "everstep.torch.TorchCheckpoint is refused; Ray Train has deprecated it.",
        "Write the state with torch.save into a folder, and give everstep.Checkpoint.from_directory(folder).",
        "TorchCheckpoint",
    )


def get_device() -> torch.device:
    """The device of this worker, the first if it has several.

    A worker sees its own accelerators only, so that this is ``cuda:0`` on every rank that has a GPU.
    """
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """All devices of this worker; the CPU, if it has no accelerator."""
    _context()
    import torch

    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    member = joined_member()
    if member is None:  # num_workers=0: in the user's own process, where nothing was assigned
        return [torch.device("cuda", torch.cuda.current_device())]
    if member.device_kind != "gpu":
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(len(member.devices) or torch.cuda.device_count())]


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Move a model to this worker's device, and wrap it for data parallel training.

    Args:
        model: The model.
        move_to_device: Whether to move it to this worker's device, or the device to move it to.
        parallel_strategy: ``"ddp"`` for ``DistributedDataParallel``, ``"fsdp"`` for
            ``FullyShardedDataParallel`` (GPUs only), or ``None`` for neither. One worker gets neither, nor
            does a replica group of one: between groups, ``FaultTolerantDDP`` is for that.
        parallel_strategy_kwargs: More arguments for the wrapper.
    """
    context = _context()
    import torch

    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ConfigError(
            f"prepare_model.parallel_strategy is {parallel_strategy!r}, expected 'ddp', 'fsdp' or None.",
            "Leave it out for 'ddp'.",
            "prepare_model.parallel_strategy",
        )
    device = move_to_device if isinstance(move_to_device, torch.device) else get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if move_to_device:
        model = model.to(device)
    member = joined_member()
    together = member.group_size if member is not None else context.get_world_size()
    if parallel_strategy is None or together <= 1:
        return model
    options = dict(parallel_strategy_kwargs or {})
    if parallel_strategy == "ddp":
        if device.type != "cpu":
            options = {"device_ids": [device], "output_device": device} | options
        return torch.nn.parallel.DistributedDataParallel(model, **options)
    if not torch.cuda.is_available():
        raise CallError(
            "prepare_model(parallel_strategy='fsdp') needs GPUs.",
            "Give ScalingConfig(use_gpu=True), or use 'ddp'.",
        )
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, **options)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> DataLoader[Any]:
    """Give each rank its own part of the data, on its own device.

    With more than one worker, call ``loader.sampler.set_epoch(epoch)`` before each epoch, or each has the
    same order.

    As in Ray Train, the loader has no place that is saved: after a restart its pass begins anew, and with
    another number of workers the global batch is another one. ``everstep.data.Stream`` promises both.

    Args:
        data_loader: The loader. With an ``IterableDataset``, or a ``DistributedSampler`` of your own, it is
            left to you to divide the data.
        add_dist_sampler: Whether to put a ``DistributedSampler`` in place of its sampler; it shuffles if the
            loader did.
        move_to_device: Whether to move the batches to this worker's device.
        auto_transfer: Whether to do that in a CUDA stream of its own, one batch ahead. GPUs only.
    """
    context = _context()
    from everstep.torch.loader import LoaderOnDevice, divided

    if add_dist_sampler and context.get_world_size() > 1:
        data_loader = divided(data_loader, context.get_world_rank(), context.get_world_size())
    if move_to_device:
        return LoaderOnDevice(data_loader, get_device(), auto_transfer)
    return data_loader


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python, NumPy and torch alike on all ranks, and let torch use deterministic algorithms only.

    Data loaders that ``prepare_data_loader`` has divided still draw different numbers on different ranks, the
    same in every run. The results of two runs may differ nevertheless: see PyTorch's notes on randomness.
    """
    import torch

    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it torch refuses CUDA's matrix products


def accelerate(*args: object, **kwargs: object) -> NoReturn:
    """Ray Train's, deprecated there; refused."""
    _refuse_function("accelerate", _MIXED_PRECISION)


def prepare_optimizer(*args: object, **kwargs: object) -> NoReturn:
    """Ray Train's, deprecated there; refused."""
    _refuse_function("prepare_optimizer", f"An optimizer needs no preparation. {_MIXED_PRECISION}")


def backward(*args: object, **kwargs: object) -> NoReturn:
    """Ray Train's, deprecated there; refused."""
    _refuse_function("backward", f"Call loss.backward(). {_MIXED_PRECISION}")


def _refuse_function(name: str, remedy: str) -> NoReturn:
    raise RefusedError(
        f"everstep.torch.{name} is refused; Ray Train has deprecated it.", f"{remedy}.", f"torch.{name}"
    )


def _context() -> Any:
    from everstep.training import get_context

    return get_context()
