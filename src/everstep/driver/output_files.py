"""Streams of workers that go to files of their own, as ``torchrun`` lays them out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntFlag
from pathlib import Path

from everstep.errors import ConfigError
from everstep.protocol.wire import StreamFile
from everstep.topology.placement import Assignment


class Std(IntFlag):
    """Streams, by torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True)
class StreamChoice:
    """Which streams of which workers of a host."""

    all_ranks: Std = Std.NONE
    by_local_rank: Mapping[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        return self.by_local_rank.get(local_rank, self.all_ranks)


@dataclass(frozen=True)
class OutputFiles:
    """What ``everstep run`` was asked for."""

    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    folder: str = ""
    """``--log-dir``; empty: the folder of the run's logs."""
    shown: frozenset[int] | None = None
    """The local ranks whose output is shown; None: all."""

    def shows(self, local_rank: int) -> bool:
        return self.shown is None or local_rank in self.shown

    def check(self) -> None:
        """That the folder can be written, where it is on this machine."""
        if not self.folder:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"--log-dir {self.folder} can't be written: {error.strerror}",
                "Give a folder in which you can create files, or leave it out: the files are then kept in "
                "the run's folder",
                "--log-dir",
            ) from error

    def of_run(self, name: str, run_id: str, logs: Path) -> OutputFiles:
        """In a folder of this run's own, also through take-overs."""
        return replace(self, folder=os.path.join(self.folder or logs, f"{name}_{run_id[:8]}"))

    def of(self, a: Assignment, epoch: int, generation: int) -> tuple[StreamFile | None, StreamFile | None]:
        """(of standard output, of standard error). Hosts may share a file system, so each node has a folder
        of its own, as under torchrun.
        """
        # As TORCHELASTIC_RESTART_COUNT says it, from 0.
        attempt = f"attempt_{epoch - 1}" + (f".{generation}" if generation else "")
        folder = os.path.join(f"{self.folder}-{a.node_rank}", attempt, str(a.local_rank))
        tee = self.tee.of(a.local_rank)
        kept = tee | self.redirects.of(a.local_rank)

        def file(stream: Std, name: str) -> StreamFile | None:
            return StreamFile(os.path.join(folder, name), stream in tee) if stream in kept else None

        return file(Std.OUT, "stdout.log"), file(Std.ERR, "stderr.log")
