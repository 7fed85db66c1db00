"""Ray's own KubeRay provider, unmodified, driven a line at a time: a request in, what it sees out."""

from __future__ import annotations

import json
import sys

from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import KubeRayProvider
from ray.autoscaler.v2.instance_manager.node_provider import NodeKind


def main(cluster: str, namespace: str) -> None:
    provider = KubeRayProvider(cluster, {"namespace": namespace}, gcs_client=None)
    for number, line in enumerate(sys.stdin):
        ask = json.loads(line)
        if "launch" in ask:
            provider.launch(ask["launch"], f"launch-{number}")
        if "terminate" in ask:
            provider.terminate(ask["terminate"], f"terminate-{number}")
        seen = provider.get_non_terminated()
        errors = [str(error) for error in provider.poll_errors()]
        workers = sorted(name for name, instance in seen.items() if instance.node_kind == NodeKind.WORKER)
        print(json.dumps({"workers": workers, "errors": errors}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
