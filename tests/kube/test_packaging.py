"""The Helm chart, the kustomization, and what the operator tells Prometheus."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep.kube.lease import Election
from everstep.kube.manifests import manifests
from everstep.kube.packaging import files
from everstep.testing.kube import ApiServer, find_programs
from everstep.testing.kube.server import free_ports
from kube.bad import bad
from kube.live import Namespace, OperatorProcess, operating
from kube.test_slices import cluster
from kube.world import group
from processes import LIMIT_S, wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_what_is_in_deploy_is_made_from_the_manifests() -> None:
    for name, text in files().items():
        assert (DEPLOY / name).read_text() == text, "python -m everstep.kube.packaging deploy"


def rendered(folder: Path, namespace: str, **values: object) -> str:
    """The chart, by Go's own templates, which Helm uses, too: kubectl has them, for its output."""
    chart = DEPLOY / "helm" / "everstep-operator"
    known = {**yaml.safe_load((chart / "values.yaml").read_text()), **values}
    shown = {"apiVersion": "v1", "kind": "Values", "metadata": {"name": "all"}}
    given = folder / "values.json"
    given.write_text(json.dumps({**shown, "Values": known, "Release": {"Namespace": namespace}}))
    template = chart / "templates" / "operator.yaml"
    program = [find_programs() / "kubectl", "annotate", "--local", "-f", given, "rendered=true"]
    done = subprocess.run(
        [*program, f"--output=go-template-file={template}"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_the_kustomization_is_what_an_api_server_takes(server: ApiServer) -> None:
    server.kubectl("apply", "-k", str(DEPLOY / "kustomize" / "crd"))
    try:
        server.kubectl("apply", "-k", str(DEPLOY / "kustomize"))
        deployment = server.request(
            "GET", "/apis/apps/v1/namespaces/everstep-system/deployments/everstep-operator"
        )
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert re.match(r"everstep-operator:\d", container["image"])
        server.wait_until_served("rayclusters.ray.io")
    finally:
        # Nobody is here to see a namespace off.
        server.kubectl("delete", "--wait=false", "-k", str(DEPLOY / "kustomize"))


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


def test_a_second_operator_stands_by_ready_and_asked_for_its_opinion(
    server: ApiServer, tmp_path: Path
) -> None:
    """As controller-runtime has it: `helm --wait` waits for both, and the Service of the webhook leads to
    both.
    """
    space = Namespace(server)
    one, other, first_port, second_port = free_ports(4)
    url = f"https://127.0.0.1:{first_port}/validate"
    arguments = ("--namespace", space.name, "--lease-seconds", "4", "--webhook-url", url)
    first_own = ("--metrics-port", str(one), "--webhook-port", str(first_port))
    second_own = ("--metrics-port", str(other), "--webhook-port", str(second_port))

    def leads(port: int) -> bool:
        return f'leads{{namespace="{space.name}"}} 1.0' in answer(port, "metrics")[1]

    try:
        with operating(server, tmp_path, *arguments, *first_own) as first:
            second = OperatorProcess(
                server.kubeconfig, *arguments, *second_own, log=tmp_path / "second.log"
            ).start()
            try:
                second.hear("waiting for the lease")
                for port in (one, other):
                    assert answer(port, "healthz") == (200, "ok")
                    wait_for(lambda port=port: answer(port, "readyz")[0] == 200, "both ready", look_s=0.1)  # type: ignore[misc]
                assert answer(other, "readyz")[1] == "standing by"
                assert leads(one)
                assert not leads(other)
                for port in (first_port, second_port):
                    assert not opinion(server, port, bad("hosts that don't fit the topology")[0], space)
                    assert opinion(server, port, cluster(group(replicas=1, hosts=2)), space)
                first.stop()
                wait_for(lambda: leads(other), "it to have the lease", look_s=0.1)
                wait_for(lambda: answer(other, "readyz") == (200, "ok"), "it to work", look_s=0.1)
            finally:
                second.stop()
    finally:
        server.kubectl("delete", "validatingwebhookconfiguration", "everstep-operator", "--ignore-not-found")


def opinion(server: ApiServer, port: int, asked: dict[str, Any], space: Namespace) -> bool:
    """Whether a webhook would have it, asked by somebody who believes what the API server was told to."""
    known = server.request(
        "GET", "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/everstep-operator"
    )
    believed = base64.b64decode(known["webhooks"][0]["clientConfig"]["caBundle"]).decode()
    review = {"uid": "1", "namespace": space.name, "object": {**asked, "metadata": asked["metadata"]}}
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": review}
    connection = http.client.HTTPSConnection(
        "127.0.0.1", port, context=ssl.create_default_context(cadata=believed), timeout=LIMIT_S
    )
    with contextlib.closing(connection):
        connection.request("POST", "/validate", json.dumps(body))
        return bool(json.loads(connection.getresponse().read())["response"]["allowed"])


def test_an_operator_that_reaches_nobody_is_not_ready(server: ApiServer, tmp_path: Path) -> None:
    [port], space = free_ports(1), Namespace(server)
    arguments = ("--namespace", space.name, "--lease-seconds", "4", "--metrics-port", str(port))
    with operating(server, tmp_path, *arguments):
        wait_for(lambda: answer(port, "readyz") == (200, "ok"), "it to be ready", look_s=0.1)
        with server.paused("kube-apiserver"):
            wait_for(lambda: answer(port, "readyz")[0] == 503, "it to say so", look_s=0.1)
            assert answer(port, "healthz") == (200, "ok"), "to start it anew would help nobody"
        wait_for(lambda: answer(port, "readyz") == (200, "ok"), "it to be ready again", look_s=0.1)


def test_a_lease_is_held_as_controller_runtime_holds_it() -> None:
    tuned = Election()
    assert (tuned.lease_s, tuned.renew_deadline_s, tuned.retry_s) == (15, 10, 2)
    assert Election.of(15) == tuned
    assert Election.of(30, retry_s=5) == Election(lease_s=30, renew_deadline_s=20, retry_s=5)
    for wrong in ((15, 15, 2), (15, 10, 9), (15, 10, 0)):
        with pytest.raises(ValueError, match="don't fit"):
            Election.of(*wrong)
