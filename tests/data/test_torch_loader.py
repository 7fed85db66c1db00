"""Steps that torch's DataLoader loads: the same samples, ahead of the place, and named when they fail."""

from __future__ import annotations

import gc
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from data.ranks import all_ids, ids_of
from everstep.data import LoaderDiedError, SampleError, ShortSourceError, Stream
from everstep.errors import ConfigError
from processes import alive, kill, wait_for

torch = pytest.importorskip("torch")
from torch.utils.data import Dataset, IterableDataset  # noqa: E402

OPTIONS = {"global_batch": 6, "micro_batch": 2, "seed": 3, "epochs": 2}


class Squares(Dataset):
    """Pairs of a number and its square; what a test plants happens at one of them."""

    def __init__(self, length: int = 20, at: int = -1, plant: Any = None) -> None:
        self.length, self.at, self.plant = length, at, plant

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == self.at:
            self.plant()
        return torch.tensor([float(index)]), index * index


def go_through(steps: Any) -> None:
    for step in steps:
        list(step)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_value_error() -> None:
    raise ValueError("a broken picture")


def raise_index_error() -> None:
    raise IndexError("row 7 of 7")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_the_same_steps(num_workers):
    stream = Stream(Squares(), **OPTIONS)
    ids = []
    for step in stream.loader(num_workers=num_workers):
        micros = list(step)
        ids.append([number for micro in micros for number in micro.ids])
        assert torch.cat([micro.x for micro in micros]).flatten().tolist() == ids[-1]
        assert torch.cat([micro.y for micro in micros]).tolist() == [number**2 for number in ids[-1]]
    assert ids == all_ids(1, 20, **OPTIONS)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_loaded_ahead_doesnt_move_the_place(num_workers):
    stream = Stream(Squares(), **OPTIONS)
    loader = stream.loader(num_workers=num_workers, **({"prefetch_factor": 4} if num_workers else {}))
    for step in loader:
        assert stream.state_dict()["step"] == step.number
        list(step)
        assert stream.state_dict()["step"] == step.number + 1
        if step.number == 2:
            break
    assert [ids_of((step,)) for step in loader] == all_ids(1, 20, **OPTIONS)[3:]


def test_a_loop_that_leaves_steps_early_stays_in_order():
    stream = Stream(Squares(), **OPTIONS)
    firsts = [next(iter(step)).ids for step in stream.loader(num_workers=1)]
    assert firsts == [ids[:2] for ids in all_ids(1, 20, **OPTIONS)]


def test_a_loader_takes_another_data_set_of_the_same_length():
    stream = Stream(20, **OPTIONS)
    step = next(iter(stream.loader(Squares(), collate_fn=lambda samples: [y for _, y in samples])))
    assert next(micro.batch for micro in step) == [number**2 for number in all_ids(1, 20, **OPTIONS)[0][:2]]
    with pytest.raises(ConfigError, match="19 samples for a stream of 20"):
        stream.loader(Squares(19))


@pytest.mark.parametrize(
    "option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"]
)
def test_what_says_which_samples_come_when_is_the_streams(option):
    with pytest.raises(ConfigError, match=f"no argument '{option}'"):
        Stream(Squares(), **OPTIONS).loader(**{option: None})


def test_a_data_set_without_numbers_is_refused():
    class Lines(IterableDataset):
        def __iter__(self):
            return iter("abc")

    with pytest.raises(ConfigError) as caught:
        Stream(Lines(), **OPTIONS)
    assert caught.value.field == "Stream.source"


class Noisy(Squares):
    """Samples with noise from each generator that data sets use."""

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        import numpy

        return index, random.random(), numpy.random.rand() + torch.rand(()).item()


def test_randomness_in_samples_depends_on_neither_ranks_nor_processes():
    def noise(world_size: int, num_workers: int | None) -> dict[int, tuple[float, float]]:
        found = {}
        for rank in range(world_size):
            stream = Stream(Noisy(), **{**OPTIONS, "epochs": 1}, rank=rank, world_size=world_size)
            steps = stream if num_workers is None else stream.loader(num_workers=num_workers)
            for step in steps:
                for micro in step:
                    columns = [torch.as_tensor(column).tolist() for column in micro.batch]
                    rows = list(zip(*columns, strict=True))[: len(micro.ids)]
                    found.update({index: (one, other) for index, one, other in rows})
        return found

    alone = noise(1, None)
    assert len(set(alone.values())) == 20
    assert noise(1, 2) == noise(3, 0) == noise(2, 1) == alone


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_leaves_the_training_loops_generators_alone(num_workers):
    torch.manual_seed(5)
    random.seed(5)
    expected = (torch.rand(3).tolist(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    stream = Stream(Noisy(), **OPTIONS)
    steps = iter(stream) if num_workers == 0 else iter(stream.loader(num_workers=0))
    list(next(steps))
    assert (torch.rand(3).tolist(), random.random()) == expected


@pytest.mark.parametrize("num_workers", [None, 0, 1])
def test_a_sample_that_cant_be_loaded_is_named_and_the_place_stays(num_workers):
    stream = Stream(Squares(at=11, plant=raise_value_error), **OPTIONS)
    where = next(at for at, ids in enumerate(all_ids(1, 20, **OPTIONS)) if 11 in ids)
    with pytest.raises(
        SampleError, match="Sample 11 can't be loaded: ValueError: a broken picture"
    ) as caught:
        go_through(stream if num_workers is None else stream.loader(num_workers=num_workers))
    assert caught.value.samples == (11,)
    assert "raise_value_error" in caught.value.traceback
    assert stream.step == where


@pytest.mark.parametrize("num_workers", [None, 1])
def test_a_source_that_is_shorter_than_promised_is_named(num_workers):
    stream = Stream(Squares(at=7, plant=raise_index_error), **OPTIONS)
    with pytest.raises(ShortSourceError, match="Sample 7 can't be loaded: Squares promises 20 samples"):
        go_through(stream if num_workers is None else stream.loader(num_workers=num_workers))


def test_samples_that_dont_fit_together_are_named():
    stream = Stream([[1.0], [1.0, 2.0]], global_batch=2, micro_batch=2)
    with pytest.raises(
        SampleError, match=r"The micro-batch of samples [01], [01] can't be loaded: default_collate"
    ):
        list(next(iter(stream.loader(num_workers=1))))


def test_the_sample_is_named_when_many_are_asked_for_at_once():
    class Many(Squares):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    stream = Stream(Many(at=4, plant=raise_value_error), **OPTIONS)
    with pytest.raises(SampleError) as caught:
        go_through(stream)
    assert caught.value.samples == (4,)


def test_a_loader_process_that_is_killed_is_named_and_the_place_stays():
    stream = Stream(Squares(at=all_ids(1, 20, **OPTIONS)[2][0], plant=kill_this_process), **OPTIONS)
    with pytest.raises(
        LoaderDiedError, match=r"DataLoader worker \(pid.*The place in the stream hasn't moved"
    ):
        go_through(stream.loader(num_workers=1, prefetch_factor=1))
    assert stream.step <= 2


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(ShortSourceError([3], "gone", "put it back", "Traceback …")))
    assert (error.samples, error.what, error.remedy) == ((3,), "gone", "put it back")


class Noting(Squares):
    """Its first sample is quick; at the fifth, it says which process it is in, and stays."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self.note = note

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == 4:
            self.note.with_suffix(".new").write_text(str(os.getpid()))
            self.note.with_suffix(".new").rename(self.note)
            signal.pause()
        return super().__getitem__(index)


def test_a_process_that_dies_with_batches_on_their_way_is_named(tmp_path):
    """A tensor of a dead process can't be had any more, although its message has arrived."""
    note = tmp_path / "process"
    stream = Stream(Noting(note), global_batch=4, micro_batch=1, shuffle=False)
    steps = iter(stream.loader(num_workers=1, prefetch_factor=5))
    micros = iter(next(steps))
    next(micros)
    # Else torch raises an error of its own out of the signal, wherever the training loop is.
    of_torch = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        wait_for(note.exists, "the fifth sample")
        process = int(note.read_text())
        kill(process)
        wait_for(lambda: not alive(process), "its end")
        said = said_by(micros)
        del steps, micros
        gc.collect()
    finally:
        signal.signal(signal.SIGCHLD, of_torch)
    assert said.startswith("LoaderDiedError: A process of the loader died")
    assert stream.step == 0


def said_by(micros: Any) -> str:
    """What going on raises, without the frames that keep the loader."""
    try:
        list(micros)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_loader_with_persistent_processes_goes_on_after_a_break():
    stream = Stream(Squares(), **OPTIONS)
    loader = stream.loader(num_workers=1, persistent_workers=True)
    seen = []
    for step in loader:
        seen.append(ids_of((step,)))
        if step.number == 2:
            break
    seen += [ids_of((step,)) for step in loader]
    assert seen == all_ids(1, 20, **OPTIONS)
