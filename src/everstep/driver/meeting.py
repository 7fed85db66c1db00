"""Collectives of the control plane: every rank asks, and all are answered once the last has."""

from __future__ import annotations

from collections.abc import Callable

from everstep.agent import wire


class Meeting:
    """Barriers and broadcasts, matched by how many each rank has called."""

    def __init__(self, tell: Callable[[int, list[int], wire.AnyToWorker], None]) -> None:
        self._tell = tell
        self._ranks: set[int] = set()
        self._epoch = 0
        self._called: dict[int, int] = {}
        self._waiting: dict[int, dict[int, wire.Ask]] = {}

    def restart(self, ranks: set[int], epoch: int) -> None:
        """A new worker group: nobody of the old one is waiting any more."""
        self._ranks, self._epoch = ranks, epoch
        self._called.clear()
        self._waiting.clear()

    def ask(self, rank: int, ask: wire.Ask) -> None:
        turn = self._called[rank] = self._called.get(rank, 0) + 1
        here = self._waiting.setdefault(turn, {})
        here[rank] = ask
        kinds = {a.what for a in here.values()}
        if len(kinds) > 1:
            error = f"ranks called different collectives at the same time: {', '.join(sorted(kinds))}"
            self._answer(turn, b"", error)
        elif here.keys() >= self._ranks:
            self._answer(turn, here[0].body if ask.what == "broadcast" else b"", "")

    def _answer(self, turn: int, body: bytes, error: str) -> None:
        for rank, ask in self._waiting.pop(turn).items():
            self._tell(self._epoch, [rank], wire.Answer(ask.seq, body, error))
