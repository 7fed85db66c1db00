"""One operator at a time: a ``coordination.k8s.io`` Lease, as Kubernetes' own controllers use it.

A holder that is known to be dead (a process that this one could see, and can't) is succeeded at once; any
other one has the lease's duration to renew it, by our own clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from everstep.kube.api import UNREACHABLE, Api, ApiError, said
from everstep.process import kernel

logger = logging.getLogger("everstep.kube")


_JITTER = 0.2
"""Of the time between two tries, so that operators that start together don't ask together."""


class Election(msgspec.Struct, frozen=True, kw_only=True):
    """How long a lease lasts. The defaults are those of controller-runtime."""

    lease_s: float = 15.0
    """How long the others wait after the last renewal that they saw."""
    renew_deadline_s: float = 10.0
    """A holder that couldn't renew it for this long writes nothing more. Whatever it has begun must be over
    before another one may begin.
    """
    retry_s: float = 2.0
    """Between two renewals, and between two looks of those that stand by."""

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_deadline_s > self.retry_s * (1 + _JITTER) > 0:
            raise ValueError(
                f"a lease of {self.lease_s:g} s, a renew deadline of {self.renew_deadline_s:g} s and a "
                f"retry period of {self.retry_s:g} s don't fit: the lease must be longer than the deadline, "
                f"and the deadline longer than {1 + _JITTER} retry periods"
            )

    @classmethod
    def of(
        cls, lease_s: float, renew_deadline_s: float | None = None, retry_s: float | None = None
    ) -> Election:
        """What isn't given is in proportion."""
        return cls(
            lease_s=lease_s,
            renew_deadline_s=lease_s * 2 / 3 if renew_deadline_s is None else renew_deadline_s,
            retry_s=lease_s * 2 / 15 if retry_s is None else retry_s,
        )

    @property
    def next_look_s(self) -> float:
        return self.retry_s * random.uniform(1, 1 + _JITTER)


class LeadershipLost(Exception):
    """Somebody else may be the operator now: nothing more may be written."""


class LeaseGone(Exception):
    """It isn't there any more, likely since its namespace is being deleted. It may be had again, or not."""


class LeaderLease:
    def __init__(self, api: Api, namespace: str, name: str, election: Election) -> None:
        self._api = api
        self.namespace = namespace
        self._name = name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._election = election
        self._identity = identity()
        self._held: dict[str, Any] | None = None
        self._renewed = 0.0
        self._was_held = False
        self.ours = asyncio.Event()
        """Whether what it guards may be written. Its keeper sets it once all is known that others did."""
        self.standing_by = False
        """Whether another operator holds it, as far as is known."""

    @property
    def valid(self) -> bool:
        """With a margin: what is begun under it must be over before another holder begins."""
        return self._held is not None and time.monotonic() < self._renewed + self._election.renew_deadline_s

    async def acquire(self) -> None:
        """Waits until it is ours."""
        seen, since, last_holder = "", 0.0, ""
        while True:
            try:
                current = await self._read()
                spec = (current or {}).get("spec") or {}
                mark = f"{spec.get('holderIdentity')} {spec.get('renewTime')} {spec.get('leaseTransitions')}"
                if mark != seen:
                    seen, since = mark, time.monotonic()
                if self._is_free(spec, since) and await self._take(current):
                    break
                self.standing_by = True
                holder = spec.get("holderIdentity") or last_holder
                if holder != last_holder:
                    logger.info("waiting for the lease in %s, which %s holds", self.namespace, holder)
                    last_holder = holder
            except (ApiError, *UNREACHABLE) as error:
                self.standing_by = False
                if isinstance(error, ApiError) and error.status == 404:
                    raise LeaseGone(f"there is no namespace {self.namespace} for a lease: {error}") from error
                if isinstance(error, ApiError) and not error.passing and not self._was_held:
                    raise
                logger.warning("the lease in %s can't be had yet: %s", self.namespace, said(error))
            await asyncio.sleep(self._election.next_look_s)
        self.standing_by = False
        logger.info("holding the lease in %s", self.namespace)

    def _is_free(self, spec: Mapping[str, Any], unchanged_since: float) -> bool:
        holder = spec.get("holderIdentity") or ""
        if not holder or holder == self._identity or is_dead(holder):
            return True
        return time.monotonic() > unchanged_since + float(
            spec.get("leaseDurationSeconds") or self._election.lease_s
        )

    async def _take(self, current: dict[str, Any] | None) -> bool:
        try:
            await self._write(current)
        except ApiError as error:
            if error.status == 409:
                return False  # another operator was quicker
            raise
        return True

    async def keep(self) -> None:
        """Renews it, until that fails for too long."""
        while True:
            await asyncio.sleep(self._election.retry_s)
            try:
                async with asyncio.timeout(self._election.renew_deadline_s / 2):
                    await self._renew()
            except ApiError as error:
                # Forbidden may be an API server that has just started, and doesn't know its roles yet.
                if not error.passing and error.status != 403:
                    self._held = None
                    raise LeaseGone(f"the lease in {self.namespace} is gone: {error}") from error
                logger.warning("the lease in %s can't be renewed: %s", self.namespace, error)
            except UNREACHABLE as error:
                logger.warning("the lease can't be renewed: %s", said(error))
            if not self.valid:
                raise LeadershipLost(f"the lease in {self.namespace} couldn't be renewed in time")

    async def _renew(self) -> None:
        try:
            await self._write(self._held)
        except ApiError as error:
            if error.status != 409:
                raise
            # Our own renewal, whose answer was lost, looks like another operator's.
            current = await self._read()
            if current is None:
                self._held = None
                raise LeaseGone(f"the lease in {self.namespace} is gone") from error
            if (current.get("spec") or {}).get("holderIdentity") != self._identity:
                raise LeadershipLost(f"the lease in {self.namespace} was taken: {error}") from error
            await self._write(current)

    async def release(self) -> None:
        """So that the next one needn't wait."""
        if self._held is not None:
            self._held["spec"]["holderIdentity"] = ""
            try:
                await self._api.replace(f"{self._path}/{self._name}", self._held)
            except (ApiError, *UNREACHABLE):
                pass  # then it will run out
            self._held = None

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._api.get(f"{self._path}/{self._name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _write(self, current: dict[str, Any] | None) -> None:
        began = time.monotonic()
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {**((current or {}).get("spec") or {})}
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = stamp
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec.update(
            {
                "holderIdentity": self._identity,
                "renewTime": stamp,
                "leaseDurationSeconds": max(1, math.ceil(self._election.lease_s)),
            }
        )
        if current is None:
            meta = {"name": self._name, "namespace": self.namespace}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
            self._held = await self._api.create(self._path, lease)
        else:
            self._held = await self._api.replace(f"{self._path}/{self._name}", {**current, "spec": spec})
        self._renewed = began
        self._was_held = True


def identity() -> str:
    """This process: where its number means something, its number, and when it began."""
    return f"{platform.node()}_{_world()}_{os.getpid()}_{_began(os.getpid())}"


def is_dead(holder: str) -> bool:
    """Whether it is certain that the holder is no more: that can be said of processes that we could see."""
    parts = holder.rsplit("_", 3)
    if len(parts) != 4 or parts[0] != platform.node() or not _world() or parts[1] != _world():
        return False
    return parts[2].isdigit() and _began(int(parts[2])) != parts[3]


def _world() -> str:
    """This boot of this machine, and the process numbers that we share."""
    try:
        boot, processes = kernel.boot_id(), os.stat("/proc/self/ns/pid").st_ino
        return f"{boot}-{processes}" if boot else ""
    except OSError:
        return ""


def _began(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if fields[0] in "ZX" else fields[19]
