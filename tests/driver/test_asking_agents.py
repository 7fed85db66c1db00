"""A take-over, between the agents that tell what they have and the decision who is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import cast

import msgspec

from everstep.backend.base import Member
from everstep.deadlines import Deadlines
from everstep.driver.streams import Summary
from everstep.driver.take_over import TakeOver, ask_agents
from everstep.engine.base import Engine
from everstep.failures import Kind
from everstep.identity import WorkerId
from everstep.protocol import framing, wire, worker_messages
from everstep.saved.snapshots import Copy
from everstep.topology.placement import Assignment

HOSTS = ["a", "b"]
SLICES = {host: host for host in HOSTS}
COPIES = (Copy(0, "", 3, 7, 2), Copy(1, "", 3, 7, 2))
LEASE = 5
LIMITS = Deadlines(heartbeat_interval_s=0.01, heartbeat_timeout_s=0.05, take_over_s=0.05, kill_s=0.05)
PATIENT = Deadlines(heartbeat_interval_s=0.01, heartbeat_timeout_s=0.05, take_over_s=600.0)


def held(
    rank: int, epoch: int = 3, generation: int = 0, *, stopping: bool = False, joined: bool = False
) -> wire.Held:
    """One of two workers, each of which is a replica group. ``joined``: an earlier driver said so."""
    place = Assignment(rank, HOSTS[rank], 0, 1, rank, 2, 2, HOSTS[rank], rank, 2, rank, 2, 0, 1)
    member = Member(rank, 2, 0, 1, rank, 2, group_rank=0, group_size=1)
    spec = wire.WorkerSpec(
        "run",
        "/runs/run",
        epoch,
        generation,
        place,
        member,
        None,
        "first start",
        "",
        0,
        1.0,
        1.0,
        1.0,
        1.0,
        False,
        False,
    )
    state = msgspec.msgpack.encode(Summary(joined=True)) if joined else b""
    return wire.Held(spec, 100 + rank, 0, state, stopping)


def said(rank: int, *what: worker_messages.AnyFromWorker) -> list[wire.FromWorker]:
    """In two pieces, the second of which begins in the midst of a frame."""
    data = b"".join(map(framing.frame, what))
    cut = len(data) - 2
    return [wire.FromWorker(3, 0, rank, 0, data[:cut]), wire.FromWorker(3, 0, rank, cut, data[cut:])]


JOINED, RETURNED = worker_messages.Joined(), worker_messages.Returned(None)


class Agents:
    """An engine whose agents answer at once what was prepared, or not at all."""

    def __init__(
        self,
        answers: dict[str, list[wire.AnyFromAgent]],
        stubborn: Collection[str] = (),
        begun: Mapping[tuple[int, int], int] | None = None,
        *,
        slow: Collection[str] = (),
        lost: Collection[str] = (),
        overwritten: Collection[Copy] = (),
        limits: Deadlines = LIMITS,
    ) -> None:
        """``slow`` answer, and ``lost`` are lost, once it is said that they are waited for. ``overwritten``:
        snapshots that workers write over after their agent has answered.
        """
        self.left = TakeOver([*HOSTS], 3, begun or {})
        self.sent: list[tuple[str, wire.AnyToAgent]] = []
        self.unclaimed: list[str] = []
        self.retired: list[str] = []
        self.said: list[str] = []
        self._answers = answers
        self._stubborn = stubborn
        """Hosts whose workers can't be killed."""
        self._slow = slow
        self._lost = lost
        self._overwritten = overwritten
        self._limits = limits

    def claim(self, host: str) -> None:
        if host not in self._slow:
            self._answer(host)

    def _answer(self, host: str) -> None:
        for message in self._answers.get(host, []):
            self.left.received(host, message)

    def _say(self, line: str) -> None:
        self.said.append(line)
        if line.startswith("waiting for"):
            for host in self._slow:
                self._answer(host)
            for host in self._lost:
                self.left.lost(host)

    def unclaim(self, host: str) -> None:
        self.unclaimed.append(host)

    def retire(self, host: str) -> None:
        self.retired.append(host)

    def send(self, host: str, message: wire.AnyToAgent) -> None:
        self.sent.append((host, message))
        if isinstance(message, wire.Stop) and host not in self._stubborn:
            gone = wire.Gone(message.epoch, message.generation, message.ranks, self._copies(host))
            self.left.received(host, gone)

    def _copies(self, host: str) -> list[Copy]:
        """What its workers left when they ended."""
        told = (message.copies for message in self._answers[host] if isinstance(message, wire.Inventory))
        return [copy for copies in told for copy in copies if copy not in self._overwritten]

    def asked(self) -> TakeOver:
        engine = cast(Engine, self)
        asyncio.run(ask_agents(engine, self.left, LEASE, lambda: SLICES, self._limits, self._say))
        return self.left


def answer(*workers: wire.Held, words_of: list[wire.FromWorker], copies: Collection[Copy] = ()) -> list:  # type: ignore[type-arg]
    return [wire.Inventory([*workers], copies=[*copies]), *words_of, wire.HandedOver()]


def test_workers_that_all_train_are_kept_and_nobody_is_told_to_end() -> None:
    agents = Agents({host: answer(held(n), words_of=said(n, JOINED)) for n, host in enumerate(HOSTS)})
    left = agents.asked()
    assert left.chosen.kept_hosts == {"a", "b"}
    assert (agents.sent, agents.unclaimed, agents.said) == ([], [], [])
    assert [a.rank for a in left.adopted().assignments] == [0, 1]
    assert left.pids() == {0: 100, 1: 101}
    assert [worker.rank for worker in left.streams()] == [0, 1]


def test_that_a_worker_has_joined_is_known_from_what_was_acknowledged_or_from_what_it_says_again() -> None:
    agents = Agents(
        {"a": answer(held(0, joined=True), words_of=[]), "b": answer(held(1), words_of=said(1, JOINED))}
    )
    assert agents.asked().chosen.kept_hosts == {"a", "b"}
    unheard = Agents({"a": answer(held(0, joined=True), words_of=[]), "b": answer(held(1), words_of=[])})
    assert unheard.asked().chosen.kept_hosts == {"a"}
    assert unheard.said == ["workers of an earlier driver are ended: rank 1 had not joined yet"]


def test_that_a_worker_has_returned_is_known_from_what_it_says_again() -> None:
    stopping = held(1, stopping=True)
    other = answer(held(0), words_of=said(0, JOINED))
    returned = Agents({"a": other, "b": answer(stopping, words_of=said(1, JOINED, RETURNED))})
    assert returned.asked().chosen.kept_hosts == {"a", "b"}
    trains = Agents({"a": other, "b": answer(stopping, words_of=said(1, JOINED))})
    assert trains.asked().chosen.kept_hosts == {"a"}


def test_what_is_not_kept_is_ended_by_host_and_generation_and_its_host_is_let_go() -> None:
    other = answer(held(0), words_of=said(0, JOINED))
    agents = Agents({"a": other, "b": answer(held(1, generation=2), words_of=[])}, begun={(3, 1): 2})
    left = agents.asked()
    assert agents.sent == [("b", wire.Stop(LEASE, 3, 2, [1], 0.0))]
    assert agents.unclaimed == ["b"]
    assert left.adopted().generations == ((0, 0), (1, 2)), "no incarnation's number is used twice"


def test_workers_that_had_been_replaced_are_told_to_end() -> None:
    """The host with the replacement is silent, or nothing was started there yet."""
    answers = {host: answer(held(n), words_of=said(n, JOINED)) for n, host in enumerate(HOSTS)}
    agents = Agents(answers, begun={(3, 1): 1})
    left = agents.asked()
    assert agents.said == ["workers of an earlier driver are ended: rank 1 had been replaced"]
    assert agents.sent == [("b", wire.Stop(LEASE, 3, 0, [1], 0.0))]
    assert left.adopted().generations == ((0, 0), (1, 1)), "no incarnation's number is used twice"


def test_what_is_left_of_earlier_attempts_is_told_to_end_also_on_hosts_that_are_kept() -> None:
    answers = {
        "a": answer(held(0), held(1, epoch=2, generation=4), words_of=said(0, JOINED)),
        "b": answer(held(1), words_of=said(1, JOINED)),
    }
    agents = Agents(answers)
    assert agents.asked().chosen.kept_hosts == {"a", "b"}
    assert agents.sent == [("a", wire.Stop(LEASE, 2, 4, [1], 0.0))]
    assert agents.unclaimed == []


def test_a_host_that_does_not_answer_is_named_and_its_workers_are_not_counted_on() -> None:
    agents = Agents({"a": answer(held(0), words_of=said(0, JOINED))})
    assert agents.asked().chosen.kept_hosts == {"a"}
    assert agents.said == [
        "workers of an earlier driver are missing: rank 1 could not be found; no answer from b"
    ]


def test_workers_of_a_host_that_is_still_telling_are_kept_and_what_is_late_is_heard_once() -> None:
    reports = [worker_messages.Report(index, msgspec.Raw(b"\x80")) for index in (1, 2, 3)]
    begun, late = said(1, *reports)
    agents = Agents(
        {
            "a": answer(held(0, joined=True), words_of=[]),
            "b": [wire.Inventory([held(1, joined=True)]), begun],  # in the midst of the last report
        }
    )
    left = agents.asked()
    assert left.chosen.kept_hosts == {"a", "b"}
    assert (left.chosen.unanswered, agents.said, agents.sent) == (("b",), [], [])
    stream = left.streams()[WorkerId(3, 0, 1)]
    [(_, told)] = left.messages()
    assert isinstance(told, wire.FromWorker)
    assert [*stream.feed(told.data)] == reports[:2]
    assert stream.acknowledgement() is not None
    assert stream.upto == 2, "no more is acknowledged than was heard"
    assert [*stream.feed(late.data)] == reports[2:]


def test_a_worker_of_a_host_that_is_still_telling_is_ended_if_it_has_not_joined_as_far_as_is_known() -> None:
    agents = Agents({"a": answer(held(0, joined=True), words_of=[]), "b": [wire.Inventory([held(1)])]})
    assert agents.asked().chosen.kept_hosts == {"a"}
    assert agents.sent == [("b", wire.Stop(LEASE, 3, 0, [1], 0.0))]


def test_where_no_agent_has_workers_none_is_left() -> None:
    agents = Agents({host: answer(words_of=[]) for host in HOSTS})
    agents.asked()
    assert agents.said == ["workers of an earlier driver are missing: none is left"]
    assert agents.unclaimed == HOSTS


def ending(
    stubborn: Collection[str] = (), copies: Collection[Copy] = COPIES, overwritten: Collection[Copy] = ()
) -> Agents:
    """Nobody is kept: no group has met."""
    return Agents(
        {
            host: answer(held(n), words_of=[], copies=[copy for copy in copies if copy.rank == n])
            for n, host in enumerate(HOSTS)
        },
        stubborn,
        overwritten=overwritten,
    )


def test_hosts_of_ended_workers_stay_claimed_where_their_memory_can_be_restored_from() -> None:
    agents = ending()
    remains = agents.asked().remains(SLICES)
    assert agents.unclaimed == []
    assert remains is not None
    assert remains.slices == ("a", "b")
    assert [(copy.rank, copy.host) for copy in remains.copies] == [(0, "a"), (1, "b")]


def test_what_workers_wrote_over_before_they_ended_is_not_counted_on() -> None:
    older = (Copy(0, "", 3, 6, 2), Copy(1, "", 3, 6, 2))
    remains = ending(copies=[*older, *COPIES], overwritten=older).asked().remains(SLICES)
    assert remains is not None
    assert [(copy.rank, copy.index) for copy in remains.copies] == [(0, 7), (1, 7)]
    agents = ending(overwritten=COPIES)
    assert agents.asked().remains(SLICES) is None
    assert agents.unclaimed == HOSTS


def test_nothing_remains_without_snapshots() -> None:
    agents = ending(copies=())
    assert agents.asked().remains(SLICES) is None
    assert agents.unclaimed == HOSTS


def check_that_only_a_remains(agents: Agents) -> None:
    remains = agents.asked().remains(SLICES)
    assert remains is not None
    assert remains.slices == ("a",)
    assert {copy.host for copy in remains.copies} == {"a"}
    assert (agents.unclaimed, agents.retired) == (["b"], ["b"])


def test_a_host_whose_workers_do_not_end_is_given_up_and_not_what_others_have_in_memory() -> None:
    check_that_only_a_remains(ending(stubborn=["b"]))


def test_a_host_that_does_not_answer_is_given_up_and_not_what_others_have_in_memory() -> None:
    told = answer(held(0), words_of=[], copies=COPIES)  # of rank 1 as well
    check_that_only_a_remains(Agents({"a": told}))
    told_in_part: list[wire.AnyFromAgent] = [wire.Inventory([held(1)], copies=COPIES[1:])]
    check_that_only_a_remains(Agents({"a": told, "b": told_in_part}))


def test_an_agent_that_is_slow_to_answer_is_waited_for_and_named() -> None:
    answers = {host: answer(held(n), words_of=said(n, JOINED)) for n, host in enumerate(HOSTS)}
    agents = Agents(answers, slow=["b"], limits=PATIENT)
    assert agents.asked().chosen.kept_hosts == {"a", "b"}
    assert agents.said == [
        "waiting for an answer from b, where an earlier driver left workers "
        "(at most 600 s: Deadlines.take_over_s)"
    ]


def test_a_host_that_is_lost_while_its_answer_is_awaited_is_waited_for_no_longer() -> None:
    agents = Agents({"a": answer(held(0), words_of=said(0, JOINED))}, lost=["b"], limits=PATIENT)
    assert agents.asked().chosen.kept_hosts == {"a"}
    assert agents.unclaimed == ["b"]
    assert agents.retired == []


def test_a_host_whose_workers_do_not_end_counts_as_lost_until_they_have() -> None:
    agents = ending(stubborn=["b"])
    agents.asked()
    assert agents.retired == ["b"]


def test_workers_of_earlier_attempts_are_ended_before_their_host_is_used_again() -> None:
    """They would not end when their driver told them to, and its next attempt went elsewhere."""
    older = answer(held(1, epoch=2), words_of=[], copies=COPIES[1:])
    agents = Agents({"a": answer(held(0), words_of=[], copies=COPIES[:1]), "b": older}, stubborn=["b"])
    check_that_only_a_remains(agents)
    assert agents.sent == [
        ("a", wire.Stop(LEASE, 3, 0, [0], 0.0)),
        ("b", wire.Stop(LEASE, 2, 0, [1], 0.0)),
    ]


def test_a_host_on_which_workers_are_kept_is_not_given_up_for_others_that_do_not_end() -> None:
    both = answer(held(0, epoch=2), held(0), words_of=said(0, JOINED))
    agents = Agents({"a": both, "b": answer(held(1), words_of=said(1, JOINED))}, stubborn=["a"])
    assert agents.asked().chosen.kept_hosts == {"a", "b"}
    assert agents.sent == [("a", wire.Stop(LEASE, 2, 0, [0], 0.0))]
    assert (agents.unclaimed, agents.retired) == ([], [])


DIED = wire.Unprepared(Kind.TEMPLATE, "died", "")


def test_a_template_that_died_while_nobody_drove_is_told_of_before_the_end_of_its_workers() -> None:
    ended = wire.Exited(3, 0, 0, 1.0, None, 9, False, False, 0, "", "")
    answers = {host: answer(held(n), words_of=said(n, JOINED)) for n, host in enumerate(HOSTS)}
    left = Agents({**answers, "a": [*answers["a"], DIED, ended]}).asked()
    assert [*left.messages()][-2:] == [("a", DIED), ("a", ended)]


def test_a_template_of_the_previous_code_is_not_missed() -> None:
    answers = {host: answer(held(n), words_of=said(n, JOINED)) for n, host in enumerate(HOSTS)}
    left = Agents({**answers, "a": [*answers["a"], DIED]}).asked()
    left.outdated = True
    assert not any(isinstance(message, wire.Unprepared) for _, message in left.messages())
