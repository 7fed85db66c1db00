"""Checkpoints, as the controller learns of them: the newest of a crew is reported when it matters, and one
is made out of turn when the controller asks for it.

Those that are made in turn are only counted, in ``training``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep.control.commands import AskReason
from everstep.control.events import Event, Reported
from everstep.forecast.crews import Crew, Crews
from everstep.forecast.pieces import PiecewiseLedger
from everstep.forecast.training import Cadence, Stretch
from everstep.saved.reports import Part
from everstep.sim.time import VirtualTime


class CrewCheckpoints:
    def __init__(
        self,
        cadence: Cadence,
        on_demand: bool,
        crews: Crews,
        ledger: PiecewiseLedger,
        clock: VirtualTime,
        emit: Callable[[Event], None],
    ) -> None:
        self._cadence = cadence
        self._every_step = Cadence(cadence.step_s, cadence.step_s, cadence.cost_s)
        self._on_demand = on_demand
        self._crews = crews
        self._ledger = ledger
        self._clock = clock
        self._emit = emit
        self._asked = AskReason.NONE

    def report(self, crew: Crew) -> None:
        """Tell the controller of the crew's newest checkpoint, unless it knows."""
        stretch = crew.stretch
        if stretch is None:
            return
        stretch.catch_up(self._clock.now, self._ledger)
        if not stretch.unreported:
            return
        stretch.unreported = False
        epoch, group, generation = self._crews.places.incarnation(crew.group)
        folder = f"e{epoch}-g{group}.{generation}-k{stretch.saved}"
        # The rank with the only part comes last: by then the controller waits for no other rank.
        for place in reversed(self._crews.places.assignments(group)):
            parts = (Part(stretch.saved, folder, held=True),) if place.group_rank == 0 else ()
            self._emit(
                Reported(
                    at=self._clock.now,
                    epoch=epoch,
                    generation=generation,
                    rank=place.rank,
                    upto=stretch.saved,
                    parts=parts,
                )
            )

    def ask(self, reason: AskReason) -> None:
        self._asked = reason
        now = self._clock.now
        for crew in self._crews:
            stretch = crew.stretch
            if stretch is None:
                continue
            if reason is AskReason.NONE:
                if stretch.cadence is not self._cadence:
                    stretch.change_cadence(self._cadence, now, self._ledger)
            elif self._on_demand:
                done = stretch.save_now(now, self._ledger)
                self._clock.at(done, partial(self._saved, crew, stretch))
            else:
                stretch.catch_up(now, self._ledger)
                self._clock.at(stretch.next_checkpoint(), partial(self._saved_in_turn, crew, stretch))

    def _saved(self, crew: Crew, stretch: Stretch) -> None:
        if crew.stretch is not stretch:
            return  # it was interrupted before
        now = self._clock.now
        stretch.catch_up(now - self._cadence.cost_s, self._ledger)
        stretch.saved_until(now, self._ledger)
        if self._asked is AskReason.PREEMPTION:
            # ``should_checkpoint()`` is true until the workers leave: a loop that uses it saves every step.
            stretch.change_cadence(self._every_step, now, self._ledger)
        self.report(crew)

    def _saved_in_turn(self, crew: Crew, stretch: Stretch) -> None:
        if crew.stretch is stretch:
            self.report(crew)
