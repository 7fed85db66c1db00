"""What an agent answers drivers that follow each other."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

from everstep.backend.base import Member, NoBackend
from everstep.driver import payload
from everstep.engine.local.cluster import socket_of
from everstep.failures import Kind
from everstep.process import kernel
from everstep.protocol import framing, wire
from everstep.storage.store import Limits
from everstep.testing import LocalCluster
from everstep.topology.placement import Assignment
from processes import LIMIT_S, alive, wait_for

PLACE = Assignment(0, "host", 0, 1, 0, 1, 1, "slice", 0, 1, 0, 1, 0, 1)
MEMBER = Member(0, 1, 0, 1, 0, 1)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[int], DriverSocket]]:
    with LocalCluster(slices=1, folder=tmp_path) as cluster:
        [host] = cluster.hosts
        yield lambda lease: DriverSocket(socket_of(tmp_path, host), lease)


class DriverSocket:
    """A driver's connection to the agent."""

    def __init__(self, path: Path, lease: int) -> None:
        self._lease = lease
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(LIMIT_S)
        self._socket.connect(str(path))
        self._frames = framing.Frames()
        self._heard: list[wire.AnyFromAgent] = []
        self.send(wire.Attach(wire.WIRE_VERSION, "run", lease, 0.0))

    def send(self, message: wire.AnyToAgent) -> None:
        self._socket.sendall(framing.frame(message))

    def claim(self) -> None:
        self.send(wire.Claim("run", self._lease, 60.0, (0, 0)))
        self.hear(lambda word: isinstance(word, wire.Status) and word.lease == self._lease)

    def prepare(self, folder: Path) -> None:
        (folder / "marker").touch()
        self.send(
            wire.Prepare(
                self._lease,
                cloudpickle.dumps((lambda: threading.Event().wait(), NoBackend())),
                payload.pickle_arguments(None, {}),
                payload.template_environment({}),
                payload.python_path({}),
                str(folder),
                [],
                60.0,
                str(folder),
                {},
                Limits(),
                "marker",
            )
        )

    def start(self, epoch: int, folder: Path) -> None:
        spec = wire.WorkerSpec(
            *("run", str(folder), epoch, 0, PLACE, MEMBER, None, ""),
            *(str(folder / f"{epoch}.log"), 0, 60.0, 60.0, 60.0, 60.0, False, False),
        )
        self.send(wire.Start(self._lease, [spec]))

    def hear(self, is_it: Callable[[wire.AnyFromAgent], bool]) -> list[wire.AnyFromAgent]:
        """All that comes up to this word."""
        heard: list[wire.AnyFromAgent] = []
        while not heard or not is_it(heard[-1]):
            while not self._heard:
                data = self._socket.recv(1 << 16)
                assert data, "the agent has closed the connection"
                self._heard += [wire.from_agent.decode(body) for body in self._frames.feed(data)]
            heard.append(self._heard.pop(0))
        return heard


Connect = Callable[[int], DriverSocket]


def status(connect: Connect) -> wire.Status:
    """What the agent answers somebody new, after all that it was told before."""
    [word] = connect(0).hear(lambda word: True)
    assert isinstance(word, wire.Status)
    return word


def is_retired(word: wire.AnyFromAgent) -> bool:
    return isinstance(word, wire.Status) and word.retired


@pytest.mark.parametrize("retires_first", [True, False])
def test_a_driver_that_was_replaced_learns_that_all_has_ended(
    connect: Callable[[int], DriverSocket], retires_first: bool
) -> None:
    old, new = connect(1), connect(2)
    old.claim()
    new.claim()
    if retires_first:
        old.send(wire.Retire(1))  # it has no say
    new.send(wire.Unclaim(2))
    new.hear(is_retired)
    if not retires_first:
        old.hear(is_retired)
        old.send(wire.Retire(1))
    old.hear(is_retired)


def test_a_later_driver_is_told_that_there_is_no_template(connect: Callable[[int], DriverSocket]) -> None:
    connect(1).claim()
    later = connect(2)
    later.claim()
    told = [type(word) for word in later.hear(lambda word: isinstance(word, wire.HandedOver))]
    assert told == [wire.Unprepared, wire.Inventory, wire.HandedOver]


# ---------------------------------------------------------------------- workers that don't end


def is_prepared(word: wire.AnyFromAgent) -> bool:
    return isinstance(word, wire.Prepared)


@pytest.fixture
def prepared(connect: Connect, tmp_path: Path) -> DriverSocket:
    driver = connect(1)
    driver.claim()
    driver.prepare(tmp_path)
    driver.hear(is_prepared)
    return driver


def template(connect: Connect) -> int:
    [(pid, _)] = kernel.children_of(status(connect).pid)
    return pid


def spawned(driver: DriverSocket) -> int:
    word = driver.hear(lambda word: isinstance(word, wire.Spawned))[-1]
    assert isinstance(word, wire.Spawned)
    return word.pid


def test_nobody_can_have_a_host_before_the_workers_of_whom_had_it_are_gone(
    prepared: DriverSocket, connect: Connect, tmp_path: Path
) -> None:
    prepared.start(1, tmp_path)
    worker, ends_them = spawned(prepared), template(connect)
    os.kill(ends_them, signal.SIGSTOP)
    prepared.send(wire.Unclaim(1))
    next_one = connect(2)
    next_one.send(wire.Claim("another run", 2, 60.0, (0, 0)))
    next_one.prepare(tmp_path)
    now = status(connect)
    assert (now.run, now.workers) == ("", 1)
    assert alive(worker)
    os.kill(ends_them, signal.SIGCONT)
    [*_, claimed] = next_one.hear(lambda word: isinstance(word, wire.Status) and bool(word.run))
    assert isinstance(claimed, wire.Status)
    assert (claimed.run, claimed.workers) == ("another run", 0)
    assert not alive(worker)
    next_one.hear(is_prepared)
    later = connect(3)
    later.send(wire.Claim("another run", 3, 60.0, (0, 0)))
    [*_, told] = later.hear(lambda word: isinstance(word, wire.Inventory))
    assert isinstance(told, wire.Inventory)
    assert told.workers == [], "of the run that had it before, nothing is told"


def test_a_worker_whose_template_is_let_go_before_it_forks_does_not_keep_the_host(
    prepared: DriverSocket, connect: Connect, tmp_path: Path
) -> None:
    forks = template(connect)
    os.kill(forks, signal.SIGSTOP)
    prepared.start(1, tmp_path)
    prepared.send(wire.Unclaim(1))
    assert status(connect).workers == 1
    os.kill(forks, signal.SIGCONT)
    prepared.hear(is_retired)


def test_workers_are_not_started_beside_those_of_an_earlier_attempt(
    prepared: DriverSocket, connect: Connect, tmp_path: Path
) -> None:
    prepared.start(1, tmp_path)
    worker = spawned(prepared)
    prepared.start(2, tmp_path)
    refused = prepared.hear(lambda word: isinstance(word, wire.Unprepared))[-1]
    why_not = f"workers of an earlier attempt (pids [{worker}]) are still there"
    assert refused == wire.Unprepared(Kind.START, f"a worker could not be started: {why_not}", "")
    assert status(connect).workers == 1


def test_a_worker_whose_end_nobody_was_left_to_tell_of_does_not_keep_the_host(
    prepared: DriverSocket, connect: Connect, tmp_path: Path
) -> None:
    prepared.start(1, tmp_path)
    worker, agent = spawned(prepared), status(connect).pid
    os.kill(agent, signal.SIGSTOP)
    prepared.send(wire.Unclaim(1))
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end, which its template sees")
    os.kill(agent, signal.SIGCONT)
    prepared.hear(is_retired)
