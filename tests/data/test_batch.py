"""Exactly the global batch in every step, on any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from data.ranks import all_ids, in_step, streams
from everstep.data import Stream
from everstep.data.batch import deal
from everstep.errors import ConfigError

sizes = st.integers(1, 40)


@given(samples=sizes, micro_batch=sizes, world_size=st.integers(1, 16), even=st.booleans())
@settings(max_examples=200)
def test_each_sample_of_a_step_is_dealt_to_one_rank(samples, micro_batch, world_size, even):
    dealt = [deal(samples, samples, micro_batch, rank, world_size, even) for rank in range(world_size)]
    real = [offset for cuts in dealt for cut in cuts for offset in cut.offsets[: cut.real]]
    assert sorted(real) == list(range(samples))
    assert all(cuts for cuts in dealt)


@given(samples=sizes, less=sizes, micro_batch=sizes, world_size=st.integers(1, 16))
@settings(max_examples=200)
def test_even_ranks_have_equally_many_micro_batches_of_one_shape(samples, less, micro_batch, world_size):
    shapes = {
        tuple(
            len(cut.offsets) for cut in deal(min(less, samples), samples, micro_batch, rank, world_size, True)
        )
        for rank in range(world_size)
    }
    (shape,) = shapes
    assert set(shape) == {micro_batch}


@given(samples=sizes, micro_batch=sizes, world_size=st.integers(1, 16))
@settings(max_examples=200)
def test_ranks_differ_by_one_micro_batch_at_most(samples, micro_batch, world_size):
    counts = [len(deal(samples, samples, micro_batch, rank, world_size, False)) for rank in range(world_size)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("world_size", range(1, 17))
def test_the_order_is_the_same_for_every_number_of_ranks(world_size):
    options = {"global_batch": 12, "micro_batch": 5, "seed": 7, "epochs": 2}
    assert all_ids(world_size, 50, **options) == all_ids(1, 50, **options)


@pytest.mark.parametrize("world_size", [1, 3, 5, 16])
@pytest.mark.parametrize("even", [False, True])
def test_the_average_over_ranks_is_the_mean_over_the_step(world_size, even):
    """A step's loss is the mean of its samples' numbers, in the arithmetic that DDP does with gradients."""
    options = {"global_batch": 24, "micro_batch": 4, "epochs": 1, "even": even}
    for steps in in_step(streams(world_size, 48, **options)):
        ids, by_scale, by_weights = [], 0.0, 0.0
        for step in steps:
            for micro in step:
                ids += micro.ids
                by_scale += micro.batch.mean() * micro.scale / world_size
                by_weights += (micro.batch * micro.weights).sum() / world_size
        assert by_scale == pytest.approx(sum(ids) / 24)
        assert by_weights == pytest.approx(sum(ids) / 24)


@pytest.mark.parametrize("world_size", [1, 3, 5, 16])
def test_the_last_smaller_step_is_a_mean_over_what_it_has(world_size):
    for last in in_step(streams(world_size, 50, global_batch=12, micro_batch=5)):
        total = sum((micro.batch * micro.weights).sum() for step in last for micro in step) / world_size
    assert last[0].samples == 2
    ids = all_ids(1, 50, global_batch=12, micro_batch=5)[-1]
    assert total == pytest.approx(sum(ids) / 2)


def test_ranks_without_a_sample_after_a_resume_take_part_with_weight_0():
    """One rank has all but three samples. Seven ranks share these, and the gradient is their mean."""
    options = {"global_batch": 47, "micro_batch": 1}
    (before,) = streams(1, 50, **options)
    next(iter(before)).finish()
    group = streams(7, 50, **options)
    for stream in group:
        stream.load_state_dict(before.state_dict())
    (micros,) = [[list(step) for step in steps] for steps in in_step(group)]
    assert [len(each) for each in micros] == [1] * 7
    assert [micro.scale for (micro,) in micros] == [pytest.approx(7 / 3)] * 3 + [0.0] * 4
    assert [micro.ids for (micro,) in micros[3:]] == [[]] * 4
    rest = set(range(50)) - set(all_ids(1, 50, **options)[0])
    mean = sum(float(micro.batch.mean()) * micro.scale for (micro,) in micros) / 7
    assert mean == pytest.approx(sum(rest) / 3)


def test_the_last_smaller_step_can_be_dropped():
    assert [len(ids) for ids in all_ids(2, 50, global_batch=12, micro_batch=5, drop_last=True)] == [12] * 4
    assert len(Stream(50, global_batch=12, micro_batch=5, drop_last=True)) == 4
    assert len(Stream(50, global_batch=12, micro_batch=5)) == 5


def test_passes_follow_each_other_without_a_gap():
    ids = all_ids(3, 10, global_batch=4, micro_batch=2, epochs=3)
    flat = [number for step in ids for number in step]
    assert [len(step) for step in ids] == [4] * 7 + [2]
    assert [sorted(flat[at : at + 10]) for at in (0, 10, 20)] == [list(range(10))] * 3
    assert flat[:10] != flat[10:20]


def test_a_rank_without_samples_gets_a_micro_batch_of_weight_0():
    step = next(iter(Stream(4, global_batch=4, micro_batch=2, rank=2, world_size=3)))
    (micro,) = step
    assert (micro.ids, micro.scale, micro.weights, micro.last) == ([], 0.0, [0.0, 0.0], True)
    assert len(micro.batch) == 2


def test_the_mean_of_a_padded_micro_batch_is_refused():
    step = next(iter(Stream(3, global_batch=3, micro_batch=2, even=True)))
    whole, padded = step
    assert whole.scale == pytest.approx(2 / 3)
    assert padded.weights == [pytest.approx(1 / 3), 0.0]
    with pytest.raises(ConfigError, match=r"1 samples and 1 of padding.*micro\.weights"):
        _ = padded.scale


def test_seeds_come_from_samples_and_not_from_ranks():
    def seeds(world_size: int) -> dict[tuple[int, ...], tuple[int, list[int]]]:
        return {
            tuple(micro.ids): (micro.seed, micro.seeds)
            for steps in in_step(streams(world_size, 40, global_batch=20, micro_batch=4, epochs=2))
            for step in steps
            for micro in step
            if micro.ids
        }

    assert seeds(1) == seeds(3) == seeds(7)
    assert len({seed for seed, _ in seeds(1).values()}) == 20


def test_gradients_are_averaged_at_the_last_micro_batch_only():
    class Model:
        def __init__(self) -> None:
            self.entered = 0

        def no_sync(self):
            self.entered += 1
            return open("/dev/null")

    model = Model()
    step = next(iter(Stream(6, global_batch=6, micro_batch=2)))
    for micro in step:
        with step.accumulate(model, micro):
            assert model.entered == (2 if micro.last else model.entered)
    assert model.entered == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"global_batch": 0}, "Stream.global_batch"),
        ({"micro_batch": 1.5}, "Stream.micro_batch"),
        ({"epochs": 0}, "Stream.epochs"),
        ({"seed": "now"}, "Stream.seed"),
        ({"rank": 1}, "Stream.rank"),
        ({"rank": 4, "world_size": 4}, "Stream.rank"),
        ({"accept_changes": ["colour"]}, "Stream.accept_changes"),
        ({"source": 0}, "Stream.source"),
        ({"source": iter([1])}, "Stream.source"),
    ],
)
def test_an_argument_that_cant_be_right_is_named(options, field):
    with pytest.raises(ConfigError) as caught:
        Stream(**{"source": 10, "global_batch": 4, "micro_batch": 2, **options})
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_process_among_others_must_say_which_it_is(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="WORLD_SIZE=8"):
        iter(Stream(10, global_batch=4, micro_batch=2))
