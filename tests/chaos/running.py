"""A run of ``attacked.py``, as often as it is started, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from everstep.errors import StorageError
from everstep.journal import journal
from everstep.journal.history import read_history
from everstep.observe.registry import live_runs
from everstep.process import kernel
from everstep.storage.restore import verify
from everstep.storage.store import Store, open_store
from processes import ours, wait_for
from storage import blocking

SCRIPT = str(Path(__file__).parent / "attacked.py")


class Attacked:
    """A run of ``attacked.py``, as often as it is started."""

    def __init__(
        self,
        folder: Path,
        storage: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self.scratch = folder / "scratch"
        self.scratch.mkdir(parents=True)
        storage = storage or {"storage_path": str(folder / "runs")}
        self.settings = {"name": "run", "scratch": str(self.scratch), **storage, **settings}
        self.run = open_store(storage["storage_path"], storage.get("storage_options")).child("run")
        self._logs = 0

    def start(self) -> subprocess.Popen[str]:
        self._logs += 1
        with (self.scratch / f"log-{self._logs}").open("w") as log:
            return subprocess.Popen(
                [sys.executable, SCRIPT, json.dumps(self.settings)],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=self._environment,
            )

    def log(self) -> str:
        return (self.scratch / f"log-{self._logs}").read_text()

    def restored(self) -> list[tuple[int, int]]:
        """(rank, step) of every start of a worker."""
        try:
            lines = (self.scratch / "restored").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines]

    def newest(self) -> int:
        """The newest step that has a manifest, which is then whole."""
        for folder in sorted(blocking.list_folders(self.run), reverse=True):
            if blocking.read_manifest(self.run, folder) is not None:
                return int(self.run.read(f"{folder}/step-0") or b"0")
        return 0

    def has_more_than(self, step: int) -> bool:
        return self.newest() > step

    def has_restored(self, workers: int) -> bool:
        return len(self.restored()) == workers

    def is_compacted_beyond(self, number: int) -> bool:
        names = [file.path for file in self.run.child(journal.FOLDER).list()]
        archived = [int(name.split("-")[1]) for name in names if name.startswith("archive-")]
        return max(archived, default=0) > number

    def enough(self) -> None:
        (self.scratch / "enough").touch()


def everything_is_whole(run: Store) -> set[str]:
    history = read_history(run)
    assert history.checkpoints
    for folder in history.checkpoints:
        try:
            verify(run.child(folder))
        except StorageError:
            assert folder in read_history(run).deleted, "only retention removes something, meanwhile, too"
    return set(history.checkpoints)


def kill_everything() -> None:
    for pid in ours():
        kernel.send_signal(pid, signal.SIGKILL)
    wait_for(lambda: not ours(), "the end of all")


def numbers(run: Store) -> list[int]:
    return [int(f.path) for f in run.child(journal.FOLDER).list() if f.path.isdigit()]


def worker_of(driver: subprocess.Popen[str]) -> int:
    live = live_runs()["run"]
    assert live.driver_pid == driver.pid
    return live.workers[0].pid
