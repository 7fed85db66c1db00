"""A Pod as processes of this machine, from its start to its end."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from everstep.testing.kube.server import ApiServer

Pod = dict[str, Any]

_NAMES = re.compile(
    r"(?P<head>[a-z0-9-]+)-head-svc(?:\.(?P<of>[a-z0-9-]+)\.svc\.cluster\.local)?"
    r"|(?P<host>[a-z0-9-]+)\.(?P<service>[a-z0-9-]+-headless)"
)
_REFERENCE = re.compile(r"\$\((\w+)\)")
MERGE = "application/merge-patch+json"
STARTING_S = 30.0
"""How long one Pod's start may hold up the next: one machine starts many nodes badly at once."""

LEAST_GRACE_S = 2.0
"""What is left for a container to end in, however long its hook took, as a real kubelet has it."""


class Grace:
    """What a Pod that is told to leave has left. Its hooks and the end of its containers share it."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._until = now, now() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._until - self._now())

    @property
    def left_for_the_end(self) -> float:
        """After the hooks, however long they took."""
        return max(LEAST_GRACE_S, self.left)


class PodContainers:
    """A Pod's containers, as processes: what they are started with, and how they end."""

    def __init__(self, server: ApiServer, pod: Pod, logs: Path) -> None:
        self._server, self._pod, self._logs = server, pod, logs
        self._name, self._namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        self.address = address_of(pod)
        self.ending = threading.Event()
        self.states: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._hooks: list[subprocess.Popen[bytes]] = []

    def pids(self) -> list[int]:
        return sorted(process.pid for process in self.processes.values() if process.poll() is None)

    def kill_first(self) -> None:
        kill(self.processes[self._pod["spec"]["containers"][0]["name"]])

    def end(self, grace_s: float) -> None:
        """At once, if there is no grace."""
        grace = Grace(grace_s)
        if grace_s:
            self._say_goodbye(grace)
        self.ending.set()
        for hook in list(self._hooks):
            hook.kill()
            hook.wait()
        if grace_s:
            end = Grace(grace.left_for_the_end)
            for process in list(self.processes.values()):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            for process in list(self.processes.values()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(end.left)
        for process in list(self.processes.values()):
            kill(process)
            process.wait()

    def _say_goodbye(self, grace: Grace) -> None:
        """The containers' own hooks, side by side, for as long as the grace lasts."""
        for container in self._pod["spec"]["containers"]:
            self._start_hook(container)
        for hook in self._hooks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                hook.wait(grace.left)

    def _start_hook(self, container: Mapping[str, Any]) -> None:
        hook = ((container.get("lifecycle") or {}).get("preStop") or {}).get("exec") or {}
        process = self.processes.get(container["name"])
        if not hook or process is None or process.poll() is not None:
            return
        environment = self.environment(container)
        with (self._logs / f"{self._name}.{container['name']}.log").open("ab") as log:
            self._hooks.append(
                subprocess.Popen(hook["command"], env=environment, cwd=self._logs, stdout=log, stderr=log)
            )

    def start(self, container: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        environment = self.environment(container)
        command = [
            here(
                _REFERENCE.sub(lambda found: environment.get(found[1], found[0]), str(word)), self._namespace
            )
            for word in (*(container.get("command") or ()), *(container.get("args") or ()))
        ]
        container_py = str(Path(__file__).with_name("container.py"))
        with (self._logs / f"{self._name}.{container['name']}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", container_py, str(os.getpid()), *command],
                env=environment,
                cwd=self._logs,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[container["name"]] = process
        self.states[container["name"]] = {"running": {}}
        if self.ending.is_set():
            kill(process)  # told to end while it was being started
        return process

    def answer(self, container: Mapping[str, Any], probe: list[str]) -> bool:
        """Whether a probe of this container succeeds."""
        environment = self.environment(container)
        return subprocess.run(probe, env=environment, capture_output=True, cwd=self._logs).returncode == 0

    def environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        meta = self._pod["metadata"]
        account = self._pod["spec"].get("serviceAccountName", "default")
        certificate, key = self._server.client_certificate(
            f"system:serviceaccount:{meta['namespace']}:{account}"
        )
        home = self._logs / self._name
        home.mkdir(exist_ok=True)
        host, _, port = self._server.url.removeprefix("https://").partition(":")
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "KUBE"))},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "HOME": str(home),
            "HOSTNAME": self._pod["spec"].get("hostname") or self._name,
            "POD_LOG": str(self._logs / f"{self._name}.{container['name']}.log"),
            # How a process in a Pod finds the API server, and shows who it is.
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT_HTTPS": port,
            "KUBERNETES_SERVICE_PORT": port,
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(certificate),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(key),
            "RAY_KUBERAY_CA_CERT_PATH": str(self._server.certificate),
        }
        for variable in container.get("env") or ():
            value = variable.get("value", "")
            source = variable.get("valueFrom") or {}
            if "fieldRef" in source:
                value = self._field(source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                value = self._secret(source["secretKeyRef"])
            value = _REFERENCE.sub(lambda found: environment.get(found[1], found[0]), str(value))
            environment[variable["name"]] = here(value, self._namespace)
        return environment

    def _secret(self, reference: Mapping[str, str]) -> str:
        path = f"/api/v1/namespaces/{self._namespace}/secrets/{reference['name']}"
        return base64.b64decode(self._server.request("GET", path)["data"][reference["key"]]).decode()

    def _field(self, path: str) -> str:
        meta = self._pod["metadata"]
        if path == "status.podIP":
            return self.address
        if path == "status.hostIP":
            return "127.0.0.1"
        found = re.match(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if found:
            return str((meta.get(found[1]) or {}).get(found[2], ""))
        return str(meta.get(path.removeprefix("metadata."), ""))


class PodLife:
    """One Pod, from its node to its end."""

    def __init__(self, server: ApiServer, pod: Pod, logs: Path, turn: threading.Semaphore) -> None:
        self._server, self._pod, self._turn = server, pod, turn
        meta = pod["metadata"]
        self.name, self.uid, self.node = meta["name"], meta["uid"], pod["spec"]["nodeName"]
        self.owner = next(
            (o["uid"] for o in meta.get("ownerReferences") or () if o["kind"] == "RayCluster"), None
        )
        self.path = f"/api/v1/namespaces/{meta['namespace']}/pods/{self.name}"
        self.told_to_leave = threading.Event()
        self.lost = False
        self.containers = PodContainers(server, pod, logs)
        self._ending = self.containers.ending
        self._restarts: dict[str, int] = {}
        self._ready = False
        self.thread = threading.Thread(target=self._live, name=self.name, daemon=True)

    def remove(self) -> None:
        """Say that it is over: then the API server lets it go."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        with contextlib.suppress(urllib.error.HTTPError, OSError):
            self._server.request("DELETE", self.path, body)

    def report(self, status: Mapping[str, Any], force: bool = False) -> None:
        if (self.lost and not force) or (self._ending.is_set() and not force):
            return
        with contextlib.suppress(urllib.error.HTTPError, OSError):
            self._server.request("PATCH", f"{self.path}/status", {"status": dict(status)}, MERGE)

    def _live(self) -> None:
        spec = self._pod["spec"]
        for container in spec.get("initContainers") or ():
            self.containers.states[container["name"]] = {"running": {}}
            while not self._ending.is_set() and self.containers.start(container).wait() != 0:
                self._ending.wait(0.5)
        with self._my_turn():
            for container in spec["containers"]:
                if not self._ending.is_set():
                    self.containers.start(container)
            self._say()
            if not self._ending.is_set():
                self._wait_until_ready(spec["containers"][0], STARTING_S)
        if not self._ending.is_set() and not self._ready:
            self._wait_until_ready(spec["containers"][0])
        while not self._ending.wait(0.1):
            self._look(spec)
        # Its containers are ours: they would end with this thread, and have a grace to live through.
        for process in list(self.containers.processes.values()):
            process.wait()

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[None]:
        while not self._turn.acquire(timeout=0.1):
            if self._ending.is_set():
                yield
                return
        try:
            yield
        finally:
            self._turn.release()

    def _wait_until_ready(self, container: Mapping[str, Any], limit_s: float = float("inf")) -> None:
        probe = ((container.get("readinessProbe") or {}).get("exec") or {}).get("command")
        process = self.containers.processes[container["name"]]
        deadline = time.monotonic() + limit_s
        while probe and not self._ending.is_set() and process.poll() is None:
            if time.monotonic() > deadline:
                return
            if self.containers.answer(container, probe):
                break
            self._ending.wait(0.2)
        if process.poll() is None and not self._ending.is_set():
            self._ready = True
            self._say()

    def _look(self, spec: Mapping[str, Any]) -> None:
        for container in spec["containers"]:
            name = container["name"]
            code = self.containers.processes[name].poll()
            if code is None or "terminated" in self.containers.states[name]:
                continue
            ended = {
                "exitCode": code if code >= 0 else 128 - code,
                "reason": "Completed" if code == 0 else "Error",
            }
            policy = spec.get("restartPolicy", "Always")
            if policy == "Always" or (policy == "OnFailure" and code != 0):
                self._restarts[name] = self._restarts.get(name, 0) + 1
                self._ending.wait(min(10.0, 0.5 * 2 ** self._restarts[name]))
                if not self._ending.is_set():
                    self.containers.start(container)
            else:
                self.containers.states[name] = {"terminated": ended}
            first = container is spec["containers"][0]
            self._ready = self._ready and not first
            self._say()
            if first and not self._ending.is_set():
                self._wait_until_ready(container)

    def _say(self) -> None:
        states = [
            self.containers.states[c["name"]]
            for c in self._pod["spec"]["containers"]
            if c["name"] in self.containers.states
        ]
        phase = "Running"
        if states and all("terminated" in state for state in states):
            failed = any(state["terminated"]["exitCode"] for state in states)
            phase = "Failed" if failed else "Succeeded"
        ready = self._ready and phase == "Running"
        self.report(
            {
                "phase": phase,
                "podIP": self.containers.address,
                "hostIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
                "containerStatuses": [
                    {
                        "name": c["name"],
                        "image": c["image"],
                        "imageID": "",
                        "ready": ready,
                        "restartCount": self._restarts.get(c["name"], 0),
                        "state": self.containers.states.get(
                            c["name"], {"waiting": {"reason": "ContainerCreating"}}
                        ),
                    }
                    for c in self._pod["spec"]["containers"]
                ],
            }
        )


def address(*names: str) -> str:
    """The same for the same names: as stable as a name in DNS, and on this machine."""
    a, b, c = hashlib.sha256("/".join(names).encode()).digest()[:3]
    return f"127.{a % 250 + 2}.{b}.{c % 250 + 2}"


def address_of(pod: Pod) -> str:
    meta, spec = pod["metadata"], pod["spec"]
    labels = meta.get("labels") or {}
    if labels.get("ray.io/node-type") == "head":
        return address(meta["namespace"], labels["ray.io/cluster"], "head")
    if spec.get("subdomain"):
        return address(meta["namespace"], spec["subdomain"], spec["hostname"])
    return address(meta["namespace"], meta["name"])


def here(text: str, namespace: str) -> str:
    """Names of Services and hosts, as they are found on this machine."""

    def found(name: re.Match[str]) -> str:
        if name["head"]:
            return address(name["of"] or namespace, name["head"], "head")
        return address(namespace, name["service"], name["host"])

    return _NAMES.sub(found, text)


def kill(container: subprocess.Popen[bytes]) -> None:
    """All of its processes."""
    if container.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            container.send_signal(signal.SIGUSR1)
