"""A real Kubernetes API server on this machine, for tests: etcd and kube-apiserver, on free loopback ports.

No scheduler, no controllers, no kubelet: Pods stay pending until somebody says otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_STARTING_S = 90.0
_POLICY = """apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules: [{level: Metadata}]
"""


class NoApiServer(Exception):
    """The programs aren't on this machine."""


def find_programs() -> Path:
    """The folder of ``etcd``, ``kube-apiserver``, ``kubectl``: ``KUBEBUILDER_ASSETS``, the PATH, or the
    cache.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep" / "kube"
    candidates = [Path(os.environ["KUBEBUILDER_ASSETS"])] if os.environ.get("KUBEBUILDER_ASSETS") else []
    on_path = shutil.which("kube-apiserver")
    if on_path:
        candidates.append(Path(on_path).parent)
    candidates += sorted(cache.glob("*"), reverse=True)
    for folder in candidates:
        if all(os.access(folder / name, os.X_OK) for name in ("etcd", "kube-apiserver", "kubectl")):
            return folder
    raise NoApiServer(
        "etcd, kube-apiserver and kubectl aren't together in KUBEBUILDER_ASSETS, on the PATH or in "
        f"{cache}: run scripts/kube-apiserver.sh, which gets them"
    )


class ApiServer:
    """``with ApiServer() as server: … server.kubeconfig …``. Ends all that it starts."""

    def __init__(self, *, admission: Sequence[str] = ()) -> None:
        self._programs = find_programs()
        self._admission = admission
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ApiServer:
        self._folder = tempfile.TemporaryDirectory(prefix="everstep-kube-")
        self.folder = Path(self._folder.name)
        self.kubeconfig = self.folder / "kubeconfig"
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """The real kubectl, against this server. Its output, and on failure its complaint."""
        done = subprocess.run(
            [str(self._programs / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout if check else done.stdout + done.stderr

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> Any:
        """One request as the administrator. Raises ``urllib.error.HTTPError``."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": content_type},
        )
        with urllib.request.urlopen(request, context=self._trust, timeout=30) as response:
            return json.load(response)

    def calls(self, agent: str = "everstep-operator") -> list[dict[str, Any]]:
        """The requests of one user agent that were answered so far, from the server's own audit log."""
        try:
            lines = self._audit.read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last one, half written
            if entry.get("userAgent", "").startswith(agent):
                found.append(entry)
        return found

    def _start(self) -> None:
        etcd_port, peer_port, port = _free_ports(3)
        etcd = f"http://127.0.0.1:{etcd_port}"
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer_port}",
            f"--initial-cluster=default=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync=true",
        )
        self.token = os.urandom(16).hex()
        tokens = self.folder / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f'{self.token},admin,admin,"system:masters"\n')
        policy = self.folder / "audit.yaml"
        policy.write_text(_POLICY)
        self._audit = self.folder / "audit.log"
        key = self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={self.folder / 'certs'}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            # Nobody is there to make accounts for namespaces.
            "--disable-admission-plugins=ServiceAccount",
            *([f"--enable-admission-plugins={','.join(self._admission)}"] if self._admission else []),
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self._audit}",
            "--allow-privileged=true",
            "--endpoint-reconciler-type=none",
        )
        self.url = f"https://127.0.0.1:{port}"
        self._wait()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.url, "certificate-authority": str(self.certificate)},
                }
            ],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}
            ],
        }
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(json.dumps(config))

    @property
    def certificate(self) -> Path:
        return self.folder / "certs" / "apiserver.crt"

    def _run(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(self._programs / program), *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    # They get no signal from the terminal: we end them, last.
                    start_new_session=True,
                )
            )

    def _wait(self) -> None:
        deadline = time.monotonic() + _STARTING_S
        while True:
            for process in self._processes:
                if process.poll() is not None:
                    name = Path(str(process.args[0])).name  # type: ignore[index]
                    tail = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{name} ended with {process.returncode} before it was up:\n{tail}")
            try:
                self._trust = ssl.create_default_context(cafile=str(self.certificate))
                self.request("GET", "/api/v1/namespaces/default")
                return
            except (OSError, ValueError):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"kube-apiserver isn't up after {_STARTING_S:.0f} s") from None
                time.sleep(0.1)

    def _stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                # kube-apiserver waits a minute for its watchers; nothing here is worth that.
                process.send_signal(signal.SIGKILL)
            process.wait()
        self._processes.clear()
        self._folder.cleanup()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
