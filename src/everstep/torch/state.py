"""The training state of a torch program: all of its parts, saved and restored as one."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep.data.stream import Stream
from everstep.errors import ConfigError
from everstep.process.current import current
from everstep.snapshots.content import Source
from everstep.snapshots.copying import Copying
from everstep.snapshots.layout import (
    ITEM_BYTES,
    SHARED_FILE,
    Shard,
    covered,
    overlap,
    starts_in,
    tensors_file,
)
from everstep.snapshots.segments import Segment
from everstep.snapshots.tree import Flattened, Path, rebuild
from everstep.torch.copying import Copiers
from everstep.worker.state_parts import Parts, is_stateful

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_TORCH_TYPES = {name: dtype for dtype, name in _DTYPES.items()}
_HOST = torch.device("cpu")
_REMEDY = (
    "give an object with state_dict() and load_state_dict(), a tensor, a number, a string, or dicts and "
    "lists of these"
)


class State(Parts):
    """All that training needs to go on from a step: ``State(model=model, optimizer=optimizer, epoch=0)``.

    Parts that have ``state_dict`` and ``load_state_dict`` are restored through these. Others are plain
    values, and attributes of the state: ``state.epoch += 1``. Save it with ``report(…, state=state,
    step=step)``, get it back with ``restore()``. With an ``everstep.data.Stream`` in it, the place in the
    data is saved and restored with the rest, and ``step`` is how many of its steps are done.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        object.__setattr__(self, "_copiers", Copiers())

    def _check(self, name: str, part: Any) -> None:
        _check(name, part)

    def restore(self) -> int:
        """Load the newest state of the run that is whole at all ranks. Returns its step; 0: there is none.

        Every rank calls it, once its parts are built and before the first step.
        """
        return current("State.restore").restoring.restore(self)

    def capture(self) -> CapturedTensors:
        """The state as it is now, for a session. Tensors are still those that are trained."""
        with _training_mode():
            return CapturedTensors(self._parts, current("report").context.get_world_rank(), self._copiers)

    def load(self, source: Source, rank: int) -> None:
        """Take a saved state over, for a session."""
        with _training_mode():
            self._load(source, rank)

    def _load(self, source: Source, rank: int) -> None:
        loading = _Loading(source, rank, self._copiers)
        index = loading.own
        self._check_same(index)
        templates = {name: _template(part) for name, part in self._parts.items()}
        copied = {name: _copied(part) for name, part in self._parts.items()}

        def tensor(name: str, path: Path) -> torch.Tensor:
            like = templates[path[0]](path[1:])
            found = loading.tensor(name, like, copy=path[1:] not in copied[path[0]])
            return found if is_stateful(self._parts[path[0]]) else _trained_alike(like, found)

        for name, value in rebuild(index.tree, tensor).items():
            part = self._parts[name]
            if isinstance(part, Stream):
                # Each rank saved the lanes that it read, and these may be other ranks' now.
                part.load_state_dict([source.index(saved).tree[name] for saved in source.ranks])
            elif is_stateful(part):
                _wrapped_alike(part, value).load_state_dict(value)
            else:
                self._parts[name] = value
        self._copiers.all_is_back()


def _training_mode() -> torch.inference_mode:
    """What is made in inference mode, as by an evaluation that reports, can't be written to out of it."""
    return torch.inference_mode(False)


def _wrapped_alike(part: Any, saved: Mapping[str, Any]) -> Any:
    """What loads ``saved``: a model of several workers is wrapped in ``DistributedDataParallel``, whose names
    begin with ``module.``, and that of one alone isn't.
    """
    if not isinstance(part, torch.nn.Module) or not saved or saved.keys() == part.state_dict().keys():
        return part
    if isinstance(part, DistributedDataParallel) and saved.keys() == part.module.state_dict().keys():
        return part.module
    was_wrapped = all(name.startswith("module.") for name in saved)
    if isinstance(part, DistributedDataParallel):
        return part if was_wrapped else part.module
    inside = {name.removeprefix("module.") for name in saved}
    has_one_inside = any(name.startswith("module.") for name in part.state_dict())
    fits = inside == part.state_dict().keys() or not has_one_inside
    return _InAWrapper(part) if was_wrapped and fits else part


class _InAWrapper:
    """A model that takes over what was saved of a wrapped one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._module.load_state_dict({name.removeprefix("module."): saved[name] for name in saved})


class CapturedTensors:
    """A state's tree, and its tensors."""

    def __init__(self, parts: Mapping[str, Any], rank: int, copiers: Copiers) -> None:
        self._copiers = copiers
        values = {name: part.state_dict() if is_stateful(part) else part for name, part in parts.items()}
        flat = Flattened(values, lambda value: isinstance(value, torch.Tensor))
        shared = tuple(f"{name}/" for name in _replicated(parts))
        apart = {f"{name}/{own}" for name, part in parts.items() for own in _apart(part)}
        own = tensors_file(rank)
        self.tree = flat.tree
        self.shards: dict[str, Shard] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in flat.tensors.items():
            file = SHARED_FILE if name.startswith(shared) and name not in apart else own
            tensor = tensor.detach() if tensor.requires_grad else tensor
            self.shards[name], self._tensors[name] = _described(name, tensor, file)

    def copy_to(self, file: str, segment: Segment, starts: Mapping[str, int]) -> list[Copying]:
        with _training_mode():
            return self._copiers.copy(self._tensors, file, segment, starts)


class _Loading:
    """Tensors out of a source, as one rank needs them."""

    def __init__(self, source: Source, rank: int, copiers: Copiers) -> None:
        self._source = source
        self._copiers = copiers
        # A rank that was not there before takes what another one has.
        self._rank = rank % source.world_size
        self.own = source.index(self._rank)
        self._starts: dict[str, dict[str, int]] = {}

    def tensor(self, name: str, like: torch.Tensor | None, *, copy: bool) -> torch.Tensor:
        """What the template's place holds. Without ``copy`` it may be the source's own memory, to be read."""
        saved = self.own.tensors[name]
        if like is not None and tuple(like.shape) != saved.global_shape:
            like = None  # nothing that is known says how it is divided
        if like is None or not _is_divided(like):
            whole = saved.global_shape
            device = _HOST if like is None else like.device
            return self._assembled(name, Shard(saved.dtype, whole, whole, (0,) * len(whole)), device, copy)
        shard, _ = _described(name, like.detach(), "")
        wanted = Shard(saved.dtype, shard.shape, shard.global_shape, shard.offset)
        local = self._assembled(name, wanted, like.device, copy)
        from torch.distributed.tensor import DTensor

        where = (like.device_mesh, like.placements)
        return DTensor.from_local(local, *where, shape=like.shape, stride=like.stride())

    def _assembled(self, name: str, wanted: Shard, device: torch.device, copy: bool) -> torch.Tensor:
        saved = self.own.tensors[name]
        if (wanted.offset, wanted.shape) == (saved.offset, saved.shape):
            return self._copiers.bring_back(self._look(name, saved), device, copy=copy)
        parts: dict[tuple[int, ...], Shard] = {}
        for rank in range(self._source.world_size):
            part = self._source.index(rank).tensors.get(name)
            if part is not None:
                parts.setdefault(part.offset, part)
        found = torch.empty(wanted.shape, dtype=_TORCH_TYPES[wanted.dtype])
        if covered(wanted, parts.values()) != found.numel():
            raise ConfigError(
                f"State.restore(): of {name}, {list(saved.global_shape)}, only parts were saved",
                "save a state whose tensors are whole, or DTensors of which every shard is in it",
                f"State.{name}",
            )
        for part in parts.values():
            shared = overlap(wanted, part)
            if shared is not None and part.size:
                found[shared[0]] = self._look(name, part)[shared[1]]
        return found.to(device)

    def _look(self, name: str, shard: Shard) -> torch.Tensor:
        if not shard.size:
            return torch.empty(shard.shape, dtype=_TORCH_TYPES[shard.dtype])
        memory = self._source.file(shard.file)
        if shard.file not in self._starts:
            self._starts[shard.file] = starts_in(memoryview(memory))
        return _view(memory, self._starts[shard.file][name], shard)


def _check(name: str, part: Any) -> None:
    if is_stateful(part):
        return
    missing = [method for method in ("state_dict", "load_state_dict") if not hasattr(part, method)]
    if len(missing) == 1:
        raise ConfigError(
            f"State({name}=…) got a {type(part).__qualname__}, which has no {missing[0]}()",
            _REMEDY,
            f"State.{name}",
        )
    try:
        Flattened({name: part}, lambda value: isinstance(value, torch.Tensor))
    except ConfigError as error:
        raise ConfigError(
            f"State({name}=…) got a {type(part).__qualname__}, which has no state_dict(): {error.message}",
            _REMEDY,
            f"State.{name}",
        ) from None


def _replicated(parts: Mapping[str, Any]) -> list[str]:
    """Parts that data parallel training keeps the same at all ranks."""
    models = {name: p for name, p in parts.items() if isinstance(p, DistributedDataParallel)}
    kept: set[int] = set()
    for model in models.values():
        apart = _apart(model)
        kept.update(id(p) for name, p in model.named_parameters() if name not in apart)
    trained = [
        name
        for name, part in parts.items()
        if isinstance(part, torch.optim.Optimizer)
        and all(id(parameter) in kept for group in part.param_groups for parameter in group["params"])
    ]
    return [*models, *trained] if kept else []


def _apart(part: Any) -> set[str]:
    """What a model has in its state that each rank changes by itself, although others are kept the same."""
    if not isinstance(part, DistributedDataParallel):
        return set()
    apart = {f"module.{name}" for name in part.parameters_to_ignore}
    return apart if part.broadcast_buffers else apart | {name for name, _ in part.named_buffers()}


def _is_divided(tensor: Any) -> bool:
    """Whether it is a DTensor. Their module takes long to import: who has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _described(name: str, tensor: torch.Tensor, file: str) -> tuple[Shard, torch.Tensor]:
    """What this rank has of a tensor, and where that belongs in the whole."""
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}"
        raise ConfigError(
            f"{name} in the state is a tensor that can't be saved: {kind}",
            f"keep dense tensors in a state, of one of {', '.join(sorted(ITEM_BYTES))}",
            f"State.{name}",
        )
    whole = tuple(tensor.shape)
    if not _is_divided(tensor):
        return Shard(_DTYPES[tensor.dtype], whole, whole, (0,) * len(whole), file), tensor
    from torch.distributed.tensor import Shard as Divided
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in tensor.placements:
        if not placement.is_replicate() and type(placement) is not Divided:
            raise ConfigError(
                f"{name} in the state is a DTensor placed as {placement}, which can't be saved",
                "use Shard(…) and Replicate() placements",
                f"State.{name}",
            )
    shape, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    return Shard(_DTYPES[tensor.dtype], tuple(shape), whole, tuple(offset), file), tensor.to_local()


def _view(memory: mmap.mmap, start: int, shard: Shard) -> torch.Tensor:
    dtype = _TORCH_TYPES[shard.dtype]
    count = shard.size // ITEM_BYTES[shard.dtype]
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shard.shape)


def _template(part: Any) -> Callable[[Path], torch.Tensor | None]:
    """What is in a part now, at a place in its state: where, and how sharded, the saved one belongs."""
    if isinstance(part, torch.optim.Optimizer):
        # Its state is made at the first step: before that, only its parameters say how it will be.
        parameters = [p for group in part.param_groups for p in group["params"]]

        def of_parameter(path: Path) -> torch.Tensor | None:
            if len(path) != 3 or path[0] != "state" or path[1] >= len(parameters) or path[2] == "step":
                return None
            return parameters[path[1]]

        return of_parameter
    now = {}

    def note(value: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor):
            now[path] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                note(item, (*path, key))
        elif isinstance(value, (list, tuple)):
            for place, item in enumerate(value):
                note(item, (*path, place))

    note(part.state_dict() if is_stateful(part) else part, ())
    return now.get


def _copied(part: Any) -> set[Path]:
    """Where loading copies a tensor, so that it need not be a copy already: in what torch's own modules load.
    Others may keep the tensor that they are given, or write to it.
    """
    if not isinstance(part, torch.nn.Module) or not _is_torchs(type(part).load_state_dict):
        return set()
    found: set[Path] = set()
    for prefix, module in part.named_modules(remove_duplicate=False):
        hooks = module._load_state_dict_pre_hooks.values()
        if all(map(_is_torchs, (type(module)._load_from_state_dict, *hooks))):
            names = (*module._parameters, *module._buffers)
            found.update((f"{prefix}.{name}" if prefix else name,) for name in names)
    return found


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _trained_alike(like: torch.Tensor | None, found: torch.Tensor) -> torch.Tensor:
    """A plain value. What an optimizer trains has to stay the tensor that it knows."""
    if like is None or not (like.is_leaf and like.requires_grad) or like.shape != found.shape:
        return found
    with torch.no_grad():
        return like.copy_(found)
