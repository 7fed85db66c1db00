"""What a later driver must hear again is not acknowledged; all else is, so that agents can forget it."""

from __future__ import annotations

import msgspec
import pytest

from everstep.driver.streams import Summary, WorkerStream
from everstep.protocol import framing, worker_messages
from everstep.saved.reports import Part
from everstep.topology.placement import Assignment

HERE = Assignment(0, "host", 0, 1, 0, 1, 1, "slice", 0, 1, 0, 1, 0, 1)
RAW = msgspec.Raw(msgspec.msgpack.encode({"x": 1}))


def plain(index: int) -> worker_messages.Report:
    return worker_messages.Report(index, RAW)


def saving(index: int) -> worker_messages.Report:
    return worker_messages.Report(index, RAW, Part(index, f"c{index}"))


def hear(stream: WorkerStream, *said: worker_messages.AnyFromWorker) -> int:
    data = b"".join(framing.frame(word) for word in said)
    assert len(list(stream.feed(data))) == len(said)
    return len(data)


def state(acknowledged: tuple[int, bytes] | None) -> tuple[int, Summary]:
    assert acknowledged is not None
    return acknowledged[0], msgspec.msgpack.decode(acknowledged[1], type=Summary)


def test_plain_reports_and_answered_questions_are_acknowledged_to_the_end() -> None:
    stream = WorkerStream(HERE, 0)
    size = hear(
        stream,
        worker_messages.Hello(1),
        worker_messages.Joined(),
        plain(1),
        worker_messages.Question(1, "newest"),
        plain(2),
    )
    stream.settle(set(), set())
    assert state(stream.acknowledgement()) == (size, Summary(True, 2, 0))
    assert stream.acknowledgement() is None, "nothing has moved since"


def test_a_later_driver_knows_that_a_snapshot_is_still_being_taken() -> None:
    stream = WorkerStream(HERE, 0)
    size = hear(stream, worker_messages.Joined(), worker_messages.Report(1, RAW, taking=True))
    offset, summary = state(stream.acknowledgement())
    assert (offset, summary) == (size, Summary(True, 1, 0, taking=1))
    later = WorkerStream(HERE, 0, offset, msgspec.msgpack.encode(summary))
    assert later.taking == 1
    hear(later, worker_messages.SnapshotTaken(1, 0.0, 0.0))
    assert state(later.acknowledgement())[1] == Summary(True, 1, 0)


def test_a_checkpoint_that_is_awaited_holds_back_what_follows_it() -> None:
    stream = WorkerStream(HERE, 0)
    before = hear(stream, worker_messages.Joined(), plain(1))
    after = hear(stream, saving(2), plain(3))
    stream.settle({2}, set())
    assert state(stream.acknowledgement()) == (before, Summary(True, 1, 0))
    stream.settle(set(), set())
    assert state(stream.acknowledgement()) == (before + after, Summary(True, 3, 0, settled=(2,)))


def test_a_later_driver_knows_which_checkpoints_are_committed_or_given_up() -> None:
    first = WorkerStream(HERE, 0)
    hear(first, plain(1), saving(2), saving(3), plain(4), saving(5))
    first.settle({5}, set())
    acknowledged = first.acknowledgement()
    assert acknowledged is not None
    later = WorkerStream(HERE, 0, *acknowledged)
    assert list(later.settled) == [2, 3]
    hear(later, saving(5))
    later.settle(set(), set())
    assert list(later.settled) == [2, 3, 5]


@pytest.mark.parametrize("turn", [0, 1])
def test_a_question_is_heard_again_until_it_is_answered(turn: int) -> None:
    stream = WorkerStream(HERE, 0)
    before = hear(stream, worker_messages.Joined())
    after = hear(stream, worker_messages.Question(1, "any", b"", turn), plain(1))
    stream.settle(set(), {1})
    assert state(stream.acknowledgement())[0] == before
    stream.settle(set(), set())
    assert state(stream.acknowledgement()) == (before + after, Summary(True, 1, turn))


@pytest.mark.parametrize(
    "last", [worker_messages.Returned(None), worker_messages.Raised("m", "t", False, 0.0, True)]
)
def test_a_workers_last_word_is_never_acknowledged(last: worker_messages.AnyFromWorker) -> None:
    stream = WorkerStream(HERE, 0)
    before = hear(stream, plain(1))
    hear(stream, last)
    stream.settle(set(), set())
    assert state(stream.acknowledgement())[0] == before
    stream.settle(set(), set())
    assert stream.acknowledgement() is None


def test_a_later_driver_goes_on_where_the_state_says() -> None:
    first = WorkerStream(HERE, 0)
    hear(first, worker_messages.Joined(), plain(1), plain(2))
    first.settle(set(), set())
    acknowledged = first.acknowledgement()
    assert acknowledged is not None
    later = WorkerStream(HERE, 0, *acknowledged)
    assert (later.joined, later.upto) == (True, 2)
    size = hear(later, plain(3))
    later.settle(set(), set())
    assert state(later.acknowledgement()) == (acknowledged[0] + size, Summary(True, 3, 0))
