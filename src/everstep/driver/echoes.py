"""Output of ranks about the failure of another one is shown after the line that names that one
and the cause.
"""

from __future__ import annotations

from everstep.control import commands as c
from everstep.control.table import Phase
from everstep.observe.observer import Observer
from everstep.protocol import wire


class EchoesHeld:
    """``recorded`` is called with every record, after the observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._held: list[wire.Output] = []
        self._cause_known = False

    def output(self, printed: wire.Output) -> None:
        if printed.echo and not self._cause_known:
            self._held.append(printed)
        else:
            self._observer.output(printed.rank, printed.text)

    def recorded(self, record: c.Record) -> None:
        match record:
            case c.GroupStarted() | c.PhaseChanged(phase=Phase.RUNNING):
                self._cause_known = False
            case c.PhaseChanged(phase=Phase.SETTLING):
                pass  # the cause is what is waited for
            case c.PhaseChanged() | c.RecoveryDecided():
                self.show()  # or it won't come
            case c.FailureSeen() if not record.failure.echo:
                self.show()
            case _:
                pass

    def show(self) -> None:
        self._cause_known = True
        held, self._held = self._held, []
        for printed in held:
            self._observer.output(printed.rank, printed.text)
