"""What engine and agents say, as events for the controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from everstep.control import events as e
from everstep.control.failures import Failure, Kind
from everstep.driver.clock import Clock
from everstep.driver.lighthouse import Lighthouse
from everstep.driver.observer import Observer
from everstep.driver.takeover import LeftBehind
from everstep.driver.workers import Workers
from everstep.protocol import wire
from everstep.topology.slices import HostId, HostView


class Incoming:
    """The driver, as its engine sees it."""

    def __init__(
        self,
        clock: Clock,
        emit: Callable[[e.AnyEvent], None],
        broken: Callable[[BaseException], None],
        keep_tail: Callable[[str, bytes], None],
        workers: Workers,
        observer: Observer,
        lighthouse: Lighthouse | None,
    ) -> None:
        self._clock = clock
        self._emit = emit
        self._broken = broken
        self._keep_tail = keep_tail
        self._workers = workers
        self._observer = observer
        self._lighthouse = lighthouse
        self.prepared: set[HostId] = set()
        self.left: LeftBehind | None = None
        """While an earlier driver's agents tell what they have."""
        self._said: set[str] = set()
        """Why workers aren't forked: other hosts need not say the same again."""

    def on_capacity(self, hosts: tuple[HostView, ...]) -> None:
        self._emit(e.CapacityChanged(at=self._clock.now(), hosts=hosts))

    def on_reserved(self, reservation: int) -> None:
        self._emit(e.Reserved(at=self._clock.now(), reservation=reservation))

    def on_reservation_failed(self, reservation: int, reason: str) -> None:
        self._emit(e.ReservationFailed(at=self._clock.now(), reservation=reservation, reason=reason))

    def on_lost(self, host: HostId, failure: Failure) -> None:
        self.prepared.discard(host)
        self._emit(e.HostLost(at=self._clock.now(), host=host, failure=failure))

    def on_trouble(self, line: str) -> None:
        self._observer.say(line)

    def on_broken(self, error: BaseException) -> None:
        self._broken(error)

    def on_message(self, host: HostId, message: wire.AnyFromAgent) -> None:
        if self.left is not None:
            self.left.hear(host, message)
            return
        match message:
            case wire.FromWorker():
                self._workers.heard(message)
            case wire.Spawned():
                self._workers.spawned(message)
            case wire.Exited():
                tail = self._workers.exited(host, message)
                if tail is not None:
                    self._keep_tail(*tail)
            case wire.Uploaded():
                self._workers.uploaded(message)
            case wire.Quiet():
                self._emit(
                    e.WorkersQuiet(
                        at=self._clock.now(), host=host, epoch=message.epoch, vitals=tuple(message.vitals)
                    )
                )
            case wire.Examined():
                self._emit(
                    e.WorkersExamined(
                        at=self._clock.now(),
                        host=host,
                        epoch=message.epoch,
                        look=message.look,
                        found=tuple(message.found),
                    )
                )
            case wire.Gone():
                self._emit(
                    e.WorkersGone(
                        at=self._clock.now(),
                        host=host,
                        epoch=message.epoch,
                        generation=message.generation,
                        ranks=frozenset(message.ranks),
                    )
                )
            case wire.Prepared():
                self._host_prepared(host, message)
            case wire.Unprepared():
                self._host_unprepared(host, message)
            case wire.Output():
                self._observer.output(message.rank, message.text)
            case wire.Noticed():
                self._workers.noticed(host, message.grace_s)
            case wire.LighthouseUp():
                if self._lighthouse is not None:
                    self._lighthouse.up(host, message.address)
            case wire.Status() | wire.Beat() | wire.Inventory() | wire.HandedOver():
                pass
            case _:
                assert_never(message)

    def _host_prepared(self, host: HostId, message: wire.Prepared) -> None:
        if not message.forks and message.why_not and message.why_not not in self._said:
            self._said.add(message.why_not)
            self._observer.say(
                f"{host}: {message.why_not}; workers start as fresh processes, which is slower"
            )
        self.prepared.add(host)
        self._emit(e.HostPrepared(at=self._clock.now(), host=host))

    def _host_unprepared(self, host: HostId, message: wire.Unprepared) -> None:
        kind, now = message.kind, self._clock.now()
        if kind is Kind.TEMPLATE and host not in self.prepared:
            kind = Kind.START
        self.prepared.discard(host)
        failure = Failure(kind, now, message.message, host=host, traceback=message.traceback)
        self._emit(e.HostUnprepared(at=now, host=host, failure=failure))
