"""What comes back of a state, in one process: bit for bit what was reported, and memory of its own."""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import ConfigError, LostSnapshotError
from everstep.saved.snapshots import At
from everstep.snapshots.content import InMemory
from everstep.snapshots.keeper import Keeper
from everstep.snapshots.layout import SHARED_FILE
from everstep.snapshots.segments import Slot
from everstep.snapshots.writing import OwnMemory
from everstep.torch.copying import Copiers
from everstep.torch.state import CapturedTensors, State


class Memory:
    """One rank's snapshots, of which the newest is kept."""

    def __init__(self) -> None:
        self._keeper = Keeper(0, 1, OwnMemory(lambda *_: None))
        self._copiers = Copiers()
        self._count = 0

    def take(self, **parts: Any) -> CapturedTensors:
        content = CapturedTensors(parts, 0, self._copiers)
        self._count += 1
        at = At(1, self._count)
        self._keeper.take(content, at, self._count, {}, remember=True)
        self._keeper.complete()
        self._keeper.settled([at], at)
        return content

    def newest(self) -> Slot:
        return self._keeper.find(At(1, self._count), 0)

    def restore(self, **parts: Any) -> State:
        state = State(**parts)
        at = At(1, self._count)
        state.load(InMemory(0, [0], 1, lambda rank, files: self._keeper.find(at, rank, files)), 0)
        return state


class Settling(OwnMemory):
    """Has a slot of before, and lets something happen when it is asked what is being stored."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.then: list[Any] = []
        self.before = self.new_slots({"state-00000.safetensors": 16}, 1, needed=False)

    def old_slots(self) -> list[tuple[int, Slot]]:
        return self.before

    def storing(self) -> Collection[int]:
        if self.then:
            self.then.pop(0)()
        return super().storing()


def test_a_slot_of_another_state_that_is_needed_until_now_is_not_written_to() -> None:
    memory = Settling()
    memory.before[0][1].finish(At(1, 1), 1, b"", {})
    keeper = Keeper(0, 1, memory, [At(1, 1)])
    memory.then = [lambda: None, lambda: keeper.settled([], At(1, 1))]
    content = CapturedTensors({"own": torch.ones(100)}, 0, Copiers())
    taken = keeper.take(content, At(2, 1), 1, {}, remember=True)
    assert taken is not None
    assert keeper.has(taken)
    assert memory.then == []


@pytest.mark.parametrize(("place", "size"), [(0, 0), (0, 100), (1, 0), (1, 100), (1, 1 << 20)])
def test_a_snapshot_of_which_a_part_is_gone_is_lost(place: int, size: int) -> None:
    memory = Memory()
    memory.take(own=torch.ones(1000))
    os.truncate(memory.newest().fds[place], size)
    with pytest.raises(LostSnapshotError):
        memory.restore(own=torch.zeros(1000))


class Metric(torch.nn.Module):
    """Keeps the very tensor that it is given, as torchmetrics does, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def state_dict(self, *args: Any, prefix: str = "", **more: Any) -> Any:
        found = super().state_dict(*args, prefix=prefix, **more)
        found[f"{prefix}total"] = self.total
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.total = state_dict.pop(f"{prefix}total")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_keeps_what_it_loads_has_memory_of_its_own() -> None:
    memory = Memory()
    memory.take(metric=(saved := Metric()))
    restored = Metric()
    memory.restore(metric=restored)
    restored.total += 1
    assert memory.restore(metric=Metric()).metric.total.tolist() == [0] * 4, "the snapshot was written to"
    saved.total += 5
    for _ in range(3):
        memory.take(metric=saved)
    assert restored.total.tolist() == [1] * 4, "a later snapshot has been written over what was restored"


def test_a_hook_that_changes_what_it_loads_does_not_change_the_snapshot() -> None:
    def clear(module: Any, saved: dict[str, Any], *_: Any) -> None:
        saved["weight"].zero_()

    memory = Memory()
    memory.take(model=(model := torch.nn.Linear(2, 2)))
    hooked = torch.nn.Linear(2, 2)
    hooked.register_load_state_dict_pre_hook(clear)
    memory.restore(model=hooked)
    restored = torch.nn.Linear(2, 2)
    memory.restore(model=restored)
    assert torch.equal(restored.weight, model.weight)


def test_a_parameter_that_is_a_plain_value_stays_the_one_that_its_optimizer_trains() -> None:
    memory = Memory()
    memory.take(weight=torch.nn.Parameter(torch.ones(3)))
    weight = torch.nn.Parameter(torch.zeros(3))
    assert memory.restore(weight=weight).weight is weight
    assert weight.tolist() == [1, 1, 1]


@pytest.mark.parametrize("first", [True, False])
def test_a_state_may_be_reported_and_restored_in_inference_mode(first: bool) -> None:
    memory = Memory()
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            memory.take(weight=torch.ones(3))
    with torch.inference_mode():
        state = memory.restore(weight=torch.zeros(3))
    state.weight += 1
    assert state.weight.tolist() == [2, 2, 2]


def test_a_state_that_contains_itself_is_refused() -> None:
    around: list[Any] = []
    around.append(around)
    with pytest.raises(ConfigError, match="loop in the state contains itself") as caught:
        State(loop=around)
    assert caught.value.field == "State.loop"


def test_odd_names_and_long_numbers_come_back() -> None:
    odd = {"\ud800": torch.ones(1), "number": 7**6000, "negative": -(7**6000)}
    memory = Memory()
    memory.take(odd=odd)
    assert memory.restore(odd=odd).odd == odd


def test_a_part_whose_name_could_be_taken_for_a_place_in_another_is_refused() -> None:
    with pytest.raises(ConfigError, match="the name has a slash"):
        State(**{"model/own": 1})


class Wrapped(torch.nn.Module):
    """A model of which names begin with ``module.`` also where it isn't replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.own = torch.nn.Parameter(torch.randn(2))
        self.register_buffer("seen", torch.randn(2))


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [Nested, Wrapped])
def test_what_one_worker_saved_is_restored_by_several_and_the_other_way_round(kind: Any) -> None:
    for saves in (False, True):
        saved, loads = kind(), kind()
        memory = Memory()
        memory.take(model=DistributedDataParallel(saved) if saves else saved)
        memory.restore(model=loads if saves else DistributedDataParallel(loads))
        assert torch.equal(loads.module.weight, saved.module.weight)


@pytest.mark.usefixtures("alone")
def test_what_a_replicated_model_does_not_keep_the_same_is_saved_by_each_rank() -> None:
    model = Wrapped()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    replicated = DistributedDataParallel(model)
    shards = Memory().take(model=replicated).shards
    assert {name for name, shard in shards.items() if shard.file != SHARED_FILE} == {"model/module.own"}
    with pytest.warns(FutureWarning):
        apart = DistributedDataParallel(Wrapped(), broadcast_buffers=False)
    shards = Memory().take(model=apart).shards
    assert {name for name, shard in shards.items() if shard.file != SHARED_FILE} == {"model/module.seen"}
    optimizer = torch.optim.SGD(replicated.parameters(), momentum=0.9)
    for parameter in replicated.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shards = Memory().take(model=replicated, optimizer=optimizer).shards
    assert shards["optimizer/state/0/momentum_buffer"].file != SHARED_FILE
