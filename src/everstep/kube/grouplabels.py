"""Labels that the autoscaler must know of a group before it has a node of it. Pure.

Ray's autoscaler learns the labels of nodes that it could start from ``workerGroupSpecs[].labels`` alone. The
shape of TPU slices follows from the node selectors that GKE needs anyway, so nobody has to write it twice.
"""

from __future__ import annotations

from typing import Any

from everstep.kube.pods import shape_labels
from everstep.kube.spec import ClusterSpec

JSON_PATCH = "application/json-patch+json"


def change(cluster: ClusterSpec, version: str) -> list[dict[str, Any]]:
    """What to change in this version of the RayCluster, as a JSON patch; nothing where nothing is missing.
    What the user has written stays.
    """
    if not cluster.autoscaling:
        return []
    changes = []
    for place, group in enumerate(cluster.groups):
        labels = {**shape_labels(group), **group.labels}
        if labels != group.labels:
            path = f"/spec/workerGroupSpecs/{place}/labels"
            changes.append({"op": "add", "path": path, "value": labels})
    checks = [{"op": "test", "path": "/metadata/resourceVersion", "value": version}]
    return [*checks, *changes] if changes else []
