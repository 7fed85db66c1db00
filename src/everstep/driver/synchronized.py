"""Values that the ranks of a replica group see change at the same call (``everstep.worker.synchronized``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from everstep.protocol import worker_messages


class SynchronizedValues:
    """Proposes a value to every rank, receives how many calls each has made, and sends all of them the call
    from which on it holds.
    """

    def __init__(
        self, send: Callable[[int, list[int], worker_messages.AnyToWorker], None], lease: int
    ) -> None:
        self._send = send
        # Never a number that an earlier driver of these workers has used: leases are 2**32 apart, or at least
        # as far as the seconds between them.
        self._number = lease
        self._epoch = 0
        self._groups: dict[int, frozenset[int]] = {}
        self._open: dict[tuple[int, int], dict[int, int]] = {}
        """(number, group): calls by rank."""
        self._returned: set[int] = set()

    def restart(self, epoch: int, groups: Mapping[int, Iterable[int]]) -> None:
        """These ranks, by group, are the ones to ask from now on."""
        self._epoch = epoch
        self._groups = {group: frozenset(ranks) for group, ranks in groups.items()}
        self._open.clear()
        self._returned.clear()

    def replace(self, group: int, ranks: Iterable[int]) -> None:
        """Other processes have taken these ranks; what the other groups are being asked stands."""
        self._groups[group] = members = frozenset(ranks)
        self._returned -= members
        self._open = {(number, g): calls for (number, g), calls in self._open.items() if g != group}

    def propose(self, value: worker_messages.AnyValue) -> None:
        for group, members in self._groups.items():
            self._number += 1
            self._open[(self._number, group)] = {}
            self._send(
                self._epoch, sorted(members - self._returned), worker_messages.Propose(self._number, value)
            )

    def counted(self, rank: int, message: worker_messages.Counted) -> None:
        for (number, group), calls in list(self._open.items()):
            if number == message.number and rank in self._groups[group]:
                calls[rank] = message.calls
                self._check(number, group)

    def returned(self, rank: int) -> None:
        """It makes no more calls: nobody waits for it."""
        self._returned.add(rank)
        for number, group in list(self._open):
            self._check(number, group)

    def _check(self, number: int, group: int) -> None:
        calls = self._open[(number, group)]
        waiting = self._groups[group] - self._returned
        if waiting <= calls.keys():
            del self._open[(number, group)]
            agreed = worker_messages.Agree(number, max(calls.values(), default=0) + 1)
            self._send(self._epoch, sorted(waiting), agreed)
