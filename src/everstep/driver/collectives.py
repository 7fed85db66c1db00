"""Collectives of the control plane: every rank of a replica group asks, and all are answered once the last
has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from everstep.protocol import worker_messages
from everstep.wording import named


class Collectives:
    """Barriers and broadcasts of one group. A rank says which of its collectives this is; all ranks' n-th are
    one.
    """

    def __init__(self, send: Callable[[int, list[int], worker_messages.AnyToWorker], None]) -> None:
        self._send = send
        self._ranks: set[int] = set()
        self._returned: set[int] = set()
        self._epoch = 0
        self._over = 0
        self._broken = ""
        self._waiting: dict[int, dict[int, worker_messages.Question]] = {}

    def restart(
        self, ranks: set[int], epoch: int, over: int = 0, returned: Collection[int] = frozenset()
    ) -> None:
        """A new group; or one that an earlier driver has seen through ``over`` collectives."""
        self._ranks, self._epoch, self._over = ranks, epoch, over
        self._returned, self._broken = set(returned), ""
        self._waiting.clear()

    def returned(self, rank: int) -> None:
        """It is done, and comes to no further collective: nobody waits for it."""
        self._returned.add(rank)
        self._check_for_returned()

    def unanswered(self, rank: int) -> set[int]:
        """The numbers of this rank's questions that are still to be answered."""
        return {asked[rank].seq for asked in self._waiting.values() if rank in asked}

    def ask(self, rank: int, question: worker_messages.Question) -> None:
        if self._broken:
            self._send(self._epoch, [rank], worker_messages.Answer(question.seq, b"", self._broken))
            return
        if question.turn <= self._over:
            return  # answered already, and repeated since the driver that answered it died
        here = self._waiting.setdefault(question.turn, {})
        here[rank] = question
        kinds = {a.what for a in here.values()}
        if len(kinds) > 1:
            self._break(f"ranks called different collectives at the same time: {', '.join(sorted(kinds))}")
        elif here.keys() >= self._ranks:
            self._answer(
                question.turn, here[min(self._ranks)].body if question.what == "broadcast" else b"", ""
            )
        else:
            self._check_for_returned()

    def _check_for_returned(self) -> None:
        """Ranks that wait for one that has returned would wait for ever."""
        for turn, here in self._waiting.items():
            gone = sorted(self._returned - here.keys())
            if gone:
                what = next(iter(here.values())).what
                self._break(
                    f"{named('rank', sorted(here))} waited in a {what}, collective {turn} of this attempt, "
                    f"to which {named('rank', gone)} will not come: the training function has returned "
                    "there. Every rank must call the same collectives"
                )
                return

    def _break(self, why: str) -> None:
        """No collective of this group can be right any more: all ranks get this as an error."""
        self._broken = why
        for turn in list(self._waiting):
            self._answer(turn, b"", why)

    def _answer(self, turn: int, body: bytes, error: str) -> None:
        self._over = max(self._over, turn)
        for rank, question in self._waiting.pop(turn).items():
            self._send(self._epoch, [rank], worker_messages.Answer(question.seq, body, error))
