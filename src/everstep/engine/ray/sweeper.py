"""The one that cleans up after a run whose driver died and never came back.

One detached actor a run, made before anything is reserved. It needs no CPU, and Ray starts it again when its
node dies. Once no driver has been heard of for the run's orphan time-out, it removes every actor and every
placement group of the run, and then itself.
"""

from __future__ import annotations

import os
import threading
import time

from everstep.engine.ray import cluster

_LOOK_S = 1.0


class Sweeper:
    def __init__(self, tag: str, orphan_s: float) -> None:
        self._tag = tag
        self._orphan_s = orphan_s
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def hear(self, orphan_s: float) -> None:
        """A driver of the run lives."""
        self._orphan_s = orphan_s
        self._heard = time.monotonic()

    def pid(self) -> int:
        return os.getpid()

    def _watch(self) -> None:
        while time.monotonic() - self._heard < self._orphan_s:
            time.sleep(min(_LOOK_S, self._orphan_s / 4))
        me = name_of(self._tag)
        while not cluster.sweep(self._tag, but=me):
            time.sleep(_LOOK_S)
        cluster.kill(me)


def name_of(tag: str) -> str:
    return f"{tag}sweeper"
