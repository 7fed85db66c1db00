"""KubeRay's operator is known by whatever way it was installed."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.kube.other_operators import is_kuberay, watched_namespaces


def deployment(
    labels: dict[str, str],
    image: str = "example.com/x",
    pod_labels: dict[str, str] | None = None,
    **container: Any,
) -> dict[str, Any]:
    template = {
        "metadata": {"labels": pod_labels or {}},
        "spec": {"containers": [{"name": "manager", "image": image, **container}]},
    }
    return {"metadata": {"name": "x", "labels": labels}, "spec": {"template": template}}


NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"


@pytest.mark.parametrize(
    "found",
    [
        deployment({NAME: "kuberay-operator"}),
        deployment({NAME: "kuberay", COMPONENT: "kuberay-operator"}),
        deployment({NAME: "renamed"}, pod_labels={COMPONENT: "kuberay-operator"}),
        deployment({}, "quay.io/kuberay/operator:v1.5.0"),
        deployment({}, "kuberay/operator"),
    ],
    ids=["its Helm chart", "its kustomization", "the chart, renamed", "its image", "its image, in short"],
)
def test_kuberays_operator_is_known(found: dict[str, Any]) -> None:
    assert is_kuberay(found)


def test_others_are_not_taken_for_it() -> None:
    assert not is_kuberay(deployment({NAME: "kuberay-apiserver"}, "quay.io/kuberay/apiserver:v1.5.0"))
    assert not is_kuberay(deployment({}, "example.com/mykuberay/operator-ui"))


@pytest.mark.parametrize(
    ("container", "namespaces"),
    [
        ({}, ()),
        ({"args": ["--watch-namespace=a,b"]}, ("a", "b")),
        ({"args": ["-watch-namespace", "a"]}, ("a",)),
        ({"command": ["/manager", "--watch-namespace", "a,b"]}, ("a", "b")),
        ({"args": ["--watch-namespace=", "--enable-leader-election"]}, ()),
    ],
)
def test_where_it_looks_is_what_it_was_told(container: dict[str, Any], namespaces: tuple[str, ...]) -> None:
    assert watched_namespaces(deployment({NAME: "kuberay-operator"}, **container)) == namespaces
