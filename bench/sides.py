"""A driver process of one side, from its start until nothing of it is left."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import psutil  # type: ignore[import-untyped]

Side = Literal["everstep", "ray"]
Found = TypeVar("Found")

_MARK = "EVERSTEP_BENCH_MARK"
_POLL_S = 0.02
_LEAVE_S = 10.0

WAIT_S = {"everstep": 120.0, "ray": 300.0}
"""How long anything that is waited for may take."""

_ENVIRONMENT = {
    "everstep": {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
    "ray": {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Over loopback, like Everstep on one machine.
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}),
    },
}


class BenchError(RuntimeError):
    """A side did not do what is measured."""


class Drive:
    """A run of one side, in a process of its own.

    Args:
        side: Whose.
        loop: The training function, ``module:name`` in this package.
        config: What it is called with, besides ``folder``.
        workers: On how many workers.
        torch: Whether they are a torch process group.
        nodes: Of a Ray cluster with room for the workers and no more; 0: this machine alone.
        elastic: Half of the workers are enough.
        torchft: Whether each is a replica group over torchft.
        framework: ``torch`` or ``jax``, where ``torch`` is true.
        gpu: Whether each has one.
        every_s: Seconds between snapshots of the state; 0: one with every report; None: there are none.
    """

    def __init__(
        self,
        side: Side,
        loop: str,
        config: dict[str, Any],
        workers: int,
        torch: bool = True,
        nodes: int = 0,
        elastic: bool = False,
        torchft: bool = False,
        framework: str = "torch",
        gpu: bool = False,
        every_s: float | None = 0.0,
    ) -> None:
        self.side = side
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        self._ray_folder = tempfile.mkdtemp(prefix="eb-")  # a short path: Ray's sockets lie deep in it
        self._mark = secrets.token_hex(8)
        self.left_over = 0
        order = {
            "side": side,
            "loop": loop,
            "folder": str(self.folder),
            "ray_folder": self._ray_folder,
            "workers": workers,
            "torch": torch,
            "nodes": nodes,
            "elastic": elastic,
            "torchft": torchft,
            "framework": framework,
            "gpu": gpu,
            "every_s": every_s,
            "config": {**config, "folder": str(self.folder)},
        }
        with (self.folder / "driver.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.drive", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT[side], "EVERSTEP_BENCH_SIDE": side, _MARK: self._mark},
                cwd=Path(__file__).parent.parent,
                start_new_session=True,
            )

    def __enter__(self) -> Drive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.left_over = self._end_leftovers()
        if os.environ.get("EVERSTEP_BENCH_KEEP"):
            print(f"bench: kept {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self._ray_folder, ignore_errors=True)

    def wait_for(self, look: Callable[[], Found | None], what: str) -> Found:
        """Look again and again until there is something. Raises if the driver ends before, or in the end."""
        deadline = time.monotonic() + WAIT_S[self.side]
        while True:
            over = self._process.poll() is not None
            found = look()
            if found is not None:
                return found
            if over or time.monotonic() > deadline:
                how = (
                    f"ended with code {self._process.returncode}"
                    if over
                    else f"took over {WAIT_S[self.side]:g} s"
                )
                raise BenchError(f"{self.side}: {what}: the driver {how}\n{self._log_tail()}")
            time.sleep(_POLL_S)

    def outcome(self) -> dict[str, Any]:
        """What ``fit()`` came to, once it has returned and the driver has exited."""
        self.wait_for(lambda: self._process.poll() is not None or None, "fit()")
        path = self.folder / "outcome.json"
        if self._process.returncode or not path.exists():
            raise BenchError(f"{self.side}: exit code {self._process.returncode}\n{self._log_tail()}")
        outcome: dict[str, Any] = json.loads(path.read_bytes())
        return outcome

    def _log_tail(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")[-4000:]

    def _end_leftovers(self) -> int:
        """End what is still there a while after its driver has gone, and say how many that were."""
        deadline = time.monotonic() + _LEAVE_S
        while self._ours() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = self._ours()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass  # just now, by itself
        psutil.wait_procs(left, timeout=_LEAVE_S)
        return len(left)

    def _ours(self) -> list[psutil.Process]:
        """Every process that inherited this drive's mark, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # somebody else's, or gone
        return found
