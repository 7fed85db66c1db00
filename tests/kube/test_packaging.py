"""The Helm chart, the kustomization, and what the operator tells Prometheus."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from everstep.kube.packaging import files
from everstep.testing.kube import ApiServer
from everstep.testing.kube.server import free_ports
from kube.live import Namespace, OperatorProcess, operating
from kube.test_slices import cluster
from kube.world import group
from processes import LIMIT_S, wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_what_is_in_deploy_is_made_from_the_manifests() -> None:
    for name, text in files().items():
        assert (DEPLOY / name).read_text() == text, "python -m everstep.kube.packaging deploy"


def rendered(namespace: str, **values: object) -> str:
    """The chart, by the few things of Helm's that its templates use."""
    chart = DEPLOY / "helm" / "everstep-operator"
    known = {**yaml.safe_load((chart / "values.yaml").read_text()), **values}
    text = (chart / "templates" / "operator.yaml").read_text()

    def kept(found: re.Match[str]) -> str:
        return (found[2] if known[found[1]] else "") + "\n"

    text = re.sub(r"\s*\{\{- if \.Values\.(\w+) \}\}(.*?)\s*\{\{- end \}\}\n", kept, text, flags=re.DOTALL)
    text = re.sub(r"\{\{ \.Values\.(\w+) \}\}", lambda found: str(known[found[1]]), text)
    text = text.replace("{{ .Release.Namespace }}", namespace)
    assert "{{" not in text
    return text


@pytest.mark.parametrize("everything", [False, True])
def test_the_chart_is_what_an_api_server_takes(server: ApiServer, everything: bool) -> None:
    space = Namespace(server)
    text = rendered(space.name, image="registry.example.com/it:1", replicas=2, allClusters=everything)
    try:
        server.kubectl("apply", "-f", "-", stdin=text)
        found = space.get("deployments", "everstep-operator", "/apis/apps/v1")["spec"]
        assert found["replicas"] == 2
        [container] = found["template"]["spec"]["containers"]
        assert container["image"] == "registry.example.com/it:1"
        assert ("--all-clusters" in container["args"]) is everything
        assert f"--webhook-service={space.name}/everstep-operator" in container["args"]
    finally:
        server.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


def test_the_kustomization_is_what_an_api_server_takes() -> None:
    with ApiServer() as server:
        server.kubectl("apply", "-k", str(DEPLOY / "kustomize" / "crd"))
        server.kubectl("apply", "-k", str(DEPLOY / "kustomize"))
        deployment = server.request(
            "GET", "/apis/apps/v1/namespaces/everstep-system/deployments/everstep-operator"
        )
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert re.match(r"everstep-operator:\d", container["image"])
        server.kubectl("wait", "--for=condition=established", "crd/rayclusters.ray.io", "--timeout=30s")


def test_slices_heals_and_calls_are_counted(server: ApiServer, tmp_path: Path) -> None:
    space = Namespace(server)
    [port] = free_ports(1)

    def scrape(path: str = "metrics") -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=LIMIT_S) as answer:
                return str(answer.read().decode())
        except urllib.error.URLError:
            return ""

    def counted(name: str) -> float:
        found = re.search(rf"^everstep_operator_{name} (\S+)$", scrape(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    labels = f'{{cluster="demo",group="tpu",namespace="{space.name}"}}'
    with operating(server, tmp_path, "--namespace", space.name, "--metrics-port", str(port)):
        assert scrape("healthz") == "ok"
        space.apply(cluster(group(replicas=2, hosts=2)))
        space.see(lambda: len(space.workers()) == 4, "two slices")
        space.run(*space.pods())
        wait_for(lambda: counted(f"slices_ready{labels}") == 2, "both to be counted", look_s=0.1)
        assert counted(f'leads{{namespace="{space.name}"}}') == 1
        gone = space.uids(index=0)
        space.say(space.workers(index=0)[0], phase="Failed")
        space.see(lambda: space.anew(4, gone), "a heal", kubelet=True)
        space.run(*space.pods())
        wait_for(lambda: counted(f"heal_seconds_count{labels}") == 1, "the heal to be counted", look_s=0.1)
        assert counted(f"slices_replaced_total{labels}") == 1
        assert counted('api_calls_total{code="201",method="POST"}') >= 8
        server.kubectl("-n", space.name, "delete", "raycluster", "demo")
        wait_for(lambda: f"slices_ready{labels}" not in scrape(), "it to be forgotten", look_s=0.1)


def test_a_second_operator_stands_by_and_is_alive(server: ApiServer, tmp_path: Path) -> None:
    space = Namespace(server)
    [port] = free_ports(1)
    with operating(server, tmp_path, "--namespace", space.name):
        second = OperatorProcess(
            server.kubeconfig,
            "--namespace",
            space.name,
            "--metrics-port",
            str(port),
            log=tmp_path / "second.log",
        ).start()
        try:
            second.hear("waiting for the lease")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=LIMIT_S) as answer:
                assert answer.read() == b"ok"
        finally:
            second.stop()
