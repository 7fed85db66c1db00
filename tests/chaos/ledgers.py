"""What must hold of the ledger of any run, at any instant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from everstep.journal.history import History
from everstep.journal.records import AnyRecord
from everstep.sim.rules import worker_seconds


def check_ledger(found: Sequence[AnyRecord]) -> None:
    charged = sum(History.of(found).ledger.until().total.values())
    assert charged == pytest.approx(worker_seconds(found), rel=1e-3), (
        "each second of a worker is in the ledger, once"
    )
