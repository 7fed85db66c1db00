"""The Helm chart and the kustomization in ``deploy/``, made from the same manifests as ``everstep operator
manifests``. ``python -m everstep.kube.packaging deploy`` writes them.

The chart's templates use nothing but Go's own template language, so that they can be rendered without Helm.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from everstep import __version__
from everstep.kube import names
from everstep.kube.crd import custom_resource_definition
from everstep.kube.manifests import manifests

_HOME = "everstep-system"
_IMAGE = "everstep-operator"
_RELEASE = "{{ $.Release.Namespace }}"
_EACH = "{{ . }}"
_ALL_CLUSTERS = "--all-clusters"


def files() -> dict[str, str]:
    """By their paths below ``deploy/``."""
    return {**_chart(), **_kustomization()}


def _chart() -> dict[str, str]:
    chart = {
        "apiVersion": "v2",
        "name": names.OPERATOR,
        "description": "Ray clusters on Kubernetes whose slices live and die as one.",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
    }
    values = (
        "# The operator's image: build it from deploy/operator.Dockerfile.\n"
        f"image: {_IMAGE}:{__version__}\n"
        "# One works; others are ready, and stand by.\n"
        "replicas: 1\n"
        "# Those that are looked after, each with a Role there; none means all.\n"
        "namespaces: []\n"
        '# Also clusters without the annotation everstep.dev/managed: "true".\n'
        "allClusters: false\n"
        "# More arguments of `everstep operator run`, like --lease-seconds=30.\n"
        "arguments: []\n"
    )
    home = "helm/everstep-operator"
    return {
        f"{home}/Chart.yaml": _yaml(chart),
        f"{home}/values.yaml": values,
        f"{home}/crds/rayclusters.yaml": _yaml(custom_resource_definition()),
        f"{home}/templates/operator.yaml": _templates(),
    }


def _templates() -> str:
    """The manifests for some namespaces and those for all, in one. Helm makes the operator's own namespace,
    or finds it.
    """
    image = "{{ .Values.image }}"
    everywhere = {_key(made): _yaml(made) for made in manifests(image, _RELEASE, (), all_clusters=True)}
    scoped = {_key(made): _yaml(made) for made in manifests(image, _RELEASE, (_EACH,), all_clusters=True)}
    few = scoped["ClusterRole"]
    assert everywhere["ClusterRole"].startswith(few), "an operator of some namespaces has rights of its own"
    deployment = scoped["Deployment"].replace("replicas: 1\n", "replicas: {{ .Values.replicas }}\n")
    for flag, block in (
        (f"        - --namespace={_EACH}\n", "range .Values.namespaces"),
        (f"        - {_ALL_CLUSTERS}\n", "if .Values.allClusters"),
    ):
        assert deployment.count(flag) == 1, flag
        deployment = deployment.replace(flag, _block(block, flag))
    more = _block("range .Values.arguments", f"        - {_EACH!r}\n")
    texts = {
        **{kind: text for kind, text in everywhere.items() if kind != "Namespace"},
        "ClusterRole": few + _block("if not .Values.namespaces", everywhere["ClusterRole"].removeprefix(few)),
        "Deployment": deployment.replace("        ports:\n", f"{more}        ports:\n"),
    }
    roles = _block(
        "range .Values.namespaces", "".join(f"---\n{scoped[kind]}" for kind in ("Role", "RoleBinding"))
    )
    return "---\n".join(texts.values()) + roles


def _key(manifest: dict[str, Any]) -> str:
    return str(manifest["kind"])


def _block(what: str, text: str) -> str:
    return f"{{{{- {what} }}}}\n{text}{{{{- end }}}}\n"


def _kustomization() -> dict[str, str]:
    made = manifests(_IMAGE, _HOME, (), all_clusters=False)
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    image = {"name": _IMAGE, "newName": _IMAGE, "newTag": __version__}
    return {
        "kustomize/kustomization.yaml": _yaml({**kind, "resources": ["operator.yaml"], "images": [image]}),
        # By itself: another one, like KubeRay's, isn't written over by the way.
        "kustomize/crd/kustomization.yaml": _yaml({**kind, "resources": ["rayclusters.yaml"]}),
        "kustomize/crd/rayclusters.yaml": _yaml(custom_resource_definition()),
        "kustomize/operator.yaml": "---\n".join(_yaml(manifest) for manifest in made),
    }


class _Plain(yaml.SafeDumper):  # type: ignore[misc]
    """Without anchors, which not everybody who reads YAML understands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(manifest: Any) -> str:
    return str(yaml.dump(manifest, Dumper=_Plain, sort_keys=False, width=1000))


def main(folder: str) -> None:
    for name, text in files().items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
