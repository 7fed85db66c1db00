"""The one host of a run on this machine, where the user has set up no other.

The machine is there whether an agent runs on it or not: it is offered as capacity, and its agent is started
when it is reserved. So a start that fails is a reservation that failed, which the controller tries again.
Before another agent starts, the ones before it are proven gone with all that ran under them: processors and
accelerators are never used twice.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from everstep.engine.local.cluster import LocalCluster
from everstep.errors import EverstepError
from everstep.topology.slices import HostId, HostView, SliceName


class OwnHost:
    """``host`` and ``slice`` are those of the agent that runs, or of the next one."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.starting: HostId = ""
        """The host whose agent is being started."""
        self.slice: SliceName = ""
        self.host: HostId = ""
        self._vacant = False
        self._closed = False
        self._one_at_a_time = threading.Lock()

    @property
    def folder(self) -> Path:
        return self._cluster.folder

    def vacancy(self, slots: int) -> HostView:
        """The machine, as a host that nobody has."""
        if not self.starting and not self._vacant:
            self.slice = self._cluster.next_slice()
            self.host = self._cluster.host_name(self.slice, 0)
            self._vacant = True
        return HostView(self.host, self.slice, 0, slots, 1, True, True)

    def is_vacant(self, slices: tuple[SliceName, ...]) -> bool:
        return self._vacant and self.slice in slices

    def begin(self) -> None:
        """It is nobody else's from here on: ``start`` follows."""
        self.starting, self._vacant = self.host, False

    async def start(self) -> None:
        """Start its agent, once nothing of an earlier one is left. ``started`` follows."""
        await asyncio.get_running_loop().run_in_executor(None, self._start)

    def started(self, *, failed: bool) -> None:
        """Its agent is known by now. If it could not be started, the same place is to be had again."""
        self.starting, self._vacant = "", failed

    def _start(self) -> None:
        with self._one_at_a_time:
            if self._closed:
                raise EverstepError("the run is over")
            for host, facts in self._cluster.hosts.items():
                if not self._cluster.end_host(host):
                    raise EverstepError(
                        f"{host} (agent pid {facts.pid}) doesn't answer, and its processes can't be ended",
                        "see what they wait for: nothing is started beside them",
                    )
            try:
                self._cluster.add_slice(self.slice)
            except BaseException:
                self._cluster.remove_slice(self.slice)
                raise

    def close(self) -> None:
        """End the host, also one that is being started."""
        self._closed = True
        self._cluster.close()
        with self._one_at_a_time:
            self._cluster.close()
