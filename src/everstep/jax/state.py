"""The training state of a JAX program: trees of arrays, saved and restored as one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from everstep.data.stream import Stream
from everstep.errors import ConfigError
from everstep.jax.copying import ArrayCopier, ArrayPlace
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
from everstep.snapshots.tree import Flattened, rebuild
from everstep.worker.state_parts import Parts, is_stateful

_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_NAMES = {short: name for name, short in _TYPES.items()}
_TREE = "$tree"
"""In an index: a part that is restored into the structure of the one that is there."""
_IN_FLIGHT = 4
"""Arrays that are on their way to their devices at once. For all together JAX would first take as much memory
as they need once more: for a gigabyte on an H200 that made 0.1 s into 0.5 s.
"""
_REMEDY = (
    "give trees of jax.Arrays, numpy arrays, numbers and strings, or an object with state_dict() and "
    "load_state_dict()"
)


class State(Parts):
    """All that training needs to go on from a step: ``State(params=params, opt_state=opt_state)``.

    A part is a tree of ``jax.Array``s, and an attribute of the state: ``state.params, state.opt_state =
    update(state.params, state.opt_state, batch)``, also if the old ones are donated. Save it with
    ``report(…, state=state, step=step)``, get it back with ``restore()``: arrays then have the sharding of
    those that the state was made of. A ``jax.ShapeDtypeStruct`` with a sharding stands for an array that
    need not be made first. Parts without arrays are plain values, as in ``state.best_loss = loss``. Others
    have ``state_dict`` and ``load_state_dict``, such as an ``everstep.data.Stream``.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        object.__setattr__(self, "_copier", ArrayCopier())

    def _check(self, name: str, part: Any) -> None:
        if is_stateful(part):
            return
        for path, leaf in _leaves(name, part):
            if not _is_array(leaf) and not isinstance(leaf, (bool, int, float, str)):
                raise ConfigError(
                    f"State({name}=…): {path} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which "
                    "can't be saved",
                    _REMEDY,
                    f"State.{name}",
                )

    def restore(self) -> int:
        """Load the newest state of the run that is whole at all ranks. Returns its step; 0: there is none.

        Every rank calls it, once its parts are built and before the first step.
        """
        return current("State.restore").restoring.restore(self)

    def capture(self) -> CapturedArrays:
        """The state as it is now, for a session."""
        return CapturedArrays(self._parts, current("report").context.get_world_rank(), self._copier)

    def load(self, source: Source, rank: int) -> None:
        """Take a saved state over, for a session."""
        loading = _Loading(source, rank)
        self._check_same(loading.own)
        for name, part in self._parts.items():
            saved = loading.own.tree[name]
            if isinstance(part, Stream):
                # Each rank saved the lanes that it read, and these may be other ranks' now.
                part.load_state_dict([source.index(other).tree[name] for other in source.ranks])
            elif isinstance(saved, dict) and _TREE in saved:
                self._parts[name] = _filled(name, part, saved[_TREE], loading)
            else:
                value = rebuild({name: saved}, lambda tensor, _: loading.array(tensor, None))[name]
                if is_stateful(part):
                    part.load_state_dict(value)
                else:
                    self._parts[name] = value
        jax.block_until_ready([part for part in self._parts.values() if not is_stateful(part)])


def _filled(name: str, template: Any, saved: Mapping[str, Any], loading: _Loading) -> Any:
    """A tree like this one, with what was saved."""
    leaves = _leaves(name, template)
    here, there = {path for path, _ in leaves}, set(saved)
    if here != there:
        path = min(here ^ there)
        was, is_ = ("there" if path in tree else "not there" for tree in (there, here))
        raise ConfigError(
            f"State.restore(): {path} was {was} when the state was saved, and is {is_} now",
            "make the State of trees of the same structure as before, or start a run with another name",
            f"State.{name}",
        )

    def value(path: str, like: Any) -> Any:
        found = saved[path]
        return loading.array(found["$tensor"], like) if isinstance(found, dict) else found

    return jax.tree.unflatten(jax.tree.structure(template), [value(path, leaf) for path, leaf in leaves])


def _leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """With their names, as they are in files."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        text = "/".join([name, *(_key(key) for key in path)])
        while text in found:  # the keys "a/b", and "a" with "b" in it
            text += "'"
        found[text] = leaf
    return list(found.items())


def _key(key: Any) -> str:
    """A step on the way to a leaf: a key, a position, or the name of a field."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _is_plain(part: Any) -> bool:
    """Whether a part is None, numbers and strings in dicts, lists and tuples, of which there may be others
    each time. Nodes of other types are made again as the state has them.
    """
    if isinstance(part, dict):
        return all(map(_is_plain, part.values()))
    if isinstance(part, list) or type(part) is tuple:
        return all(map(_is_plain, part))
    return part is None or (isinstance(part, (bool, int, float, str)) and not _is_array(part))


def _is_key(leaf: Any) -> bool:
    """Whether it is an array of random keys, whose numbers are hidden."""
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _kind_of_key(like: Any) -> Any:
    """How its numbers are drawn, also of one that has only a shape."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return found[0]


class CapturedArrays:
    """A state's tree, and what this process has of its arrays."""

    def __init__(self, parts: Mapping[str, Any], rank: int, copier: ArrayCopier) -> None:
        self._copier = copier
        self._rank = rank
        self.tree: dict[str, Any] = {}
        self.shards: dict[str, Shard] = {}
        self._arrays: dict[str, Any] = {}
        for name, part in parts.items():
            leaves = [] if is_stateful(part) else _leaves(name, part)
            if is_stateful(part) or _is_plain(part):
                values = part.state_dict() if is_stateful(part) else part
                flat = Flattened({name: values}, _is_array)
                self.tree[name] = flat.tree[name]
                for path, array in flat.tensors.items():
                    self._add(path, array)
            else:
                self.tree[name] = {_TREE: {path: self._leaf(path, leaf) for path, leaf in leaves}}

    def _leaf(self, path: str, leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ConfigError(
                f"report(state=…): {path} is a jax.ShapeDtypeStruct",
                "where restore() returns 0, there is nothing to fill it with: give the state arrays",
                f"State.{path}",
            )
        self._add(path, leaf)
        return {"$tensor": path}

    def _add(self, path: str, array: Any) -> None:
        for place, box in enumerate(_boxes(path, array)):
            name = _numbered(path, place)
            if name in self.shards:
                raise ConfigError(
                    f"report(state=…): {name} is the name of an array, and of a shard of another",
                    "give one of them another key",
                    f"State.{path}",
                )
            file = SHARED_FILE if box.shared else tensors_file(self._rank)
            self.shards[name] = Shard(
                _short(path, box.data.dtype), box.data.shape, box.whole, box.offset, file
            )
            self._arrays[name] = box.data

    def copy_to(self, file: str, segment: Segment, starts: Mapping[str, int]) -> Sequence[Copying]:
        places = [
            ArrayPlace(self._arrays[name], start) for name, start in starts.items() if self.shards[name].size
        ]
        return self._copier.copy(places, segment)


def _numbered(path: str, place: int) -> str:
    """What a process with several devices has of an array may be several shards, all of one file."""
    return f"{path}@{place}" if place else path


class _Box(NamedTuple):
    """A part of an array that is on a device of this process."""

    data: Any
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shared: bool
    """Every process has the same."""


def _boxes(path: str, array: Any) -> Iterator[_Box]:
    """All that this process has of an array, each number once."""
    if not isinstance(array, jax.Array):
        whole = np.asarray(array)
        whole = whole.astype(whole.dtype.newbyteorder("="), copy=False)
        yield _Box(whole, whole.shape, (0,) * whole.ndim, False)
        return
    if array.is_deleted():
        raise ConfigError(
            f"report(state=…): {path} was donated to a call, and is gone",
            "assign what the call returned to the state before report(): state.params = …",
            f"State.{path}",
        )
    if _is_key(array):
        array = jax.random.key_data(array)
    processes = {device.process_index for device in array.sharding.device_set}
    shared = array.is_fully_replicated and len(processes) == jax.process_count() > 1
    seen = set()
    for shard in array.addressable_shards:
        offset = tuple(part.start or 0 for part in shard.index)
        if offset not in seen:
            seen.add(offset)
            yield _Box(shard.data, array.shape, offset, shared)


def _short(path: str, dtype: Any) -> str:
    if dtype.name not in _TYPES:
        raise ConfigError(
            f"{path} in the state is of type {dtype.name}, which can't be saved",
            f"keep arrays of one of {', '.join(sorted(_TYPES))} in a state",
            f"State.{path}",
        )
    return _TYPES[dtype.name]


def _dtype(short: str) -> Any:
    return jax.numpy.dtype(_NAMES[short])


class _Loading:
    """Arrays out of a source, as one rank needs them."""

    def __init__(self, source: Source, rank: int) -> None:
        self._source = source
        # A rank that was not there before takes what another one has.
        self._rank = rank % source.world_size
        self.own = source.index(self._rank)
        self._starts: dict[str, dict[str, int]] = {}
        self._under_way: deque[Any] = deque()
        """Arrays that may not be on their devices yet."""

    def array(self, name: str, like: Any) -> Any:
        """What was saved under this name, on the devices that ``like`` is on."""
        saved = self.own.tensors[name]
        if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)) and _is_key(like):
            _check_shape(name, saved, jax.eval_shape(jax.random.key_data, like).shape)
            # On the CPU the very memory would be used that it is made of, and that is written over later.
            words = jax.device_put(self._numbers(name, _all_of(saved)).copy())
            found = jax.random.wrap_key_data(words, impl=_kind_of_key(like))
            return found if like.sharding is None else jax.device_put(found, like.sharding)
        if like is not None:
            _check_shape(name, saved, np.shape(like))
        sharding = getattr(like, "sharding", None)
        if sharding is None:
            whole = self._numbers(name, _all_of(saved)).copy()
            if isinstance(like, np.generic):
                return whole[()]
            return jax.device_put(whole) if isinstance(like, jax.ShapeDtypeStruct) else whole

        def piece(index: tuple[slice, ...]) -> Any:
            numbers = self._numbers(name, _at(saved, index))
            # As above.
            return numbers.copy() if _is_on_cpu(sharding) else numbers

        found = jax.make_array_from_callback(saved.global_shape, sharding, piece)
        self._under_way.append(found)
        if len(self._under_way) > _IN_FLIGHT:
            self._under_way.popleft().block_until_ready()
        return found

    def _numbers(self, name: str, wanted: Shard) -> Any:
        """To be read."""
        for saved in self._shards(name, self._rank):
            if (wanted.offset, wanted.shape) == (saved.shard.offset, saved.shard.shape):
                return self._look(saved)
        parts: dict[tuple[int, ...], _Saved] = {}
        for rank in range(self._source.world_size):
            for saved in self._shards(name, rank):
                parts.setdefault(saved.shard.offset, saved)
        found = np.empty(wanted.shape, dtype=_dtype(wanted.dtype))
        if covered(wanted, [part.shard for part in parts.values()]) != found.size:
            raise ConfigError(
                f"State.restore(): of {name}, {list(wanted.global_shape)}, only parts were saved",
                "save a state of which every shard is at some rank",
                f"State.{name}",
            )
        for part in parts.values():
            shared = overlap(wanted, part.shard)
            if shared is not None and part.shard.size:
                found[shared[0]] = self._look(part)[shared[1]]
        return found

    def _shards(self, name: str, rank: int) -> Iterator[_Saved]:
        tensors = self._source.index(rank).tensors
        place = 0
        while (numbered := _numbered(name, place)) in tensors:
            yield _Saved(numbered, tensors[numbered])
            place += 1

    def _look(self, saved: _Saved) -> Any:
        shard = saved.shard
        if not shard.size:
            return np.empty(shard.shape, dtype=_dtype(shard.dtype))
        memory = self._source.file(shard.file)
        if shard.file not in self._starts:
            self._starts[shard.file] = starts_in(memoryview(memory))
        count = shard.size // ITEM_BYTES[shard.dtype]
        start = self._starts[shard.file][saved.name]
        return np.frombuffer(memory, _dtype(shard.dtype), count, start).reshape(shard.shape)


class _Saved(NamedTuple):
    name: str
    """In its file."""
    shard: Shard


def _check_shape(name: str, saved: Shard, shape: tuple[int, ...]) -> None:
    if tuple(shape) != saved.global_shape:
        raise ConfigError(
            f"State.restore(): {name} was {list(saved.global_shape)} when the state was saved, and is "
            f"{list(shape)} now",
            "make the State of arrays of the same shapes as before, or start a run with another name",
            f"State.{name}",
        )


def _all_of(shard: Shard) -> Shard:
    return Shard(shard.dtype, shard.global_shape, shard.global_shape, (0,) * len(shard.global_shape))


def _at(shard: Shard, index: tuple[slice, ...]) -> Shard:
    ranges = [part.indices(size) for part, size in zip(index, shard.global_shape, strict=True)]
    shape = tuple(stop - start for start, stop, _ in ranges)
    return Shard(shard.dtype, shape, shard.global_shape, tuple(start for start, _, _ in ranges))


def _is_on_cpu(sharding: Any) -> bool:
    return any(device.platform == "cpu" for device in sharding.device_set)
