"""torchft's lighthouse on this host: its agent, which outlives the driver, restarts it when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from everstep.backend.network import join_address
from everstep.backoff import pause_s
from everstep.process import kernel

_HEALTHY_S = 1.0
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 5.0


class LighthouseProcess:
    """Used from the agent's main thread only. ``up`` is called with its address whenever that is
    a new one.
    """

    def __init__(self, address: str, options: dict[str, int], up: Callable[[str], None]) -> None:
        self.pid = 0
        self.where = ""
        """``host:port``, once it has been up."""
        self._address = address
        self._options = options
        self._up = up
        self._port = 0
        self._failed = 0
        self._started = 0.0
        self._out: int | None = None
        self._again: asyncio.TimerHandle | None = None
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        try:
            ours, theirs = os.pipe()
        except OSError:  # no descriptors are left just now
            self.died()
            return
        self._out = ours
        try:
            self.pid = subprocess.Popen(
                [
                    sys.executable, "-m", "everstep.torchft.server",
                    self._address, str(self._port), json.dumps(self._options), str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                env={"RUST_LOG": "warn", **os.environ},  # otherwise it prints a line for every step
            ).pid  # fmt: skip
            asyncio.get_running_loop().add_reader(ours, self._read_port)
        except OSError:  # nor processes, or memory
            self.died()
        finally:
            os.close(theirs)

    def _read_port(self) -> None:
        assert self._out is not None
        port = os.read(self._out, 64).decode()
        self._close_pipe()
        if port:
            self._port = int(port)
            where = join_address(self._address, self._port)
            if where != self.where:
                self.where = where
                self._up(where)

    def _close_pipe(self) -> None:
        if self._out is not None:
            asyncio.get_running_loop().remove_reader(self._out)
            os.close(self._out)
            self._out = None

    def died(self) -> None:
        """It has ended. It comes back at the same port, so that no forwarder has to change."""
        self.pid = 0
        self._close_pipe()
        lived = time.monotonic() - self._started
        self._failed = 0 if lived > _HEALTHY_S else self._failed + 1
        if self._failed > 1:
            self._port = 0  # somebody else may have taken it meanwhile
        pause = pause_s(self._failed, _FIRST_PAUSE_S, _MAX_PAUSE_S)
        self._again = asyncio.get_running_loop().call_later(pause, self._start)

    def stop(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._close_pipe()
        if self.pid:
            kernel.send_signal(self.pid, signal.SIGKILL)
