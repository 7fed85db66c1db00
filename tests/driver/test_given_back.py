"""Hosts that a run gives back, and takes again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from everstep.control import events as e
from everstep.driver.incoming import Incoming
from everstep.process.clock import MachineClock
from everstep.protocol import wire
from everstep.saved.snapshots import At


def test_a_copy_is_not_counted_on_that_went_when_its_host_was_given_back() -> None:
    """What its agent said before is still on the way when the host is prepared again."""
    events: list[e.Event] = []
    run = SimpleNamespace(
        observer=SimpleNamespace(say=lambda line: None), clock=MachineClock(), emit=events.append
    )
    workers = SimpleNamespace(pace=SimpleNamespace(cadence=SimpleNamespace(sent=lambda rank, seconds: None)))
    incoming = Incoming(cast(Any, run), cast(Any, workers), cast(Any, None), None)
    copied = wire.SlotCopied(0, At(1, 1), 0.1)
    incoming.given_back(["a"])
    for host in "ab":
        incoming.on_message(host, copied)
    assert [event.host for event in events if isinstance(event, e.SnapshotCopied)] == ["b"]
    incoming.on_message("a", wire.Prepared(True, "", 0.1))
    incoming.on_message("a", copied)
    assert [event.host for event in events if isinstance(event, e.SnapshotCopied)] == ["b", "a"]
