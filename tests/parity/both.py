"""The same small functions under Ray Train and under Everstep: ``both.py ray|everstep rows|examples FOLDER``.

What each sees is written to ``FOLDER``, under the names of the rows of docs/from-ray-train.md that it is
about. One process for each side, since whether Ray Train is v2 is decided when it is first imported; and one
Ray cluster for all of its runs.
"""

from __future__ import annotations

import os

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray turns loopback into the machine's address
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # a process for each group; nothing is preempted

import importlib
import itertools
import json
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Seen = dict[str, Any]
EXAMPLES = Path(__file__).parents[2] / "examples" / "from_ray_train"

MODULES = {
    "ray": {
        "train": "ray.train",
        "torch": "ray.train.torch",
        "jax": "ray.train.v2.jax",
        "collective": "ray.train.collective",
        "torchft": "ray.train.v2.torch.torchft_config",
    },
    "everstep": {
        "train": "everstep",
        "torch": "everstep.torch",
        "jax": "everstep.jax",
        "collective": "everstep.collective",
        "torchft": "everstep.torch",
    },
}


def side(modules: dict[str, str], name: str) -> ModuleType:
    return importlib.import_module(modules[name])


def outcome(function: Callable[[], Any]) -> Any:
    """What it returns, or which of Python's own kinds of error it raises."""
    try:
        return function()
    except Exception as error:
        kinds = (ValueError, TypeError, RuntimeError, OSError)
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), "Exception")


def note(config: dict[str, Any], seen: Seen) -> None:
    """Leave what a worker saw where the script finds it."""
    rank = side(config["modules"], "train").get_context().get_world_rank()
    Path(config["out"], f"{config['case']}-{rank}.json").write_text(json.dumps(seen))


# ---------------------------------------------------------------------- without a run


def configs(modules: dict[str, str]) -> Seen:
    train, torchft = side(modules, "train"), side(modules, "torchft")
    seen: Seen = {"TRAIN_DATASET_KEY": train.TRAIN_DATASET_KEY}
    properties = (
        "elasticity_enabled",
        "min_workers",
        "max_workers",
        "num_gpus_per_worker",
        "num_tpus_per_worker",
    )
    workers = ({"num_workers": 4}, {"num_workers": (4, 8)})
    on_tpus = {"use_tpu": True, "topology": "4x4", "accelerator_type": "TPU-V6E"}
    asked = (
        {},
        {"use_gpu": True},
        {"use_gpu": True, "accelerator_type": "H100", "resources_per_worker": {"GPU": 2}},
        {"resources_per_worker": {"CPU": 2, "license": 1}},
        on_tpus,
        {**on_tpus, "resources_per_worker": {"TPU": 4, "CPU": 2}},
    )
    for name in properties:
        seen[f"ScalingConfig.{name}"] = [
            getattr(train.ScalingConfig(**how_many, **what), name)
            for how_many, what in itertools.product(workers, asked)
        ]
    seen["ScalingConfig(use_gpu)"] = train.ScalingConfig(use_gpu=True, num_workers=1).use_gpu
    seen["ScalingConfig(use_tpu)"] = [
        train.ScalingConfig(num_workers=1).use_tpu,
        outcome(lambda: train.ScalingConfig(num_workers=1, use_gpu=True, use_tpu=True)),
    ]
    seen["ScalingConfig(elastic_resize_monitor_interval_s)"] = [
        train.ScalingConfig(num_workers=1).elastic_resize_monitor_interval_s,
        outcome(lambda: train.ScalingConfig(num_workers=1, elastic_resize_monitor_interval_s=-1)),
    ]
    seen["RunConfig(logging_config)"] = train.RunConfig().logging_config.log_level
    seen["FailureConfig(max_preemption_failures)"] = train.FailureConfig().max_preemption_failures
    info = train.PreemptionInfo(deadline_ms=5, preempted_node_to_ranks={"b": [3, 1], "a": [0]})
    seen["PreemptionInfo"] = info == train.PreemptionInfo(5, {"b": [3, 1], "a": [0]})
    seen["PreemptionInfo(deadline_ms)"] = info.deadline_ms
    seen["PreemptionInfo(preempted_node_to_ranks)"] = info.preempted_node_to_ranks
    seen["PreemptionInfo.preempted_node_ids"] = info.preempted_node_ids
    seen["PreemptionInfo.preempted_ranks"] = info.preempted_ranks
    for drained in (False, True):
        error = pickle.loads(pickle.dumps(train.PreemptionError(info, drain_timed_out=drained)))
        seen.setdefault("PreemptionError", []).append(isinstance(error, train.TrainingFailedError))
        seen.setdefault("PreemptionError(preemption_info)", []).append(error.preemption_info == info)
        seen.setdefault("PreemptionError(drain_timed_out)", []).append(error.drain_timed_out)
    for enum in ("CheckpointUploadMode", "CheckpointConsistencyMode", "ReportedCheckpointStatus"):
        members = {member.name: member.value for member in getattr(train, enum)}
        seen[enum] = sorted(members)
        seen |= {f"{enum}.{name}": value for name, value in members.items()}
    checkpoint = train.Checkpoint("/a")
    reported = train.ReportedCheckpoint(checkpoint, {"loss": 1}, train.ReportedCheckpointStatus.COMMITTED)
    seen["ReportedCheckpoint"] = type(reported).__name__
    seen["ReportedCheckpoint(checkpoint)"] = reported.checkpoint is checkpoint
    seen["ReportedCheckpoint(metrics)"] = reported.metrics
    seen["ReportedCheckpoint(status)"] = reported.status.name
    given = torchft.TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo", timeout_s=60)
    for name in ("backend", "init_method", "timeout_s"):
        seen[f"TorchftConfig.{name}"] = getattr(given, name)
    return seen


def checkpoints(modules: dict[str, str]) -> Seen:
    train = side(modules, "train")
    folder = Path(tempfile.mkdtemp())
    (folder / "weights").write_text("1 2 3")
    checkpoint = train.Checkpoint.from_directory(str(folder))
    seen: Seen = {"Checkpoint.from_directory": checkpoint.path == str(folder)}
    seen["Checkpoint.from_directory(path)"] = outcome(
        lambda: train.Checkpoint.from_directory(folder).path
    ) == str(folder)
    with checkpoint.as_directory() as there:
        seen["Checkpoint.as_directory"] = [there == str(folder), Path(there, "weights").read_text()]
    stages = [checkpoint.get_metadata()]
    checkpoint.set_metadata({"a": 1, "b": [2, 3]})
    stages.append(train.Checkpoint(str(folder)).get_metadata())
    checkpoint.update_metadata({"b": 4, "c": None})
    stages.append(checkpoint.get_metadata())
    checkpoint.set_metadata({"d": 5})
    stages.append(checkpoint.get_metadata())
    for name in (
        "get_metadata",
        "set_metadata",
        "set_metadata(metadata)",
        "update_metadata",
        "update_metadata(metadata)",
    ):
        seen[f"Checkpoint.{name}"] = stages
    return seen


# ---------------------------------------------------------------------- in a worker


def in_torch(config: dict[str, Any]) -> None:
    """Two workers of a ``TorchTrainer``."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    modules = config["modules"]
    train, torch_side, collective = (side(modules, name) for name in ("train", "torch", "collective"))
    context = train.get_context()
    rank = context.get_world_rank()
    seen: Seen = {
        "TorchTrainer(train_loop_config)": config["given"],
        "get_context": isinstance(context, train.TrainContext),
    }
    for name in ("world_size", "world_rank", "local_rank", "local_world_size", "node_rank"):
        seen[f"TrainContext.get_{name}"] = getattr(context, f"get_{name}")()
    seen["TrainContext.get_experiment_name"] = context.get_experiment_name()
    seen["TrainContext"] = [name for name in dir(context) if name in ("get_storage", "get_world_size")]
    seen["TorchTrainer(scaling_config)"] = dist.get_world_size()
    seen["TorchConfig(backend)"] = seen["TorchTrainer(torch_config)"] = dist.get_backend()
    seen["broadcast_from_rank_zero"] = collective.broadcast_from_rank_zero({"of": rank})
    seen["broadcast_from_rank_zero(data)"] = [
        collective.broadcast_from_rank_zero(None if rank else ["x", rank]),
        outcome(lambda: len(collective.broadcast_from_rank_zero("x" * 5000))),
    ]
    mark = Path(config["out"], "barrier")
    if rank == 0:
        mark.touch()
    collective.barrier()
    seen["barrier"] = mark.exists()

    seen["get_device"] = str(torch_side.get_device())
    seen["get_devices"] = [str(device) for device in torch_side.get_devices()]
    torch_side.enable_reproducibility()
    drawn = [torch.rand(1).item()]
    torch_side.enable_reproducibility(seed=7)
    drawn.append(torch.rand(1).item())
    seen["enable_reproducibility"] = [drawn[0], torch.are_deterministic_algorithms_enabled()]
    seen["enable_reproducibility(seed)"] = drawn[1]
    torch.use_deterministic_algorithms(False)

    def described(model: torch.nn.Module) -> list[object]:
        return [type(model).__name__, next(model.parameters()).device.type]

    def linear() -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    prepare = torch_side.prepare_model
    seen["prepare_model"] = described(prepare(linear()))
    seen["prepare_model(model)"] = described(prepare(model=linear()))
    seen["prepare_model(move_to_device)"] = described(prepare(linear(), move_to_device=False))
    seen["prepare_model(parallel_strategy)"] = [
        described(prepare(linear(), parallel_strategy=None)),
        outcome(lambda: prepare(linear(), parallel_strategy="fsdp")),  # there is no GPU
    ]
    wrapped = prepare(linear(), parallel_strategy_kwargs={"bucket_cap_mb": 3})
    seen["prepare_model(parallel_strategy_kwargs)"] = wrapped.bucket_bytes_cap

    def loader(**more: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, **more)

    def batches(prepared: Any) -> list[object]:
        return [[value.item() for value in batch[0]] for batch in prepared]

    prepared = torch_side.prepare_data_loader(loader())
    seen["prepare_data_loader"] = [isinstance(prepared.sampler, DistributedSampler), batches(prepared)]
    seen["prepare_data_loader(data_loader)"] = batches(torch_side.prepare_data_loader(data_loader=loader()))
    seen["prepare_data_loader(add_dist_sampler)"] = batches(
        torch_side.prepare_data_loader(loader(), add_dist_sampler=False)
    )
    shuffled = torch_side.prepare_data_loader(loader(shuffle=True, drop_last=True))
    seen["prepare_data_loader(move_to_device)"] = [
        shuffled.sampler.shuffle,
        len(batches(torch_side.prepare_data_loader(loader(), move_to_device=False))),
    ]
    seen["prepare_data_loader(auto_transfer)"] = len(
        batches(torch_side.prepare_data_loader(loader(), auto_transfer=False))
    )
    note(config, seen)
    train.report({"rank": rank})
    validated_once(train)


def that_fails_once(config: dict[str, Any]) -> str:
    """A worker that saves three times, fails, and goes on from what it finds."""
    train = side(config["modules"], "train")
    checkpoint = train.get_checkpoint()
    begins = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            begins = int(Path(folder, "step").read_text())
    for step in range(begins + 1, 6):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            train.report(
                {"step": step, "score": [3, 9, 1, 4, 2][step - 1]}, checkpoint=train.Checkpoint(folder)
            )
        if step == 3 and begins == 0:
            raise ValueError("once")
    return f"from {begins}"


def in_jax(config: dict[str, Any]) -> None:
    world = side(config["modules"], "train").get_context().get_world_size()
    note(config, {"JaxTrainer(train_loop_config)": config["given"], "JaxTrainer(scaling_config)": world})
    validated_once(side(config["modules"], "train"))


def validated_once(train: ModuleType) -> None:
    """Rank 0 has the last checkpoint validated."""
    saves = train.get_context().get_world_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "weights").write_text("5")
        asked = train.ValidationTaskConfig(fn_kwargs={"plus": 2}) if saves else False
        train.report({"last": 1}, checkpoint=train.Checkpoint(folder) if saves else None, validation=asked)


def validate(checkpoint: Any, plus: int = 0, times: int = 1) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        return {"found": int(Path(folder, "weights").read_text()) * times + plus}


# ---------------------------------------------------------------------- the runs


class Runs:
    def __init__(self, name: str, out: Path) -> None:
        self.modules = MODULES[name]
        self.out = out
        self.train = side(self.modules, "train")

    def config(self, case: str) -> dict[str, Any]:
        return {"modules": self.modules, "out": str(self.out), "case": case, "given": {"lr": 0.5}}

    def run_config(self, case: str, **more: Any) -> Any:
        return self.train.RunConfig(name=case, storage_path=str(self.out / "runs"), **more)

    def validation(self) -> Any:
        """Its task needs no processor: the workers may have them all."""
        default = self.train.ValidationTaskConfig(fn_kwargs={"plus": 1, "times": 10})
        return self.train.ValidationConfig(validate, default, {"num_cpus": 0})

    def torch(self) -> Seen:
        torch_side = side(self.modules, "torch")
        config = torch_side.TorchConfig(backend="gloo", timeout_s=60)
        result = torch_side.TorchTrainer(
            in_torch,
            train_loop_config=self.config("torch"),
            torch_config=config,
            scaling_config=self.train.ScalingConfig(num_workers=2),
            run_config=self.run_config("torch"),
            validation_config=self.validation(),
        ).fit()
        return {
            "TorchConfig": [config.backend, config.init_method],
            "TorchConfig(timeout_s)": config.timeout_s,
            "TorchTrainer": result.error,
            "TorchTrainer(run_config)": Path(result.path).name,
            "TorchTrainer(validation_config)": result.best_checkpoints[-1][1],
        }

    def recovery(self) -> Seen:
        train = self.train
        result = self.trainer()(
            that_fails_once,
            train_loop_config=self.config("recovery"),
            scaling_config=train.ScalingConfig(num_workers=1),
            run_config=self.run_config(
                "recovery",
                failure_config=train.FailureConfig(max_failures=1),
                checkpoint_config=train.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score"),
            ),
        ).fit()
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as folder:
            newest = Path(folder, "step").read_text()
        kept = sorted(result.best_checkpoints, key=lambda one: one[1]["score"], reverse=True)
        return {
            "RunConfig(failure_config)": [result.return_value, newest],
            "RunConfig(checkpoint_config)": [metrics["step"] for _, metrics in kept[:2]],
        }

    def trainer(self) -> Any:
        if self.train.__name__ == "everstep":
            return self.train.Trainer
        return importlib.import_module("ray.train.v2.api.data_parallel_trainer").DataParallelTrainer

    def jax(self) -> Seen:
        jax_side = side(self.modules, "jax")
        result = jax_side.JaxTrainer(
            in_jax,
            train_loop_config=self.config("jax"),
            jax_config=jax_side.JaxConfig(),
            scaling_config=self.train.ScalingConfig(num_workers=1),
            run_config=self.run_config("jax"),
            validation_config=self.validation(),
        ).fit()
        return {
            "JaxTrainer": result.error,
            "JaxTrainer(jax_config)": type(jax_side.JaxConfig()).__name__,
            "JaxTrainer(run_config)": Path(result.path).name,
            "JaxTrainer(validation_config)": result.best_checkpoints[-1][1],
        }


def example(path: Path, name: str, out: Path) -> Any:
    """What an example returns with the imports of this side."""
    source = path.read_text()
    if name == "ray":
        source = source.replace("import everstep as train", "import ray.train as train")
        source = source.replace("from everstep.", "from ray.train.")
        assert "everstep" not in source.split('"""')[2], "only imports may differ"
    # As a script's own functions are, these are pickled with their code.
    space: dict[str, Any] = {"__name__": "example", "__file__": str(path)}
    exec(compile(source.replace('__name__ == "__main__"', "False"), str(path), "exec"), space)
    return space["main"](str(out / "examples"))


def tune_trial(config: dict[str, Any]) -> None:
    """As the page writes it."""
    from ray import tune

    import everstep

    run_config = everstep.RunConfig(name=tune.get_context().get_trial_id(), storage_path=config["runs"])
    trainer = everstep.Trainer(
        lambda config: everstep.report({"loss": 2 * config["lr"]}),
        train_loop_config=config,
        run_config=run_config,
        engine="local",
    )
    tune.report(trainer.fit().metrics)


def tuned(out: Path) -> list[float]:
    from ray import tune

    space = {"lr": tune.grid_search([0.1, 0.01]), "runs": str(out / "trials")}
    run_config = tune.RunConfig(storage_path=str(out / "tune"), verbose=0)
    results = tune.Tuner(tune_trial, param_space=space, run_config=run_config).fit()
    return sorted(result.metrics["loss"] for result in results)


def rows(name: str, out: Path) -> Seen:
    runs = Runs(name, out)
    seen = {**configs(runs.modules), **checkpoints(runs.modules)}
    seen |= {**runs.torch(), **runs.recovery(), **runs.jax()}
    for path in sorted(out.glob("*-*.json")):
        for row, value in json.loads(path.read_text()).items():
            seen.setdefault(row, {})[path.stem] = value
    return seen


def examples(name: str, out: Path) -> Seen:
    seen = {path.name: example(path, name, out) for path in sorted(EXAMPLES.glob("*.py"))}
    return {**seen, "tune": tuned(out)} if name == "ray" else seen


def main(name: str, what: str, out: Path) -> None:
    if name == "ray":
        import ray

        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(num_cpus=2, _node_ip_address="127.0.0.1", **quiet)
    seen = rows(name, out) if what == "rows" else examples(name, out)
    (out / "seen.json").write_text(json.dumps(seen, indent=1, sort_keys=True, default=str))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
