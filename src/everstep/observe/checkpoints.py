"""The checkpoints of a run: which there are, which there were, and why those are gone."""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.journal import records
from everstep.observe.decoding import decoded
from everstep.observe.lines import finite

MOST_GONE = 200
"""Of the checkpoints that are gone, so many are shown, the newest."""


class SavedCheckpoints:
    """``take`` takes one record in."""

    def __init__(self) -> None:
        self._all: dict[str, dict[str, Any]] = {}

    def take(self, record: records.AnyRecord, when: float | None) -> None:
        match record:
            case records.Committed():
                self._all[record.folder] = {
                    "folder": record.folder,
                    "when": when,
                    "attempt": record.epoch,
                    "report": record.index,
                    "metrics": finite(msgspec.to_builtins(decoded(record.metrics), str_keys=True)),
                    "at": record.external,
                    "holds": "training state" if record.state else "files",
                    "status": "kept",
                }
            case records.Validated() if record.folder in self._all:
                found = finite(msgspec.to_builtins(decoded(record.metrics), str_keys=True))
                self._all[record.folder]["metrics"] |= found
            case records.Deleted() if record.folder in self._all:
                self._all[record.folder] |= {"status": "deleted", "gone": when}
            case records.Damaged() if record.folder in self._all:
                self._all[record.folder] |= {"status": "damaged", "gone": when, "why": record.reason}
            case _:
                pass

    def as_plain(self) -> dict[str, Any]:
        kept = [each for each in self._all.values() if each["status"] != "deleted"]
        gone = [each for each in self._all.values() if each["status"] == "deleted"]
        shown = sorted([*kept, *gone[-MOST_GONE:]], key=lambda each: each["when"] or 0.0)
        return {"kept": len(kept), "deleted": len(gone), "shown": shown}
