"""Ray's own autoscaler code, unmodified, with this operator under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.testing.kube import ApiServer
from kube.live import Namespace, operating
from kube.test_slices import cluster
from kube.world import group, template
from processes import LIMIT_S


class Provider:
    def __init__(self, space: Namespace, cluster: str) -> None:
        server = space.server
        # As the head Pod's sidecar would: with the account that the operator made, and its rights.
        certificate, key = server.client_certificate(f"system:serviceaccount:{space.name}:{cluster}")
        host, _, port = server.url.removeprefix("https://").partition(":")
        environment = {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT_HTTPS": port,
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(certificate),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(key),
            "RAY_KUBERAY_CA_CERT_PATH": str(server.certificate),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kube.provider", cluster, space.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert not answer["errors"], answer
        return answer

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def space(server: ApiServer, tmp_path: Path) -> Iterator[Namespace]:
    made = Namespace(server)
    with operating(server, tmp_path, "--namespace", made.name):
        yield made


def test_rays_own_provider_scales_slices_up_and_down(space: Namespace) -> None:
    cpus = {"num-cpus": "1"}
    head = {"template": template(), "rayStartParams": cpus}
    scaled = group(replicas=0, rayStartParams=cpus)
    space.create(cluster(scaled, enableInTreeAutoscaling=True, headGroupSpec=head))
    space.see(lambda: len(space.pods()) == 1, "the head")
    provider = Provider(space, "demo")
    try:
        assert provider.ask()["workers"] == []
        provider.ask(launch={"tpu": 8})
        space.see(lambda: len(provider.ask()["workers"]) == 8, "two slices of four hosts")
        assert space.places() == [(i, h) for i in range(2) for h in range(4)]
        # A whole slice goes.
        named = [p["metadata"]["name"] for p in space.workers(index=0)]
        kept = space.uids(index=1)
        provider.ask(terminate=named)
        space.see(lambda: space.uids() == kept, "slice 0 to be gone")
        assert len(provider.ask()["workers"]) == 4
        # One host named is its slice gone; the names it had before are cleared on the way.
        provider.ask(launch={"tpu": 4})
        space.see(lambda: len(space.places()) == 8, "a second slice again")
        kept = space.uids(index=0)
        provider.ask(terminate=[space.workers(index=1)[2]["metadata"]["name"]])
        space.see(lambda: space.uids() == kept, "slice 1 to be gone, whole")
        assert space.cluster()["spec"]["workerGroupSpecs"][0]["replicas"] == 1
    finally:
        provider.stop()
