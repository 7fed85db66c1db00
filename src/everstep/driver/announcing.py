"""A run's workers, for others: observers, other terminals, and metrics that are scraped."""

from __future__ import annotations

import os

from everstep.driver.driven import DrivenRun
from everstep.driver.workers import Workers
from everstep.journal.counters import census_of
from everstep.observe.registry import LiveRun, Registry


class Announcements:
    def __init__(self, run: DrivenRun, workers: Workers, registry: Registry) -> None:
        self._run = run
        self._workers = workers
        self._registry = registry
        self.census = census_of(run.controller, run.job.scaling.max_workers)
        """How many workers are in which state. Never changed, but replaced: any thread may look."""

    def count(self) -> None:
        """Workers may be in other states now."""
        self.census = census_of(self._run.controller, self._run.job.scaling.max_workers)

    def started(self) -> None:
        """Let other terminals find this run's processes, and say where they are."""
        self._run.observer.started(self.register())

    def register(self) -> LiveRun:
        run = self._run
        live = LiveRun(
            run.job.name, run.store.address(), os.getpid(), run.controller.epoch, self._workers.live()
        )
        try:
            self._registry.publish(live)
        except OSError as error:
            run.observer.say(f"other terminals can't find this run: {error}")
        return live

    def forget(self) -> None:
        """The run has ended."""
        self._registry.forget(self._run.job.name)
