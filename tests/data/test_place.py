"""The place in a stream: when it moves, what it carries, and what it refuses."""

from __future__ import annotations

import io
import json
import pickle

import pytest

from data.ranks import all_ids, ids_of
from everstep.data import DataError, ResumeRefusedError, Stream

OPTIONS = {"global_batch": 6, "micro_batch": 2, "seed": 3, "epochs": 2}


def stream(source=20, **options) -> Stream:
    return Stream(source, **{**OPTIONS, **options})


def resumed(state, source=20, **options) -> list[list[int]]:
    other = stream(source, **options)
    other.load_state_dict(state)
    return [ids_of((step,)) for step in other]


EXPECTED = all_ids(1, 20, **OPTIONS)


def test_inside_of_a_step_the_place_is_before_it_and_after_its_micro_batches_behind_it():
    going = stream()
    for step in going:
        for micro in step:
            assert going.state_dict()["step"] == step.number
            assert micro.ids
        assert going.state_dict()["step"] == step.number + 1
        assert resumed(going.state_dict()) == EXPECTED[step.number + 1 :]


def test_a_step_that_was_left_early_counts_once_the_next_is_asked_for():
    going = stream()
    steps = iter(going)
    first = next(steps)
    next(iter(first))
    assert going.state_dict()["step"] == 0
    next(steps)
    assert going.state_dict()["step"] == 1


def test_a_step_can_be_finished_by_hand():
    going = stream()
    step = next(iter(going))
    step.finish()
    assert resumed(going.state_dict()) == EXPECTED[1:]


def test_a_loop_that_breaks_off_inside_of_a_step_does_it_again():
    going = stream()
    for step in going:
        if step.number == 2:
            break
        list(step)
    assert [ids_of((step,)) for step in going] == EXPECTED[2:]


def test_a_stream_that_is_at_its_end_has_no_more_steps():
    going = stream()
    assert [ids_of((step,)) for step in going] == EXPECTED
    assert list(going) == []
    assert resumed(going.state_dict()) == []


def test_the_place_fits_any_number_of_ranks():
    going = stream()
    for step in going:
        list(step)
        if step.number == 3:
            break
    state = going.state_dict()
    ranks = [stream(rank=rank, world_size=5) for rank in range(5)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [ids_of(steps) for steps in zip(*ranks, strict=True)] == EXPECTED[4:]


def test_the_cursor_is_small_and_plain_far_out_in_a_large_source():
    torch = pytest.importorskip("torch")
    far = Stream(10**12, global_batch=10**6, micro_batch=10**5, seed=-(2**63), epochs=None, name="a" * 300)
    state = far.state_dict()
    state |= {"step": 10**15, "sample": 10**18}
    assert len(json.dumps(state)) <= 256
    assert pickle.loads(pickle.dumps(state)) == json.loads(json.dumps(state)) == state
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=True) == state


def test_a_step_at_sample_10_to_the_9_is_as_any_other():
    far = Stream(3 * 10**9, global_batch=8, micro_batch=4)
    far.load_state_dict({**far.state_dict(), "step": 125_000_000, "sample": 10**9})
    step = next(iter(far))
    ids = ids_of((step,))
    assert (step.number, len(set(ids))) == (125_000_000, 8)
    assert max(ids) < 3 * 10**9


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"source": 21}, "length"),
        ({"seed": 4}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"global_batch": 8}, "global_batch"),
        ({"name": "validation"}, "source"),
        ({"source": [0.0] * 20}, "source"),
    ],
)
def test_another_stream_at_the_resume_is_refused_by_name_unless_it_is_asked_for(changes, field):
    state = stream().state_dict()
    with pytest.raises(ResumeRefusedError, match=f"{field} was .* and is .*accept_changes") as caught:
        resumed(state, **changes)
    assert caught.value.field == f"Stream.{field}"
    assert resumed(state, accept_changes=[field], **changes)


def test_a_larger_batch_that_was_asked_for_goes_on_at_the_next_sample():
    going = stream()
    list(next(iter(going)))
    later = resumed(going.state_dict(), global_batch=17, accept_changes=["global_batch"])
    assert [n for step in later for n in step] == [n for step in EXPECTED[1:] for n in step]


def test_what_the_order_doesnt_depend_on_may_change():
    going = stream()
    list(next(iter(going)))
    assert (
        resumed(going.state_dict(), micro_batch=3, epochs=1)
        == all_ids(1, 20, **{**OPTIONS, "micro_batch": 3, "epochs": 1})[1:]
    )


@pytest.mark.parametrize("state", [{}, {"step": 3}, [1]])
def test_something_else_than_a_cursor_is_refused(state):
    with pytest.raises(ResumeRefusedError, match="isn't a stream's state"):
        stream().load_state_dict(state)


def test_a_cursor_of_another_version_is_refused():
    with pytest.raises(ResumeRefusedError, match="version 2"):
        stream().load_state_dict({**stream().state_dict(), "version": 2})


def test_a_loop_notices_that_its_stream_was_moved():
    going = stream()
    steps = iter(going)
    next(steps)
    going.load_state_dict(stream().state_dict())
    with pytest.raises(DataError, match="moved"):
        next(steps)


def test_a_step_gives_its_micro_batches_once():
    step = next(iter(stream()))
    list(step)
    with pytest.raises(DataError, match="already"):
        list(step)


GOOD = stream().state_dict()


@pytest.mark.parametrize(
    "state",
    [
        None,
        5,
        "abc",
        [],
        [[]],
        {**GOOD, "of": 3},
        {**GOOD, "sample": -3},
        {**GOOD, "sample": "x"},
        {**GOOD, "sample": None},
        {**GOOD, "step": 1.5},
        {**GOOD, "step": True},
        {**GOOD, "lanes": 5},
        {**GOOD, "lanes": [[0, [1]]]},
        {**GOOD, "of": {**GOOD["of"], "length": 0}},
    ],
)
def test_a_cursor_with_something_broken_in_it_is_refused_and_moves_nothing(state):
    going = stream()
    list(next(iter(going)))
    with pytest.raises(ResumeRefusedError):
        going.load_state_dict(state)
    assert going.step == 1


def test_a_cursor_that_was_saved_as_arrays_is_the_same():
    """As a checkpointer for arrays gives numbers back."""
    numpy = pytest.importorskip("numpy")
    going = stream()
    list(next(iter(going)))
    saved = going.state_dict()
    restored = {**saved, "step": numpy.asarray(saved["step"]), "sample": numpy.int64(saved["sample"])}
    assert resumed(restored) == EXPECTED[1:]
    other = stream()
    other.load_state_dict(restored)
    assert json.dumps(other.state_dict()) == json.dumps(saved)


@pytest.mark.parametrize("loaded_by", ["the stream", "a loader"])
def test_a_step_is_over_when_the_next_is_asked_for(loaded_by):
    """Else a loader would hand out the next step's samples as this one's."""
    pytest.importorskip("torch")
    going = stream()
    steps = iter(going if loaded_by == "the stream" else going.loader())
    first, untouched = next(steps), next(steps)
    with pytest.raises(DataError, match="Step 0 is over.*asked for"):
        list(first)
    begun = iter(untouched)
    assert next(begun).ids == EXPECTED[1][:2]
    last = next(steps)
    with pytest.raises(DataError, match="Step 1 is over"):
        next(begun)
    assert ids_of((last,)) == EXPECTED[2]
    untouched.finish()
    assert resumed(going.state_dict()) == EXPECTED[3:], "the place doesn't go back"


def test_a_place_can_be_saved_before_the_first_step_and_by_a_closed_loop():
    assert resumed(stream().state_dict()) == EXPECTED
    going = stream()
    steps = iter(going)
    list(next(steps))
    next(iter(next(steps)))
    steps.close()
    assert resumed(going.state_dict()) == EXPECTED[1:]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_place_at_the_last_step_has_the_rest_and_no_more(drop_last):
    undisturbed = all_ids(1, 20, **OPTIONS, drop_last=drop_last)
    for done in range(len(undisturbed) + 1):
        going = stream(drop_last=drop_last)
        steps = iter(going)
        for _ in range(done):
            list(next(steps))
        assert resumed(going.state_dict(), drop_last=drop_last) == undisturbed[done:]


def test_a_batch_can_be_larger_than_the_source():
    ids = all_ids(3, 2, global_batch=7, micro_batch=2, epochs=5)
    assert [len(step) for step in ids] == [7, 3]
    flat = [number for step in ids for number in step]
    assert [sorted(flat[at : at + 2]) for at in range(0, 10, 2)] == [[0, 1]] * 5
    assert all_ids(2, 1, global_batch=3, micro_batch=1) == [[0]]
    assert all_ids(2, 1, global_batch=3, micro_batch=1, drop_last=True) == []
