"""An API server that refuses, forgets, loses answers and cuts watches: the operator gets to the same end."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from everstep.kube import informer
from everstep.kube.api import WatchExpired
from everstep.testing.kube import ApiServer
from kube.live import MERGE, Namespace, OperatorProcess, operating, running
from kube.proxy import Proxy, Request
from kube.test_slices import cluster
from kube.world import group


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


def status(code: int, reason: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": f"the storm: {reason}",
        "reason": reason,
        "code": code,
    }


def refusal(code: int, reason: str) -> web.Response:
    return web.json_response(status(code, reason), status=code)


class Storm(Proxy):
    """Spoils one request in three, of all but the lease's, while it blows."""

    def __init__(self, server: ApiServer, folder: Path, seed: int) -> None:
        super().__init__(server, folder)
        self._random = random.Random(seed)
        self.blows = True
        self.spoilt = 0

    async def answer(self, raw: web.Request, request: Request) -> web.StreamResponse:
        if not self.blows or "/leases" in request.path or self._random.random() > 1 / 3:
            return await self.pass_on(raw)
        self.spoilt += 1
        if request.watching:
            return await self._cut(raw, request)
        match self._random.randrange(4):
            case 0:
                return refusal(409, "Conflict")
            case 1:
                return refusal(429, "TooManyRequests")
            case 2:
                return refusal(500, "InternalError")
            case _:
                # It is done, and nobody hears of it.
                async with self.ask(raw) as answered:
                    await answered.read()
                assert raw.transport is not None
                raw.transport.abort()
                return web.Response()

    async def _cut(self, raw: web.Request, request: Request) -> web.StreamResponse:
        """At once: after nothing, in the middle of a line, or with word that it can't go on from there."""
        back = web.StreamResponse(headers={"Content-Type": "application/json"})
        await back.prepare(raw)
        gone = json.dumps({"type": "ERROR", "object": status(410, "Expired")}).encode() + b"\n"
        await back.write(self._random.choice((b"", gone[:20], gone)))
        return back


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_conflicts_lost_answers_and_cut_watches_changes_nothing_in_the_end(
    space: Namespace, tmp_path: Path, seed: int
) -> None:
    wanted = [(index, host) for index in range(3) for host in range(2)]
    with (
        Storm(space.server, tmp_path, seed).serving() as storm,
        running(storm.kubeconfig, tmp_path, "--namespace", space.name) as operator,
    ):
        space.create(cluster(group("a", 3, 2), group("b", 1, 1)))
        for broken in range(3):
            space.see(lambda: space.places("a") == wanted, "three slices", kubelet=True)
            gone = space.uids(group="a", index=broken)
            space.delete_pod(space.workers(group="a", index=broken)[0])
            space.see(lambda gone=gone: not gone & space.uids(), "it to leave", kubelet=True)  # type: ignore[misc]
        space.patch_group(0, replicas=2)
        space.patch_group(0, replicas=3)
        assert storm.spoilt > 10
        storm.blows = False

        def is_whole() -> bool:
            """One head, and each slice of one making."""
            made = {p["metadata"]["labels"]["ray.io/worker-group-replica-name"] for p in space.workers()}
            there = space.places("a") == wanted and space.places("b") == [(0, 0)] and len(made) == 4
            return there and len(space.pods(group="headgroup")) == 1

        space.see(is_whole, "all", kubelet=True)
        space.run(*space.pods())
        space.see(lambda: space.status().get("slices") == "4/4", "the status to say so", kubelet=True)
        assert is_whole()
        assert not operator.said("this is a bug")


class Impatient(Proxy):
    """Its pages are short, and there is never a second one: the server has forgotten what it was about."""

    def path_of(self, raw: web.Request) -> str:
        return raw.path_qs.replace("limit=500", "limit=2")

    async def answer(self, raw: web.Request, request: Request) -> web.StreamResponse:
        if "continue" in raw.query:
            return refusal(410, "Expired")
        return await self.pass_on(raw)


def test_a_list_that_expires_between_its_pages_is_asked_for_whole(space: Namespace, tmp_path: Path) -> None:
    with operating(space.server, tmp_path, "--namespace", space.name):
        space.create(cluster(group(replicas=2, hosts=3)))
        space.see(lambda: len(space.workers()) == 6, "two slices")
    kept = space.uids(index=0)
    with (
        Impatient(space.server, tmp_path).serving() as proxy,
        running(proxy.kubeconfig, tmp_path, "--namespace", space.name),
    ):
        gone = space.uids(index=1)
        space.delete_pod(space.workers(index=1)[0])
        space.see(lambda: space.anew(6, gone), "a heal", kubelet=True)
        assert space.uids(index=0) == kept, "whoever sees half of the Pods replaces the other half"


def test_a_server_that_forgets_at_once_is_not_asked_ever_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class Forgetful:
        async def list(self, path: str, selector: str = "") -> tuple[list[Any], str]:
            return [], "1"

        async def watch(self, path: str, version: str, selector: str = "") -> AsyncIterator[Any]:
            raise WatchExpired("too old resource version")
            yield

    async def rest(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            raise asyncio.CancelledError

    def listed(namespace: str | None, items: Iterable[Any], version: int) -> set[Any]:
        return set()

    monkeypatch.setattr(informer.asyncio, "sleep", rest)
    follower = informer.Informer(
        Forgetful(), "/pods", "", None, listed, lambda _: None, lambda _: None, lambda _: None
    )  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follower.run())
    assert pauses == sorted(pauses)
    assert pauses[-1] > 5


def test_an_event_that_the_server_has_forgotten_is_written_anew(space: Namespace, tmp_path: Path) -> None:
    """It keeps them for an hour; troubles last longer."""
    hard = {"pods": "0"}
    space.create(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"}, "spec": {"hard": hard}}
    )
    path = f"/api/v1/namespaces/{space.name}/resourcequotas/pods/status"
    space.server.request("PATCH", path, {"status": {"hard": hard, "used": {"pods": "0"}}}, MERGE)

    def counts() -> list[int]:
        events = space.get("events")["items"]
        return [event["count"] for event in events if "the head is refused" in event["message"]]

    with operating(space.server, tmp_path, "--namespace", space.name):
        space.create(cluster(group(replicas=0)))
        space.see(lambda: [count for count in counts() if count >= 2], "some retries")
        space.server.request("DELETE", f"/api/v1/namespaces/{space.name}/events")
        space.see(lambda: counts(), "the next retry to be told")
        assert len(counts()) == 1


def test_pods_that_a_finalizer_holds_are_replaced_elsewhere_and_let_go(
    space: Namespace, tmp_path: Path
) -> None:
    held = group(replicas=2, hosts=2)
    held["template"]["metadata"] = {"finalizers": ["example.com/hold"]}
    held["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    with operating(space.server, tmp_path, "--namespace", space.name):
        space.create(cluster(held))
        space.see(lambda: len(space.workers()) == 4, "two slices")
        space.run(*space.pods())
        space.see(lambda: space.status().get("slices") == "2/2", "both ready")
        gone, kept = space.uids(index=0), space.uids(index=1)
        space.say(space.workers(index=0)[0], phase="Failed")
        space.see(lambda: space.places() == [(1, 0), (1, 1), (2, 0), (2, 1)], "another slice", kubelet=True)
        assert kept < space.uids()
        for pod in space.get("pods")["items"]:
            if pod["metadata"]["uid"] in gone:
                path = f"/api/v1/namespaces/{space.name}/pods/{pod['metadata']['name']}"
                space.server.request("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)
        space.run(*space.pods())
        space.see(lambda: space.status().get("slices") == "2/2", "the status to say so", kubelet=True)
        assert space.places() == [(1, 0), (1, 1), (2, 0), (2, 1)], "nothing comes back under the old index"


class Slow(Proxy):
    """Holds what the test names until it lets go."""

    def __init__(self, server: ApiServer, folder: Path, held: Callable[[Request], bool]) -> None:
        super().__init__(server, folder)
        self._held = held
        self.holding = 0
        self.most = 0
        self.open = threading.Event()

    async def answer(self, raw: web.Request, request: Request) -> web.StreamResponse:
        if self._held(request) and not self.open.is_set():
            self.holding += 1
            self.most = max(self.most, self.holding)
            await asyncio.to_thread(self.open.wait)
            self.holding -= 1
        return await self.pass_on(raw)


def test_deletions_that_hang_in_one_cluster_hold_up_no_other(space: Namespace, tmp_path: Path) -> None:
    """As behind an admission webhook that doesn't answer, for more Pods than are deleted at once."""

    def is_of_a(request: Request) -> bool:
        return request.method == "DELETE" and "/pods/a-" in request.path

    with (
        Slow(space.server, tmp_path, is_of_a).serving() as slow,
        running(slow.kubeconfig, tmp_path, "--namespace", space.name),
    ):
        space.create(cluster(group(replicas=20, hosts=2), name="a"))
        space.create(cluster(group(replicas=1, hosts=2), name="b"))
        space.see(lambda: len(space.workers()) == 42, "both")
        try:
            space.patch({"spec": {"suspend": True}}, "a")
            space.see(lambda: slow.holding >= 16, "a to hang")
            gone = space.uids(**{"ray.io/cluster": "b"})
            space.delete_pod(space.workers(**{"ray.io/cluster": "b"})[0])
            space.see(
                lambda: len(now := space.uids(**{"ray.io/cluster": "b"})) == 2 and not gone & now, "b to heal"
            )
            assert slow.holding >= 16
        finally:
            slow.open.set()


def test_a_slice_of_many_hosts_is_asked_for_some_at_a_time(space: Namespace, tmp_path: Path) -> None:
    """All at once, those at the end of a queue of thousands would run out of time, again and again."""

    def is_worker(request: Request) -> bool:
        return request.method == "POST" and "worker" in str(
            (request.body or {}).get("metadata", {}).get("name")
        )

    with (
        Slow(space.server, tmp_path, is_worker).serving() as slow,
        running(slow.kubeconfig, tmp_path, "--namespace", space.name),
    ):
        try:
            space.create(cluster(group(replicas=1, hosts=40)))
            space.see(lambda: slow.holding >= 16, "the first of them")
        finally:
            slow.open.set()
        space.see(lambda: len(space.workers()) == 40, "all of them")
        assert slow.most == 16


def test_operators_that_start_together_make_one_cluster(space: Namespace, tmp_path: Path) -> None:
    arguments = ("--namespace", space.name)
    operators = [
        OperatorProcess(space.server.kubeconfig, *arguments, log=tmp_path / f"{number}.log").start()
        for number in range(3)
    ]
    try:
        space.create(cluster(group(replicas=2, hosts=2)))
        space.see(lambda: space.places() == [(0, 0), (0, 1), (1, 0), (1, 1)], "two slices")
        leading = [operator for operator in operators if operator.said("holding the lease")]
        assert len(leading) == 1
        for operator in operators:
            if operator not in leading:
                operator.hear("waiting for the lease")
        # Somebody deletes the lease: whoever has it then works, and there is one of them.
        space.server.request("DELETE", space.lease_path)
        gone, kept = space.uids(index=1), space.uids(index=0)
        space.delete_pod(space.workers(index=1)[0])
        space.see(lambda: space.anew(4, gone) and kept < space.uids(), "a heal")
        # The old holder heals until it must renew: by then somebody has made a new lease.
        space.see(space.lease_holder, "a lease that is held again")
    finally:
        for operator in operators:
            operator.stop()


class Mute(Proxy):
    """Watches go silent, as over a connection whose other end is gone without a word."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        super().__init__(server, folder)
        self.silent = False

    async def answer(self, raw: web.Request, request: Request) -> web.StreamResponse:
        if not request.watching:
            return await self.pass_on(raw)
        back = web.StreamResponse(headers={"Content-Type": "application/json"})
        await back.prepare(raw)
        muted = False
        async with self.ask(raw) as answer:
            async for line in answer.content:
                muted = muted or self.silent
                if not muted:
                    await back.write(line)
        if muted:
            await asyncio.Event().wait()
        return back


@pytest.mark.soak
def test_a_watch_that_has_gone_silent_is_given_up(space: Namespace, tmp_path: Path) -> None:
    with (
        Mute(space.server, tmp_path).serving() as proxy,
        running(proxy.kubeconfig, tmp_path, "--namespace", space.name) as operator,
    ):
        space.create(cluster(group(replicas=1, hosts=2)))
        space.see(lambda: len(space.workers()) == 2, "a slice")
        proxy.silent = True
        gone = space.uids()
        space.delete_pod(space.workers()[0])
        operator.hear("the API server doesn't answer")
        proxy.silent = False
        space.see(lambda: space.anew(2, gone), "a heal", kubelet=True)
