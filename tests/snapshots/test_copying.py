"""Snapshots that are copied while training goes on: what is in them, and when they count."""

from __future__ import annotations

import os
import random
import signal
import time
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from everstep.snapshots.copying import UnderWay
from everstep.snapshots.segments import Segment
from everstep.torch import copying
from processes import wait_for

from .late import Beside, steps
from .runs import Fit, World

NEVER_S = 3600.0


def put(copier: copying.TensorCopier, tensors: dict[str, torch.Tensor]) -> tuple[Segment, UnderWay]:
    """Copies tensors into a segment, one after another with a hole after each."""
    starts, end = {}, 64
    for name, tensor in tensors.items():
        starts[name] = end
        end += tensor.numel() * tensor.element_size() + 8
    segment = Segment.create("test", end)
    places = [copying.TensorPlace(tensor, starts[name]) for name, tensor in tensors.items()]
    under_way = copier.copy("file", places, segment)
    return segment, UnderWay([] if under_way is None else [under_way], lambda: None)


def found(segment: Segment, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    end, seen = 64, {}
    for name, tensor in tensors.items():
        memory = torch.frombuffer(segment.map(), dtype=tensor.dtype, count=tensor.numel(), offset=end)
        seen[name] = memory.view(tensor.shape).clone()
        end += tensor.numel() * tensor.element_size() + 8
    return seen


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.randn(30, 70),
        "turned": torch.randn(20, 50).t(),
        "step": torch.tensor(7.0),
        "large": torch.randn(5000),
    }


@pytest.mark.parametrize("room", [True, False])
def test_what_training_changes_after_a_snapshot_was_begun_is_not_in_it(
    room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CHUNK", 4096)  # so that tensors lie across several
    side = Beside(room)
    copier = copying.StagedCopier(side)
    tensors = some_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    segment, under_way = put(copier, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    under_way.complete()
    seen = found(segment, tensors)
    assert all(torch.equal(seen[name], before[name]) for name in before)
    assert bool(side.held) is not room, "training waits only where there is no room on the device"
    assert sorted(side.registered.values())[-1] == 4096
    segment.close()
    assert side.registered == {}, "the device still knows of memory that is gone"


@pytest.mark.parametrize(
    "copier", [copying.DirectCopier(torch.device("cpu")), copying.StagedCopier(Beside())]
)
def test_what_has_come_to_another_device_is_copied_to_its_own_place(copier: copying.TensorCopier) -> None:
    segment = Segment.create("test", 64)

    def put(*places: copying.TensorPlace) -> list[float]:
        under_way = copier.copy("file", places, segment)
        UnderWay([] if under_way is None else [under_way], lambda: None).complete()
        return list(torch.frombuffer(segment.map(), dtype=torch.float32).tolist())

    assert put(copying.TensorPlace(torch.ones(4), 0))[:8] == [1] * 4 + [0] * 4
    assert put(copying.TensorPlace(torch.full((4,), 2.0), 16))[:8] == [1] * 4 + [2] * 4
    both = [copying.TensorPlace(torch.full((4,), value), start) for value, start in ((3.0, 0), (4.0, 16))]
    assert put(*both)[:8] == [3] * 4 + [4] * 4
    segment.close()


def test_what_lies_side_by_side_in_a_snapshot_is_brought_to_the_host_at_once() -> None:
    places = [copying.TensorPlace(torch.zeros(4), start) for start in (64, 80, 200, 216)]
    starts, size = copying._laid_out(places)
    runs = copying._runs(places, starts)
    assert [(run.start, run.size, run.at) for run in runs] == [(64, 32, 0), (200, 32, 256)]
    assert size == 288
    assert list(copying._cut(copying.CHUNK - 3, 2 * copying.CHUNK + 1)) == [
        (copying.CHUNK - 3, copying.CHUNK),
        (copying.CHUNK, 2 * copying.CHUNK),
        (2 * copying.CHUNK, 2 * copying.CHUNK + 1),
    ]


def test_what_goes_wrong_in_the_background_is_raised_where_the_snapshot_is_needed() -> None:
    class Failing:
        def wait(self) -> float:
            raise RuntimeError("the device is gone")

    under_way = UnderWay([Failing()], lambda: pytest.fail("it is not whole"))
    under_way.complete_later(lambda held_s, whole_s: pytest.fail("it is not whole"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        under_way.complete()


def test_what_is_brought_back_to_a_device_is_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BOUNCE", 4096)
    side = Beside()
    copier = copying.StagedCopier(side)
    tensors = some_tensors()
    back = {name: copier.bring_back(tensor, copy=True) for name, tensor in tensors.items()}
    copier.all_is_back()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert side.bounces == 2, "the host fills one while the device reads the other"


def test_a_snapshot_that_one_rank_is_still_copying_counts_for_none(world: World) -> None:
    gate = world.folder / "gate"
    fit = Fit(world.trainer(steps, every_s=NEVER_S, config={"gate": str(gate)}))
    wait_for(lambda: _reports(world, 1, 1) == 1, "a report, while its snapshot isn't whole")
    os.kill(world.of_epoch(1)[0][-1]["pid"], signal.SIGKILL)
    wait_for(lambda: _restored(world, 2) == [0, 0], "a start from nothing")
    gate.touch()
    world.wait_for_step(2, 5)
    os.kill(world.of_epoch(2)[1][-1]["pid"], signal.SIGKILL)
    world.wait_for_step(3, 1)
    assert world.check_restored(3) > 0
    world.until.touch()
    fit.done()


def test_ranks_killed_while_snapshots_are_copied_beside_training_have_one_steps_state(
    world: World, rng: random.Random
) -> None:
    fit = Fit(world.trainer(steps, every_s=0.5, config={"floats": 1 << 20}))
    newest = 0
    for epoch in range(1, 5):
        world.wait_for_step(epoch, newest + 3)
        time.sleep(rng.random() * 0.2)  # the instant is what is drawn here, nothing is waited for
        os.kill(world.of_epoch(epoch)[rng.choice((0, 1))][-1]["pid"], signal.SIGKILL)
        wait_for(lambda e=epoch: len(_restored(world, e + 1)) == 2, f"attempt {epoch + 1}")
        newest = world.check_restored(epoch + 1)
        # Rank 1 reports before it has a snapshot: the one before is whole when it takes the next.
        assert newest >= _reports(world, epoch, 1) - 1
    world.until.touch()
    fit.done()
    assert world.checkpoints(), "what is copied beside training is written to storage as well"


def _restored(world: World, epoch: int) -> list[int]:
    return [n["step"] for each in world.of_epoch(epoch).values() for n in each if n.get("restored")]


def _reports(world: World, epoch: int, rank: int) -> int:
    """The newest step that a rank has reported in an attempt."""
    return max((n["step"] for n in world.of_epoch(epoch).get(rank, []) if n.get("reported")), default=0)
