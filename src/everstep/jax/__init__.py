"""JAX on Everstep: ``JaxTrainer``, and ``State``.

Names, arguments and meanings are those of ``ray.train.v2.jax``. JAX is imported on the workers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everstep.backend.base import Backend
from everstep.backend.jax import JaxBackend, JaxConfig
from everstep.config import RunConfig, ScalingConfig
from everstep.errors import ConfigError, RefusedError
from everstep.refusals import unknown_argument
from everstep.trainer import Trainer, TrainFunction
from everstep.validation import ValidationConfig

if TYPE_CHECKING:
    from everstep.jax.state import State

__all__ = ["JaxConfig", "JaxTrainer", "State"]


class JaxTrainer(Trainer):
    """Run a training function on N workers that are one ``jax.distributed`` job.

    ``jax.distributed.initialize`` has been called when the function starts, on CPUs as well:
    ``jax.devices()`` are those of all workers, ``jax.local_devices()`` this worker's.

    Args:
        train_loop_per_worker: The training function. It takes nothing, or the config dict.
        train_loop_config: The dict that it is called with.
        jax_config: Not needed: ``scaling_config`` says what the workers have.
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
        jax_config: JaxConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
        engine: object = "auto",
        **refused: Any,
    ) -> None:
        if "backend_config" in refused:
            raise unknown_argument("JaxTrainer", "backend_config", ["jax_config"])
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
        if self.scaling_config.replica_group_size is not None:
            raise RefusedError(
                "ScalingConfig.replica_group_size is refused with JaxTrainer: jax.distributed is one job of "
                "all workers, and none of them outlives another's death.",
                "Leave it out; Trainer and TorchTrainer(torch_config=TorchftConfig(…)) take it.",
                "ScalingConfig.replica_group_size",
            )
        self.jax_config = (
            JaxConfig(use_tpu=self.scaling_config.use_tpu, use_gpu=self.scaling_config.use_gpu)
            if jax_config is None
            else jax_config
        )
        if not isinstance(self.jax_config, JaxConfig):
            raise ConfigError(
                f"JaxTrainer.jax_config is {jax_config!r}, expected an everstep.jax.JaxConfig.",
                "Leave it out: scaling_config says what the workers have.",
                "JaxTrainer.jax_config",
            )
        for flag in ("use_tpu", "use_gpu"):
            if getattr(self.jax_config, flag) and not getattr(self.scaling_config, flag):
                raise ConfigError(
                    f"JaxConfig.{flag} is True, but ScalingConfig.{flag} isn't.",
                    f"Give scaling_config=ScalingConfig({flag}=True, …).",
                    f"JaxConfig.{flag}",
                )

    def backend(self) -> Backend:
        return JaxBackend(self.jax_config)


def __getattr__(name: str) -> Any:
    """What needs JAX, which is imported when it is asked for."""
    if name == "State":
        from everstep.jax.state import State

        return State
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
