"""A real Kubernetes API server: etcd and kube-apiserver, on free loopback ports.

No scheduler, no controllers, no kubelet: Pods stay pending until somebody says otherwise.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import http.client
import io
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_STARTING_S = 300.0
_READY = ("poststarthook/crd-informer-synced", "autoregister-completion")
"""Without these it answers, and doesn't know yet which kinds were defined before it was away."""
_GOGC = "400"
"""Both make most of their garbage when they start, and live for minutes: looking for it at every doubling of
the heap is a sixth of what the API server computes until it is up.
"""
_POLICY = """apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules: [{level: Metadata}]
"""


# Becomes the program that it is given, which won't outlive us.
_MORTAL = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
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
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments: dict[str, tuple[str, ...]] = {}
        self._connections = threading.local()

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
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content_type}
        status, reason, text = self._exchange(method, path, data, headers)
        if status >= 400:
            raise urllib.error.HTTPError(f"{self.url}{path}", status, reason, Message(), io.BytesIO(text))
        return json.loads(text)

    def _exchange(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, str, bytes]:
        """Over a connection that each thread keeps: a new one for each request costs both sides more than
        the request does.
        """
        kept: http.client.HTTPSConnection | None = getattr(self._connections, "kept", None)
        connection = kept or http.client.HTTPSConnection(
            self.url.removeprefix("https://"), timeout=30, context=self._trust
        )
        self._connections.kept = None
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            connection.close()
            if kept is None:
                raise
            return self._exchange(method, path, data, headers)  # it was closed before we came with this one
        except BaseException:
            connection.close()
            raise
        self._connections.kept = connection
        return answer.status, answer.reason, text

    def define(self, definition: Mapping[str, Any]) -> None:
        """A kind of object. It is served when this returns."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(definition))
        self.wait_until_served(definition["metadata"]["name"])

    def wait_until_served(self, definition: str) -> None:
        """Not by `kubectl wait`, which fails at a definition that has no conditions yet."""
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition}"
        deadline = time.monotonic() + _STARTING_S
        while True:
            conditions = self.request("GET", path).get("status", {}).get("conditions") or ()
            if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{definition} isn't served after {_STARTING_S:.0f} s: {conditions}")
            time.sleep(0.05)

    # Faults.

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """The API server is gone meanwhile. etcd keeps what it knew."""
        self._end("kube-apiserver")
        try:
            yield
        finally:
            self._run("kube-apiserver", *self._arguments["kube-apiserver"])
            self._wait()

    @contextlib.contextmanager
    def paused(self, program: str = "etcd") -> Iterator[None]:
        """It doesn't answer meanwhile, and doesn't know that time goes by."""
        process = self._processes[program]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def client_certificate(self, user: str) -> tuple[Path, Path]:
        """A certificate, and its key, for somebody that the server will know by this name."""
        return self._authority.sign(user)

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
        etcd_port, peer_port, port = free_ports(3)
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
        _write_key(key)
        self._authority = _Authority(self.folder / "clients")
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={self.folder / 'certs'}",
            f"--token-auth-file={tokens}",
            f"--client-ca-file={self._authority.certificate}",
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
        self._arguments[program] = arguments
        with (self.folder / f"{program}.log").open("ab") as log:
            self._processes[program] = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    "-c",
                    _MORTAL,
                    str(os.getpid()),
                    str(self._programs / program),
                    *arguments,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                # They get no signal from the terminal: we end them, last.
                start_new_session=True,
                env={"GOGC": _GOGC, **os.environ},
            )

    def _wait(self) -> None:
        deadline = time.monotonic() + _STARTING_S
        while True:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    tail = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{name} ended with {process.returncode} before it was up:\n{tail}")
            try:
                self._trust = ssl.create_default_context(cafile=str(self.certificate))
                self.request("GET", "/api/v1/namespaces/default")
                if all(self._is_ready(part) for part in _READY):
                    return
            except (OSError, ValueError):
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"kube-apiserver isn't up after {_STARTING_S:.0f} s")
            time.sleep(0.1)

    def _is_ready(self, part: str) -> bool:
        headers = {"Authorization": f"Bearer {self.token}"}
        return self._exchange("GET", f"/readyz/{part}", None, headers)[0] == 200

    def _stop(self) -> None:
        for program in reversed(list(self._processes)):
            self._end(program)
        self._folder.cleanup()

    def _end(self, program: str) -> None:
        process = self._processes.pop(program)
        if process.poll() is None:
            # kube-apiserver waits a minute for its watchers; nothing here is worth that.
            process.send_signal(signal.SIGKILL)
        process.wait()


class _Authority:
    """Whom the server believes about who its clients are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)
        self._lock = threading.Lock()
        self._key = _write_key(folder / "ca.key")
        self.certificate = folder / "ca.crt"
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "everstep-testing")])
        made = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(True, None), critical=True
        )
        self.certificate.write_bytes(self._signed(made))

    def sign(self, user: str) -> tuple[Path, Path]:
        stem = hashlib.sha256(user.encode()).hexdigest()[:16]
        certificate, key = self._folder / f"{stem}.crt", self._folder / f"{stem}.key"
        with self._lock:
            if not certificate.exists():
                private = _write_key(key)
                name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, user)])
                usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
                made = self._builder(name, private).add_extension(usage, critical=False)
                certificate.write_bytes(self._signed(made))
        return certificate, key

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=7))
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        pem: bytes = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return pem


def _write_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return key


def free_ports(count: int) -> list[int]:
    """Nobody has them now, and nobody gets them by chance: they are below those of outgoing connections."""
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            one = socket.socket()
            sockets.append(one)
            try:
                one.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            except OSError:
                sockets.pop().close()
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
