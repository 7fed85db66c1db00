"""Messages of engine and agents, as events for the controller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from everstep.control import events as e
from everstep.driver.driven import DrivenRun
from everstep.driver.echoes import EchoesHeld
from everstep.driver.from_workers import FromWorkers
from everstep.driver.take_over import TakeOver
from everstep.driver.workers import Workers
from everstep.failures import Failure
from everstep.protocol import wire
from everstep.topology.slices import HostId, HostView, SliceName
from everstep.torchft.placement import LighthousePlacement


class Incoming:
    """The driver, as its engine sees it."""

    def __init__(
        self,
        run: DrivenRun,
        workers: Workers,
        from_workers: FromWorkers,
        lighthouse: LighthousePlacement | None,
    ) -> None:
        self._run = run
        self._workers = workers
        self._from_workers = from_workers
        self._lighthouse = lighthouse
        self.slices: dict[HostId, SliceName] = {}
        """Of each host that the engine lists."""
        self.left: TakeOver | None = None
        """While an earlier driver's agents report what they have."""
        self._obeyed: set[HostId] = set()
        """Hosts whose agents have said that they are this driver's."""
        self._given_back: set[HostId] = set()
        """Hosts that the run has let go. The copies in their memory are gone; messages about these may still
        be on the way until the hosts are prepared again.
        """
        self._said: set[str] = set()
        """What need not be said again: why workers aren't forked, on which hosts there is no memory."""
        self.echoes = EchoesHeld(run.observer)

    def on_capacity(self, hosts: tuple[HostView, ...]) -> None:
        self.slices = {host.id: host.slice for host in hosts}
        self._run.emit(e.CapacityChanged(at=self._run.clock.now(), hosts=hosts))

    def given_back(self, hosts: Iterable[HostId]) -> None:
        self._given_back.update(hosts)

    def on_reserved(self, reservation: int) -> None:
        self._run.emit(e.Reserved(at=self._run.clock.now(), reservation=reservation))

    def on_reservation_failed(self, reservation: int, reason: str) -> None:
        self._run.emit(e.ReservationFailed(at=self._run.clock.now(), reservation=reservation, reason=reason))

    def on_lost(self, host: HostId, failure: Failure) -> None:
        if self.left is not None:
            self.left.lost(host)
        self._run.emit(e.HostLost(at=self._run.clock.now(), host=host, failure=failure))

    def on_trouble(self, line: str) -> None:
        self._run.observer.say(line)

    def on_broken(self, error: BaseException) -> None:
        self._run.outcome.breaks(error)

    def on_message(self, host: HostId, message: wire.AnyFromAgent) -> None:
        if self.left is not None:
            if isinstance(message, wire.Status):
                self._check_lease(host, message.lease)
            self.left.received(host, message)
            return
        match message:
            case wire.FromWorker():
                self._from_workers.received(message)
            case wire.Spawned():
                self._from_workers.spawned(message)
            case wire.Exited():
                self._from_workers.exited(host, message)
            case wire.Uploaded():
                self._from_workers.uploaded(message)
            case wire.SlotCopied():
                if host not in self._given_back:
                    self._slot_copied(host, message)
            case wire.Quiet():
                self._run.emit(
                    e.WorkersQuiet(
                        at=self._run.clock.now(), host=host, epoch=message.epoch, vitals=tuple(message.vitals)
                    )
                )
            case wire.Examined():
                self._run.emit(
                    e.WorkersExamined(
                        at=self._run.clock.now(),
                        host=host,
                        epoch=message.epoch,
                        check=message.check,
                        found=tuple(message.found),
                    )
                )
            case wire.Gone():
                self._run.emit(
                    e.WorkersGone(
                        at=self._run.clock.now(),
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
                self.echoes.output(message)
            case wire.Noticed():
                self._workers.noticed(host, message.grace_s)
            case wire.LighthouseUp():
                if self._lighthouse is not None:
                    self._lighthouse.up(host, message.address)
            case wire.Status():
                self._check_lease(host, message.lease)
            case wire.Beat() | wire.Inventory() | wire.HandedOver():
                pass
            case _:
                assert_never(message)

    def _check_lease(self, host: HostId, lease: int) -> None:
        """An agent that was this driver's and obeys a later one: the run may have been taken over."""
        if lease == self._run.precedence:
            self._obeyed.add(host)
        elif lease > self._run.precedence and host in self._obeyed and not self._run.outcome.replaced:
            self._run.outcome.replaced = True
            self._run.spawn(self._run.find_new_owner())

    def _slot_copied(self, host: HostId, message: wire.SlotCopied) -> None:
        if message.refused:
            self._say_once(
                f"no copies of other hosts' snapshots on {host} ({message.reason}). Those of rank "
                f"{message.rank} don't survive the loss of its host. Give {host} more memory, run fewer "
                "workers on it, raise MemoryConfig.host_fraction, or set MemoryConfig(copies=0)",
                host,
            )
        if not message.reason:
            self._workers.pace.cadence.sent(message.rank, message.seconds)
        self._run.emit(
            e.SnapshotCopied(
                at=self._run.clock.now(),
                host=host,
                rank=message.rank,
                snapshot=message.at,
                failed=bool(message.reason),
            )
        )

    def _say_once(self, line: str, about: str) -> None:
        if about not in self._said:
            self._said.add(about)
            self._run.observer.say(line)

    def _host_prepared(self, host: HostId, message: wire.Prepared) -> None:
        self._given_back.discard(host)
        if not message.forks and message.why_not:
            self._say_once(
                f"{host}: {message.why_not}; workers start as fresh processes, which is slower",
                message.why_not,
            )
        self._run.emit(e.HostPrepared(at=self._run.clock.now(), host=host))

    def _host_unprepared(self, host: HostId, message: wire.Unprepared) -> None:
        now = self._run.clock.now()
        failure = Failure(message.kind, now, message.message, host=host, traceback=message.traceback)
        self._run.emit(e.HostUnprepared(at=now, host=host, failure=failure))
