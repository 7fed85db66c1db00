"""Bad specs are refused with the field's path and a remedy."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.kube.validation import problems, unsupported
from everstep.testing.kube import ApiServer
from everstep.testing.kube.server import free_ports
from kube.bad import BAD, BY_SCHEMA, bad, good
from kube.live import Namespace, operating
from kube.world import group, manifest


def test_a_good_one_has_no_problems() -> None:
    assert problems(good()) == []
    assert unsupported(good()) == []


@pytest.mark.parametrize("what", BAD)
def test_each_problem_has_its_path_and_a_remedy(what: str) -> None:
    raw, path, remedy = bad(what)
    found = problems(raw)
    assert [p for p in found if path in p.path and remedy in p.remedy], found


def test_who_is_in_charge_cant_change() -> None:
    raw = good()
    raw["spec"]["managedBy"] = "everstep.dev/operator"
    assert [p.path for p in problems(raw, good())] == ["spec.managedBy"]


def test_fields_that_ask_for_what_is_anyway_are_not_named() -> None:
    raw = manifest(group(), upgradeStrategy={"type": "None"}, authOptions={"mode": "disabled"})
    raw["spec"]["headGroupSpec"]["enableIngress"] = False
    assert unsupported(raw) == []
    raw["spec"]["headGroupSpec"]["enableIngress"] = True
    assert unsupported(raw) == ["spec.headGroupSpec.enableIngress"]


def test_what_kuberay_reads_elsewhere_is_named_too() -> None:
    raw = manifest(group())
    raw["metadata"]["annotations"].update(
        {"ray.io/enable-serve-service": "true", "ray.io/overwrite-container-cmd": "true"}
    )
    raw["metadata"]["labels"] = {
        "kueue.x-k8s.io/queue-name": "mine",
        "yunikorn.apache.org/app-id": "mine",
        "team": "ours",
    }
    raw["spec"]["headGroupSpec"]["headService"] = {"metadata": {"generateName": "mine"}}
    assert unsupported(raw) == [
        "metadata.annotations[ray.io/enable-serve-service]",
        "metadata.labels[yunikorn.apache.org/app-id]",
        "spec.headGroupSpec.headService.metadata.generateName",
    ]


def refusal(space: Namespace, raw: dict[str, Any], query: str = "") -> str:
    """What the API server says to whoever would make it; nothing, where it has made it."""
    try:
        space.server.request("POST", f"/apis/ray.io/v1/namespaces/{space.name}/rayclusters{query}", raw)
    except urllib.error.HTTPError as error:
        said: str = json.loads(error.read())["message"]
        return said
    return ""


def is_asked(space: Namespace) -> bool:
    """The API server asks a webhook from some moment after it was told to."""
    raw, path, _ = bad("hosts that don't fit the topology")
    return path in refusal(space, raw, "?dryRun=All")


@pytest.fixture(scope="module")
def validated(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    space = Namespace(server)
    port = free_ports(1)[0]
    folder: Path = tmp_path_factory.mktemp("operator")
    url = f"https://127.0.0.1:{port}/validate"
    arguments = ("--namespace", space.name, "--webhook-url", url, "--webhook-port", str(port))
    try:
        with operating(server, folder, *arguments):
            space.see(lambda: is_asked(space), "the webhook to be asked")
            yield space
    finally:
        server.kubectl("delete", "validatingwebhookconfiguration", "everstep-operator", "--ignore-not-found")


@pytest.mark.parametrize("what", BAD)
def test_it_is_refused_with_the_path_and_a_remedy(validated: Namespace, what: str) -> None:
    raw, path, remedy = bad(what)
    said = refusal(validated, raw)
    if what in BY_SCHEMA:
        assert path.rpartition(".")[2] in said
        assert "is invalid" in said
    else:
        assert path in said
        assert remedy in said


def test_kubectl_apply_shows_both(validated: Namespace) -> None:
    raw, path, remedy = bad("hosts that don't fit the topology")
    said = validated.apply(raw, check=False)
    assert path in said
    assert remedy in said
    assert not validated.get("rayclusters", group="/apis/ray.io/v1")["items"]


def test_a_good_one_passes_and_is_told_what_is_ignored(validated: Namespace) -> None:
    raw = good()
    raw["spec"]["suspend"] = True
    raw["spec"]["idleTerminationOptions"] = {"timeoutSeconds": 60}
    said = validated.apply(raw, check=False)
    assert "spec.idleTerminationOptions" in said
    validated.server.kubectl("-n", validated.name, "delete", "raycluster", "demo")


def test_without_a_webhook_a_bad_one_is_left_alone_and_its_status_says_why(
    server: ApiServer, tmp_path: Path
) -> None:
    space = Namespace(server)
    raw, path, remedy = bad("hosts that don't fit the topology")
    with operating(server, tmp_path, "--namespace", space.name):
        space.create(raw)
        space.see(lambda: space.condition("InvalidSpec").get("status") == "True", "the condition")
        message = space.condition("InvalidSpec")["message"]
        assert path in message
        assert remedy in message
        assert not space.pods()
        # Put right, it runs.
        space.patch_group(numOfHosts=4)
        space.see(lambda: len(space.places()) == 12, "its Pods")
        space.see(lambda: space.condition("InvalidSpec")["status"] == "False", "the status to say so")
