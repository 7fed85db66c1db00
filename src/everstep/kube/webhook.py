"""The validating webhook: refuses bad specs when they are applied, with the field's path and a remedy."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import logging
import secrets
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from everstep.kube import names
from everstep.kube.api import Api, ApiError, patiently
from everstep.kube.operator import OperatorSettings, is_claimed
from everstep.kube.validation import problems, unsupported

PATH = "/validate"
_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
_LIVES = datetime.timedelta(days=3650)
_MOST_BELIEVED = 8
_END = b"-----END CERTIFICATE-----"

logger = logging.getLogger("everstep.kube")


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API server finds us: a Service of its own cluster, or a URL."""

    port: int = 9443
    address: str = "0.0.0.0"
    service: tuple[str, str] | None = None
    """Namespace and name."""
    url: str | None = None

    @property
    def hosts(self) -> list[str]:
        if self.service is not None:
            namespace, name = self.service
            return [f"{name}.{namespace}.svc"]
        return [(self.url or "").removeprefix("https://").partition("/")[0].partition(":")[0] or "localhost"]


def review(request: Mapping[str, Any], settings: OperatorSettings) -> dict[str, Any]:
    """The answer to one AdmissionReview."""
    cluster, before = request.get("object") or {}, request.get("oldObject")
    answer: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if settings.namespaces and request.get("namespace") not in settings.namespaces:
        return answer
    if not cluster or not is_claimed(cluster, settings.all_clusters):
        return answer
    if cluster["metadata"].get("deletionTimestamp"):
        return answer
    wrong = problems(cluster, before)
    if wrong:
        answer["allowed"] = False
        # Not 422: kubectl then looks for details, and leaves the message out.
        answer["status"] = {"code": 400, "message": "\n".join(map(str, wrong))}
    ignored = unsupported(cluster)
    if ignored:
        answer["warnings"] = [f"{path}: this operator does nothing with it" for path in ignored]
    return answer


@contextlib.asynccontextmanager
async def served(webhook: Webhook, api: Api, settings: OperatorSettings) -> AsyncIterator[None]:
    """Listens, and has the API server ask us."""

    async def validate(request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read())
        answer = review(asked["request"], settings)
        return web.json_response(
            {"apiVersion": asked["apiVersion"], "kind": asked["kind"], "response": answer}
        )

    app = web.Application(client_max_size=8 * 2**20)
    app.add_routes([web.post(PATH, validate)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    certificate, key = self_signed(webhook.hosts)
    try:
        await web.TCPSite(
            runner, webhook.address, webhook.port, ssl_context=_context(certificate, key)
        ).start()
        await _announce(api, webhook, certificate)
        logger.info("validating RayClusters on port %d", webhook.port)
        yield
    finally:
        await runner.cleanup()


def configuration(webhook: Webhook, certificate: bytes | None) -> dict[str, Any]:
    where: dict[str, Any]
    if webhook.service is not None:
        namespace, name = webhook.service
        where = {"service": {"namespace": namespace, "name": name, "path": PATH, "port": 443}}
    else:
        where = {"url": webhook.url}
    if certificate is not None:
        where["caBundle"] = base64.b64encode(certificate).decode()
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": names.OPERATOR, "labels": {names.CREATED_BY: names.OPERATOR}},
        "webhooks": [
            {
                "name": "rayclusters.everstep.dev",
                "clientConfig": where,
                "rules": [
                    {
                        "apiGroups": [names.GROUP],
                        "apiVersions": [names.VERSION],
                        "resources": [names.PLURAL],
                        "operations": ["CREATE", "UPDATE"],
                        "scope": "Namespaced",
                    }
                ],
                # The operator validates, too, so that nothing invalid stays that came while no webhook
                # answered.
                "failurePolicy": "Ignore",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 5,
            }
        ],
    }


async def _announce(api: Api, webhook: Webhook, certificate: bytes) -> None:
    """Has the API server ask us, and believe us beside those that it believes already: several operators
    serve behind one Service.
    """
    # Of two at a time, one is refused, and looks again.
    await patiently(lambda: _announce_once(api, webhook, certificate))


async def _announce_once(api: Api, webhook: Webhook, certificate: bytes) -> None:
    path = f"{_CONFIGURATIONS}/{names.OPERATOR}"
    there = await _there(api, path)
    if there is None:
        await api.create(_CONFIGURATIONS, configuration(webhook, certificate))
        return
    wanted = configuration(webhook, believed(there, certificate))
    version = {"resourceVersion": there["metadata"]["resourceVersion"]}
    # JSON merge patch would replace the list anyway; there is one webhook in it.
    await api.patch(path, {"metadata": version, "webhooks": wanted["webhooks"]})


async def _there(api: Api, path: str) -> Mapping[str, Any] | None:
    try:
        return await api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def believed(there: Mapping[str, Any], certificate: bytes) -> bytes:
    """The certificates that the API server knows, the newest last, and ours. Those of operators that are no
    more are of no use to anybody, and go after a while.
    """
    clients = [hook.get("clientConfig") or {} for hook in there.get("webhooks") or ()]
    known = b"".join(base64.b64decode(client.get("caBundle") or "") for client in clients)
    certificates = [part + _END for part in known.split(_END) if part.strip()]
    return b"".join(part.strip() + b"\n" for part in [*certificates, certificate][-_MOST_BELIEVED:])


def self_signed(hosts: Sequence[str]) -> tuple[bytes, bytes]:
    """A certificate for ourselves, and its key. Only the API server has to trust it: it gets it by its
    config.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: a client that trusts several finds the right one by it.
    own = f"{names.OPERATOR}-{secrets.token_hex(8)}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, own)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIVES)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _context(certificate: bytes, key: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="everstep-") as folder:  # 0700, and gone at once
        (Path(folder) / "both.pem").write_bytes(key + certificate)
        context.load_cert_chain(Path(folder) / "both.pem")
    return context
