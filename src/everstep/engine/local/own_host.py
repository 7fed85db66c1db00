"""The one host of a run on this machine, where the user has set up no other.

The machine is there whether an agent runs on it or not: it is offered as capacity, and its agent is started
when it is reserved. So a start that fails is a reservation that failed, which the controller tries again.
Before another agent starts, the ones before it are proven gone with all that ran under them: processors and
accelerators are never used twice.

A driver that was replaced ends nothing and starts nothing here. Each leaves a file with the number of its
lease before it does anything else; one that finds a higher number than its own has been replaced.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from pathlib import Path

from everstep.engine.local.cluster import LocalCluster, room_in_runtime_folder
from everstep.errors import EverstepError
from everstep.topology.slices import HostId, HostView, SliceName
from everstep.wording import named

_OPENED = re.compile(r"opened-(?P<journal>\w*)-(?P<lease>[0-9]+)")


class OwnHost:
    """``host`` and ``slice`` are those of the agent that runs, or of the next one. ``journal`` and ``lease``
    are those by which the driver has the run.
    """

    def __init__(self, cluster: LocalCluster, journal: str, lease: int) -> None:
        self._cluster = cluster
        self._journal = journal
        self._lease = lease
        with room_in_runtime_folder():
            cluster.folder.mkdir(mode=0o700, exist_ok=True)
            (cluster.folder / f"opened-{journal}-{lease}").touch()
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

    def _is_replaced(self) -> bool:
        """Another driver has opened the run since. Leases of a journal that was removed say nothing."""
        names = [entry.name for entry in os.scandir(self.folder)] if self.folder.exists() else []
        found = [opened for name in names if (opened := _OPENED.fullmatch(name))]
        return any(it["journal"] == self._journal and int(it["lease"]) > self._lease for it in found)

    def _check_owner(self) -> None:
        if self._is_replaced():
            raise EverstepError("another driver has taken the run over")

    def _start(self) -> None:
        with self._one_at_a_time:
            if self._closed:
                raise EverstepError("the run is over")
            for host, facts in self._cluster.hosts.items():
                self._check_owner()
                if not self._cluster.end_host(host):
                    raise EverstepError(
                        f"{host} (agent pid {facts.pid}) doesn't answer, and its processes can't be ended",
                        "see what they wait for: nothing is started beside them",
                    )
            self._check_owner()
            if left := self._cluster.end_strays():
                raise EverstepError(
                    f"processes of this run ({named('pid', left)}) can't be ended",
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
        self._close()
        with self._one_at_a_time:
            self._close()

    def _close(self) -> None:
        if not self._is_replaced():
            self._cluster.close()
