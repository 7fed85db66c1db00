"""One run as the page shows it: read from its journal, kept up to date, and plain enough for JSON."""

from __future__ import annotations

import time
from typing import Any

from everstep.failures import Failure
from everstep.observe.checkpoints import SavedCheckpoints
from everstep.observe.curves import MetricCurves
from everstep.observe.incidents import Incidents
from everstep.observe.lanes import Lanes
from everstep.observe.lines import finite
from everstep.observe.reading import Facts
from everstep.observe.texts import Texts
from everstep.storage.store import Store


class RunView:
    def __init__(self, store: Store) -> None:
        self.facts = Facts(store)
        self._lanes = Lanes()
        self._incidents = Incidents(self.facts.clock.at, self._groups_of)
        self._rows = MetricCurves()
        self._saved = SavedCheckpoints()
        self._stacks: dict[str, str] = {}

    def refresh(self) -> bool:
        """Read what was written since the last time. True if there was something."""
        news = False
        for record, when in self.facts.news():
            news = True
            self._incidents.take(record, when)  # before the lanes: they know where a host's ranks were
            self._lanes.take(record, when)
            self._rows.take(record)
            self._saved.take(record, when)
        return news

    def as_plain(self) -> dict[str, Any]:
        texts = Texts()
        incidents = self._incidents.as_plain(texts, self._stacks_at)
        found = {
            **self.summary(),
            "read": time.time(),
            "damage": self.facts.damage,
            "timeline": self._lanes.as_plain(),
            "incidents": incidents,
            "metrics": self._rows.as_plain(),
            "checkpoints": self._saved.as_plain(),
            "ledger": self._ledger(),
            "texts": texts.as_plain(),
        }
        return finite(found)  # type: ignore[no-any-return]

    def summary(self) -> dict[str, Any]:
        """What a list of runs shows."""
        facts, history = self.facts, self.facts.history
        opened = facts.opened[-1]
        newest = history.newest
        return {
            "name": opened.name,
            "address": facts.store.address(),
            "state": history.outcome or ("interrupted" if facts.is_interrupted else "running"),
            "owner": str(history.owner),
            "message": history.message if history.outcome and history.message != history.outcome else "",
            "began": facts.opened[0].wall,
            "written": facts.written,
            "ended": facts.newest,
            "workers": [opened.workers_min, opened.workers_max],
            "attempts": history.last_epoch,
            "drivers": len(facts.opened),
            "version": opened.version,
            "goodput": history.ledger.until().goodput,
            "recoveries": len(facts.recoveries),
            "reports": self._rows.count,
            "newest": newest.ref.folder if newest is not None else None,
            "budgets": [
                [budget.value, spent, facts.limits.get(budget.value)]
                for budget, spent in history.spent.items()
            ],
        }

    def _ledger(self) -> dict[str, Any]:
        ledger = self.facts.history.ledger.over_time()
        return {
            "goodput": ledger.goodput,
            "seconds": {category.value: seconds for category, seconds in ledger.total.items()},
            "badput": ledger.badput(),
            "began": ledger.began,
            "width": ledger.width,
            "slices": [
                {category.value: round(spent, 3) for category, spent in each.items()}
                for each in ledger.slices
            ],
        }

    def _groups_of(self, failure: Failure) -> set[int]:
        group_of = self._lanes.group_of
        if failure.rank is not None:
            return {group_of.get(failure.rank, 0)}
        return {group_of.get(rank, 0) for rank in self._lanes.at_host(failure.host or "")}

    def _stacks_at(self, path: str) -> str:
        """Where every rank was in a hang. A file is written once, and read once."""
        if path not in self._stacks:
            data = self.facts.store.read(path) if _is_inside(path) else None
            if data is None:
                return f"[{path} is not there, or not yet]"
            self._stacks[path] = data.decode(errors="replace")
        return self._stacks[path]


def _is_inside(path: str) -> bool:
    """A journal may come from anywhere: it can't make us show files beside its run."""
    return not path.startswith("/") and ".." not in path.split("/") and "\\" not in path
