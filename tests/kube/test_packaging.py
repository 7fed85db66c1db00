"""The Helm chart, the kustomization, and what the operator tells Prometheus."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep.kube.lease import Election
from everstep.kube.manifests import manifests
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


def rendered(folder: Path, namespace: str, **values: object) -> str:
    """The chart, by Go's own templates, which Helm uses too. In its own process: it ends at a mistake."""
    chart = DEPLOY / "helm" / "everstep-operator"
    known = {**yaml.safe_load((chart / "values.yaml").read_text()), **values}
    given, made = folder / "values.yaml", folder / "rendered.yaml"
    given.write_text(yaml.safe_dump({"Values": known, "Release": {"Namespace": namespace}}))
    code = "import sys, go_template; go_template.render_template(*sys.argv[1:])"
    files = (chart / "templates" / "operator.yaml", given, made)
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made.read_text()


@pytest.mark.parametrize("namespaces", [(), ("one", "two")], ids=["everywhere", "in some namespaces"])
@pytest.mark.parametrize("everything", [False, True], ids=["annotated clusters", "all clusters"])
def test_the_chart_is_the_manifests(tmp_path: Path, namespaces: tuple[str, ...], everything: bool) -> None:
    values = {"image": "it:1", "allClusters": everything, "namespaces": list(namespaces)}
    chart = list(yaml.safe_load_all(rendered(tmp_path, "home", **values)))
    made = [m for m in manifests("it:1", "home", namespaces, everything) if m["kind"] != "Namespace"]

    def place(manifest: dict[str, Any]) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"].get("namespace", "")

    assert sorted(chart, key=place) == sorted(made, key=place)


def test_the_chart_is_what_an_api_server_takes(server: ApiServer, tmp_path: Path) -> None:
    space = Namespace(server)
    text = rendered(
        tmp_path,
        space.name,
        image="registry.example.com/it:1",
        replicas=2,
        namespaces=[space.name],
        arguments=["--lease-seconds=30"],
    )
    try:
        server.kubectl("apply", "-f", "-", stdin=text)
        found = space.get("deployments", "everstep-operator", "/apis/apps/v1")["spec"]
        assert found["replicas"] == 2
        [container] = found["template"]["spec"]["containers"]
        assert container["image"] == "registry.example.com/it:1"
        assert {f"--namespace={space.name}", "--lease-seconds=30"} <= set(container["args"])
        roles = space.get("roles", group="/apis/rbac.authorization.k8s.io/v1")["items"]
        assert [role["metadata"]["name"] for role in roles] == ["everstep-operator"]
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


def answer(port: int, path: str) -> tuple[int, str]:
    """What somebody who looks at the operator from outside is told."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_slices_heals_and_calls_are_counted(server: ApiServer, tmp_path: Path) -> None:
    space = Namespace(server)
    [port] = free_ports(1)

    def scrape() -> str:
        return answer(port, "metrics")[1]

    def counted(name: str) -> float:
        found = re.search(rf"^everstep_operator_{name} (\S+)$", scrape(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    labels = f'{{cluster="demo",group="tpu",namespace="{space.name}"}}'
    with operating(server, tmp_path, "--namespace", space.name, "--metrics-port", str(port)):
        space.create(cluster(group(replicas=2, hosts=2)))
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


def test_a_second_operator_stands_by_alive_and_not_ready(server: ApiServer, tmp_path: Path) -> None:
    space = Namespace(server)
    one, other = free_ports(2)
    arguments = ("--namespace", space.name, "--lease-seconds", "4", "--metrics-port")
    with operating(server, tmp_path, *arguments, str(one)) as first:
        wait_for(lambda: answer(one, "readyz") == (200, "ok"), "the first to be ready", look_s=0.1)
        second = OperatorProcess(
            server.kubeconfig, *arguments, str(other), log=tmp_path / "second.log"
        ).start()
        try:
            second.hear("waiting for the lease")
            assert answer(other, "healthz") == (200, "ok")
            assert answer(other, "readyz")[0] == 503
            assert "standing by" in answer(other, "readyz")[1]
            first.stop()
            wait_for(lambda: answer(other, "readyz")[0] == 200, "it to have the lease", look_s=0.1)
        finally:
            second.stop()


def test_a_lease_is_held_as_controller_runtime_holds_it() -> None:
    tuned = Election()
    assert (tuned.lease_s, tuned.renew_deadline_s, tuned.retry_s) == (15, 10, 2)
    assert Election.of(15) == tuned
    assert Election.of(30, retry_s=5) == Election(lease_s=30, renew_deadline_s=20, retry_s=5)
    for wrong in ((15, 15, 2), (15, 10, 9), (15, 10, 0)):
        with pytest.raises(ValueError, match="don't fit"):
            Election.of(*wrong)
