"""Collectives of the control plane: every rank of a replica group asks, and all are answered once the last
has.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.agent import wire


class Meeting:
    """Barriers and broadcasts of one group. A rank says which of its collectives this is; all ranks' n-th are
    one.
    """

    def __init__(self, tell: Callable[[int, list[int], wire.AnyToWorker], None]) -> None:
        self._tell = tell
        self._ranks: set[int] = set()
        self._epoch = 0
        self._over = 0
        self._waiting: dict[int, dict[int, wire.Ask]] = {}

    def restart(self, ranks: set[int], epoch: int, over: int = 0) -> None:
        """A new group; or one that an earlier driver has seen through ``over`` collectives."""
        self._ranks, self._epoch, self._over = ranks, epoch, over
        self._waiting.clear()

    def unanswered(self, rank: int) -> set[int]:
        """The numbers of this rank's questions that are still to be answered."""
        return {asked[rank].seq for asked in self._waiting.values() if rank in asked}

    def ask(self, rank: int, ask: wire.Ask) -> None:
        if ask.turn <= self._over:
            return  # answered already; it is told again because the driver that did so died
        here = self._waiting.setdefault(ask.turn, {})
        here[rank] = ask
        kinds = {a.what for a in here.values()}
        if len(kinds) > 1:
            error = f"ranks called different collectives at the same time: {', '.join(sorted(kinds))}"
            self._answer(ask.turn, b"", error)
        elif here.keys() >= self._ranks:
            self._answer(ask.turn, here[min(self._ranks)].body if ask.what == "broadcast" else b"", "")

    def _answer(self, turn: int, body: bytes, error: str) -> None:
        self._over = max(self._over, turn)
        for rank, ask in self._waiting.pop(turn).items():
            self._tell(self._epoch, [rank], wire.Answer(ask.seq, body, error))
