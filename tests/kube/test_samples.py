"""Whatever KubeRay's samples use: it comes up as it should, or the field is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.testing.kube import ApiServer
from kube.live import Namespace, operating
from kube.samples import SAMPLES, Made


@pytest.fixture(scope="module")
def space(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    space = Namespace(server)
    with operating(server, tmp_path_factory.mktemp("operator"), "--namespace", space.name):
        yield space


def made(space: Namespace, name: str) -> Made:
    pods = space.pods(**{"ray.io/cluster": name})
    services = [
        service
        for service in space.get("services")["items"]
        if service["metadata"]["labels"]["ray.io/cluster"] == name
    ]
    return Made(
        heads=[pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "head"],
        workers=[pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "worker"],
        services={service["metadata"]["name"].removeprefix(f"{name}-"): service for service in services},
    )


@pytest.mark.parametrize("what", [what for what, sample in SAMPLES.items() if not sample.refused])
def test_it_comes_up(space: Namespace, what: str) -> None:
    sample, name = SAMPLES[what], f"sample-{list(SAMPLES).index(what)}"
    space.create(sample.manifest(name))

    def is_there() -> bool:
        there = made(space, name)
        counts = (len(there.heads), len(there.workers))
        return counts == (1, sample.workers) and "head-svc" in there.services

    space.see(is_there, "its Pods and Services")
    there = made(space, name)
    assert sample.check(there), (there.head, there.workers, there.services)
    if sample.secret:
        assert space.get("secrets", name)["data"]
    space.run(there.head, *there.workers)
    space.see(lambda: space.status(name).get("state") == "ready", "it to be ready")
    ignored = space.condition("UnsupportedField", name)
    assert (ignored.get("status") == "True") is bool(sample.ignored), ignored
    assert sample.ignored in ignored.get("message", "")


@pytest.mark.parametrize("what", [what for what, sample in SAMPLES.items() if sample.refused])
def test_it_is_refused_and_nothing_runs(space: Namespace, what: str) -> None:
    sample, name = SAMPLES[what], f"sample-{list(SAMPLES).index(what)}"
    space.create(sample.manifest(name))
    space.see(lambda: space.status(name).get("state") == "failed", "it to be refused")
    assert sample.refused in space.condition("InvalidSpec", name)["message"]
    assert made(space, name) == Made(heads=[], workers=[], services={})
