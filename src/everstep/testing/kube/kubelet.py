"""A kubelet whose containers are processes: a whole cluster runs on one machine, and breaks on demand.

It binds Pods to nodes that don't exist, gives each an address in 127.0.0.0/8 and a home, runs their
containers with their environment, and says how they are. Names of Pods and Services become addresses where
they are handed to a process. It also does what the controller manager would about Pods whose RayCluster is
gone. There are no images, mounts, limits or namespaces of the kernel's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType

from everstep.testing.kube.pods import Pod, PodLife
from everstep.testing.kube.server import ApiServer


class ProcessKubelet:
    """``with ProcessKubelet(server) as kubelet: …``. Ends all that it starts."""

    def __init__(
        self,
        server: ApiServer,
        nodes: Sequence[str] = ("node-0", "node-1", "node-2", "node-3"),
        namespace: str | None = None,
    ) -> None:
        """``namespace``: the one whose Pods it runs; all, if there is none."""
        self._server = server
        self._namespace = namespace
        self._nodes = dict.fromkeys(nodes, True)
        self._lives: dict[str, PodLife] = {}
        self._bound: dict[str, str] = {}
        """The node of each Pod, from when it was chosen: it takes a moment until the Pod says so itself."""
        self._hanging: set[str] = set()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._turn = threading.Semaphore(1)

    def __enter__(self) -> ProcessKubelet:
        self.logs = self._server.folder / "pods"
        self.logs.mkdir(exist_ok=True)
        self._threads = [
            threading.Thread(target=self._watch, name="kubelet", daemon=True),
            threading.Thread(target=self._collect, name="garbage", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        with self._lock:
            lives = list(self._lives.values())
        for life in lives:
            life.containers.end(0.0)
        for life in lives:
            life.thread.join(20)
        with contextlib.suppress(OSError, AttributeError):
            # Not closed: that would wait for the one who reads.
            self._watching.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)

    # Faults.

    def hang(self, pod: str) -> None:
        """When it is told to leave, its processes end, and it stays in Terminating."""
        self._hanging.add(pod)

    def release(self, pod: str) -> None:
        """It may go after all."""
        self._hanging.discard(pod)
        for life in list(self._lives.values()):
            if life.name == pod and life.told_to_leave.is_set():
                life.remove()

    def fail(self, pod: str) -> None:
        """Its Ray container is killed."""
        for life in self._lives.values():
            if life.name == pod:
                life.containers.kill_first()

    def lose(self, node: str) -> None:
        """The node is gone, with its processes. Nobody says so but the node controller."""
        self._nodes[node] = False
        for life in list(self._lives.values()):
            if life.node == node:
                life.lost = True
                life.containers.end(0.0)
                unready = {"type": "Ready", "status": "False", "reason": "NodeLost"}
                life.report({"phase": "Unknown", "reason": "NodeLost", "conditions": [unready]}, force=True)
                with contextlib.suppress(urllib.error.HTTPError):
                    self._server.request("DELETE", life.path)

    def node_of(self, pod: str) -> str:
        found: str = next(life.node for life in self._lives.values() if life.name == pod)
        return found

    def pids(self, named: str = "") -> dict[str, list[int]]:
        """The processes of the containers, by Pod; of Pods whose names have this in them."""
        return {life.name: life.containers.pids() for life in self._lives.values() if named in life.name}

    # What it does by itself.

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                for pod in self._changes():
                    self._take(pod)
            except (OSError, ValueError, http.client.HTTPException):
                self._stopping.wait(0.2)

    def _changes(self) -> Iterator[Pod]:
        listed = self._server.request("GET", "/api/v1/pods")
        yield from listed["items"]
        host, _, port = self._server.url.removeprefix("https://").partition(":")
        trust = ssl.create_default_context(cafile=str(self._server.certificate))
        self._watching = http.client.HTTPSConnection(host, int(port), context=trust)
        with contextlib.closing(self._watching):
            path = f"/api/v1/pods?watch=true&resourceVersion={listed['metadata']['resourceVersion']}"
            self._watching.request("GET", path, headers={"Authorization": f"Bearer {self._server.token}"})
            for line in self._watching.getresponse():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    self._gone(event["object"])
                else:
                    yield event["object"]

    def _take(self, pod: Pod) -> None:
        if self._namespace not in (None, pod["metadata"]["namespace"]):
            return
        uid = pod["metadata"]["uid"]
        node = pod["spec"].get("nodeName")
        if not node:
            if "deletionTimestamp" not in pod["metadata"]:
                self._bind(pod)
            return
        with self._lock:
            life = self._lives.get(uid)
            if life is None and not self._stopping.is_set() and self._nodes.get(node):
                self._bound[uid] = node
                life = self._lives[uid] = PodLife(self._server, pod, self.logs, self._turn)
                life.thread.start()
        if life is not None and "deletionTimestamp" in pod["metadata"] and not life.told_to_leave.is_set():
            life.told_to_leave.set()
            if not life.lost:
                threading.Thread(target=self._end, args=(life, pod), daemon=True).start()

    def _end(self, life: PodLife, pod: Pod) -> None:
        life.containers.end(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
        if life.name not in self._hanging:
            life.remove()

    def _gone(self, pod: Pod) -> None:
        with self._lock:
            life = self._lives.pop(pod["metadata"]["uid"], None)
            self._bound.pop(pod["metadata"]["uid"], None)
        if life is not None:
            life.containers.end(0.0)

    def _bind(self, pod: Pod) -> None:
        tainted = self._tainted()
        living = [name for name, alive in self._nodes.items() if alive and name not in tainted]
        if not living:
            return
        load = Counter(self._bound.values())
        node = min(living, key=lambda name: load[name])
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/binding"
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod["metadata"]["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        with contextlib.suppress(urllib.error.HTTPError):
            self._server.request("POST", path, binding)
            self._bound[pod["metadata"]["uid"]] = node

    def _tainted(self) -> set[str]:
        """Nodes that the API server knows, and nothing new is to be put on. They need not exist there."""
        return {
            node["metadata"]["name"]
            for node in self._server.request("GET", "/api/v1/nodes")["items"]
            for taint in node["spec"].get("taints") or ()
            # Nobody is there to say that a node is ready.
            if taint["key"] != "node.kubernetes.io/not-ready" and taint["effect"] != "PreferNoSchedule"
        }

    def _collect(self) -> None:
        """Pods whose cluster is gone go, too."""
        while not self._stopping.wait(1.0):
            with contextlib.suppress(OSError):
                clusters = self._server.request("GET", "/apis/ray.io/v1/rayclusters")["items"]
                there = {cluster["metadata"]["uid"] for cluster in clusters}
                for life in list(self._lives.values()):
                    if life.owner and life.owner not in there and not life.told_to_leave.is_set():
                        with contextlib.suppress(urllib.error.HTTPError):
                            self._server.request("DELETE", life.path)
