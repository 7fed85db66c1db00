"""Collectives of the control plane: answered once all have asked, and never waited for in vain."""

from __future__ import annotations

from everstep.driver.collectives import Collectives
from everstep.protocol import worker_messages


class Heard:
    def __init__(self) -> None:
        self.answers: dict[int, worker_messages.Answer] = {}

    def tell(self, epoch: int, ranks: list[int], word: worker_messages.AnyToWorker) -> None:
        assert isinstance(word, worker_messages.Answer)
        for rank in ranks:
            self.answers[rank] = word


def barrier(turn: int) -> worker_messages.Question:
    return worker_messages.Question(seq=turn, what="barrier", body=b"", turn=turn)


def collectives_of(*ranks: int, returned: tuple[int, ...] = ()) -> tuple[Collectives, Heard]:
    heard = Heard()
    collectives = Collectives(heard.tell)
    collectives.restart(set(ranks), epoch=1, returned=returned)
    return collectives, heard


def test_all_are_answered_once_the_last_has_asked() -> None:
    collectives, heard = collectives_of(0, 1)
    collectives.ask(0, barrier(1))
    assert not heard.answers
    collectives.ask(1, barrier(1))
    assert [answer.error for answer in heard.answers.values()] == ["", ""]


def test_who_waits_for_a_rank_that_has_returned_is_told_so() -> None:
    collectives, heard = collectives_of(0, 1, 2)
    collectives.ask(0, barrier(1))
    collectives.returned(1)
    assert "rank 1 will not come" in heard.answers[0].error
    collectives.ask(2, barrier(1))
    assert heard.answers[2].error == heard.answers[0].error


def test_who_comes_after_a_rank_has_returned_is_told_at_once() -> None:
    collectives, heard = collectives_of(0, 1)
    collectives.returned(1)
    collectives.ask(0, barrier(1))
    assert "rank 1 will not come" in heard.answers[0].error


def test_a_rank_that_returned_under_an_earlier_driver_is_waited_for_no_more_either() -> None:
    collectives, heard = collectives_of(0, 1, returned=(1,))
    collectives.ask(0, barrier(1))
    assert "rank 1 will not come" in heard.answers[0].error


def test_a_rank_that_returns_after_the_last_collective_disturbs_nobody() -> None:
    collectives, heard = collectives_of(0, 1)
    collectives.ask(0, barrier(1))
    collectives.ask(1, barrier(1))
    collectives.returned(0)
    collectives.returned(1)
    assert [answer.error for answer in heard.answers.values()] == ["", ""]
