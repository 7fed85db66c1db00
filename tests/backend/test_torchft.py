"""What Everstep fixes in torchft's quorums, against torchft's own lighthouse and manager servers."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from everstep.torchft import backend as torchft_backend
from everstep.torchft.backend import TorchftBackend, TorchftConfig, meet_in_bounded_time, patched
from everstep.torchft.server import OPTIONS
from processes import wait_for

_PATIENCE = timedelta(seconds=60)


@contextmanager
def lighthouse(port: int = 0) -> Iterator[int]:
    """Gives its port. Who has asked it once counts as there."""
    from torchft._torchft import LighthouseServer

    server = LighthouseServer(f"127.0.0.1:{port}", **{**OPTIONS, "heartbeat_timeout_ms": 600_000})
    try:
        yield int(server.address().rpartition(":")[2])
    finally:
        server.shutdown()


class Group:
    """The managers of a replica group, one a rank; the first has the server."""

    def __init__(self, name: str, size: int, port: int) -> None:
        from torchft._torchft import ManagerClient, ManagerServer

        self.server = ManagerServer(
            replica_id=name,
            lighthouse_addr=f"http://127.0.0.1:{port}",
            hostname="localhost",
            bind="[::]:0",
            store_addr="nowhere",
            world_size=size,
            heartbeat_interval=timedelta(hours=1),
            connect_timeout=_PATIENCE,
            quorum_retries=1_000_000,
        )
        client = patched(ManagerClient, size)
        self.ranks = [client(self.server.address(), connect_timeout=_PATIENCE) for _ in range(size)]
        self._threads = ThreadPoolExecutor(size)
        self._asked = 0

    def ask(self, *steps: int, failures: int = 0) -> list[Future[Any]]:
        """One rank after the other asks for a quorum, and tells the step that it has."""
        self._asked += 1
        found = []
        for rank, step in enumerate(steps):
            found.append(self._threads.submit(self._ask, rank, step, failures))
            if rank < len(steps) - 1:
                # The server keeps what comes with the request: so it has come.
                wait_for(lambda rank=rank: self._heard(rank), f"rank {rank}'s request")
        return found

    def _heard(self, rank: int) -> bool:
        try:
            heard: str = self.ranks[rank]._checkpoint_metadata(rank, timeout=_PATIENCE)
        except RuntimeError:
            return False  # nothing yet
        return heard == str(self._asked)

    def _ask(self, rank: int, step: int, failures: int) -> Any:
        return self.ranks[rank]._quorum(
            group_rank=rank,
            step=step,
            checkpoint_metadata=str(self._asked),
            shrink_only=False,
            timeout=_PATIENCE,
            init_sync=False,
            commit_failures=failures,
        )

    def vote(self, *votes: bool) -> set[bool]:
        cast = [
            self._threads.submit(self.ranks[rank].should_commit, rank, 0, vote, timeout=_PATIENCE)
            for rank, vote in enumerate(votes)
        ]
        return {future.result() for future in cast}

    def close(self) -> None:
        self._threads.shutdown()
        self.server.shutdown()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        group.close()


def together(group: Group, step: int, newcomer: list[Future[Any]]) -> Any:
    """Ask until the quorum has both: the lighthouse doesn't wait for those whom it has not heard of."""
    while True:
        (asked,) = group.ask(step)
        if len(asked.result().replica_ids) == 2:
            return asked.result(), [future.result() for future in newcomer]


def test_who_missed_a_quorum_of_a_new_lighthouse_meets_where_the_others_do(groups: list[Group]) -> None:
    with lighthouse() as port:
        groups.append(a := Group("a", 1, port))
        a.ask(0)[0].result()
        groups.append(b := Group("b", 1, port))
        first, (same,) = together(a, 0, b.ask(0))
        assert first.quorum_id == same.quorum_id
    with lighthouse(port):
        a.ask(5)[0].result()  # alone: nobody else has found the new one yet
        now, (same,) = together(a, 6, b.ask(5))
        assert same.heal
        assert now.quorum_id == same.quorum_id != first.quorum_id


def test_a_group_that_missed_a_step_makes_nobody_else_miss_the_next(groups: list[Group]) -> None:
    with lighthouse() as port:
        groups.append(a := Group("a", 1, port))
        a.ask(0)[0].result()
        groups.append(b := Group("b", 1, port))
        together(a, 0, b.ask(0))
        groups.append(c := Group("c", 1, port))
        (late,) = c.ask(0)
        wait_for(lambda: c._heard(0), "its request")
        time.sleep(0.3)  # the others' step, in which it waits
        (first,) = b.ask(1)
        assert not wait([first], timeout=0.3).done, "a has not asked"
        (last,) = a.ask(1)
        assert [len(asked.result().replica_ids) for asked in (late, first, last)] == [3, 3, 3]


def test_a_group_of_which_one_rank_did_not_get_its_state_heals_again(groups: list[Group]) -> None:
    with lighthouse() as port:
        groups.append(source := Group("source", 1, port))
        source.ask(5)[0].result()
        groups.append(healing := Group("healing", 2, port))
        _, told = together(source, 5, healing.ask(0, 0))
        assert [result.heal for result in told] == [True, True]
        assert healing.vote(False, True) == {False}
        # The second rank has step 5 now, the first, whose transfer broke, what it had.
        _, told = together(source, 5, healing.ask(0, 5, failures=1))
        assert [(result.heal, result.max_step) for result in told] == [(True, 5)] * 2
        assert healing.vote(True, True) == {True}
        _, told = together(source, 6, healing.ask(6, 6))
        assert [result.heal for result in told] == [False, False]


def test_a_group_whose_ranks_may_differ_does_not_go_on_alone(groups: list[Group]) -> None:
    with lighthouse() as port:
        groups.append(source := Group("source", 1, port))
        source.ask(5)[0].result()
        groups.append(healing := Group("healing", 2, port))
        together(source, 5, healing.ask(0, 0))
        assert healing.vote(False, True) == {False}
    with lighthouse(port):  # which has not heard of the other one, as if that had died
        for asked in healing.ask(0, 5, failures=1):
            with pytest.raises(RuntimeError, match="has to start anew"):
                asked.result()


def test_a_member_that_dies_before_the_others_have_met_it_is_not_waited_for_as_long_as_an_all_reduce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from torch.distributed import DistError, TCPStore
    from torchft.process_group import ProcessGroupGloo

    class Gloo(ProcessGroupGloo):  # type: ignore[misc]
        pass

    meet_in_bounded_time(Gloo)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    group = Gloo(timeout=timedelta(hours=1))
    with monkeypatch.context() as soon:
        soon.setattr(torchft_backend, "MEETING_S", 0.2)
        for where in (f"{store.port}/with-somebody-dead", f"{nobody}/whose-store-died-with-it"):
            with pytest.raises(DistError):
                group.configure(f"127.0.0.1:{where}", "a", 0, 2)
    group.configure(f"127.0.0.1:{store.port}/next", "a", 0, 1)
    connected = group.parent._get_backend(torch.device("cpu"))
    assert connected.options._timeout == timedelta(hours=1), "an all-reduce may take as long as it may"


LEADER = """
import signal, sys
from datetime import timedelta
from everstep.torchft.server import load_extension

torchft, patience = load_extension(), timedelta(seconds=60)
manager = torchft.ManagerServer(
    "group", f"http://127.0.0.1:{sys.argv[1]}", "localhost", "[::]:0", "nowhere", 2, patience, patience, 0
)
print(manager.address(), flush=True)
signal.pause()
"""


def test_a_rank_whose_leader_died_with_the_groups_manager_fails_with_an_echo() -> None:
    from torchft._torchft import ManagerClient

    backend = TorchftBackend(TorchftConfig())
    with lighthouse() as port:
        leader = subprocess.Popen(
            [sys.executable, "-c", LEADER, str(port)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert leader.stdout is not None
            rank = ManagerClient(leader.stdout.readline().strip(), connect_timeout=_PATIENCE)
            with ThreadPoolExecutor(1) as thread:
                vote = thread.submit(rank.should_commit, 1, 0, True, timeout=_PATIENCE)
                leader.kill()
                errors = [vote.exception()]
            for _ in range(2):
                with pytest.raises((RuntimeError, TimeoutError)) as told:
                    rank.should_commit(1, 0, True, timeout=_PATIENCE)
                errors.append(told.value)
        finally:
            leader.kill()
            leader.communicate()
    assert [error is not None and backend.is_peer_failure(error) for error in errors] == [True] * 3, errors
    assert not backend.is_peer_failure(RuntimeError("transport error in my own code"))
