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

from everstep.testing.kube import ApiServer, ProcessKubelet, ray_cluster, ray_group
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
    space.apply(cluster(scaled, enableInTreeAutoscaling=True, headGroupSpec=head))
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


@pytest.mark.timeout(900)
def test_the_heads_sidecar_scales_real_ray_nodes(space: Namespace, short_folder: str) -> None:
    see = space.see
    scaled = ray_group("tpu", 0, 2, rayStartParams={"num-cpus": "1", "resources": '"{\\"chip\\": 1}"'})
    with ProcessKubelet(space.server, namespace=space.name) as kubelet:
        space.apply(
            ray_cluster(
                short_folder,
                scaled,
                enableInTreeAutoscaling=True,
                autoscalerOptions={"idleTimeoutSeconds": 5},
            )
        )
        see(lambda: space.condition("HeadPodReady").get("status") == "True", "the head")
        [head] = space.pods()
        assert [c["name"] for c in head["spec"]["containers"]] == ["ray", "autoscaler"]
        assert head["spec"]["restartPolicy"] == "Never"
        script = (
            "import ray, sys\n"
            "head = sys.argv[1].partition(':')[0]\n"
            "ray.init(address=sys.argv[1], _node_ip_address=head, log_to_driver=False)\n"
            "group = ray.util.placement_group([{'chip': 1}] * 2, strategy='STRICT_SPREAD')\n"
            "ray.get(group.ready())\n"
            "print('there', flush=True); sys.stdin.readline()\n"
        )
        port = space.cluster()["spec"]["headGroupSpec"]["rayStartParams"]["port"]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": str(kubelet.logs)}
        environment.pop("RAY_ADDRESS", None)
        driver = subprocess.Popen(
            [sys.executable, "-c", script, f"{head['status']['podIP']}:{port}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        try:
            see(lambda: len(space.places()) == 2, "the autoscaler to ask for a slice")
            assert driver.stdout is not None
            assert driver.stdout.readline().strip() == "there"
            assert driver.stdin is not None
            driver.stdin.write("\n")
            driver.stdin.close()
            driver.wait(LIMIT_S)
            see(lambda: not space.places(), "the slice to go when it is idle")
            assert space.cluster()["spec"]["workerGroupSpecs"][0]["replicas"] == 0
        finally:
            driver.kill()
            driver.wait()
            driver.stdout.close() if driver.stdout else None
