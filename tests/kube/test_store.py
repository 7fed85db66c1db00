"""What was just written counts as seen, and what was just deleted doesn't come back: watches lag."""

from __future__ import annotations

from typing import Any

from everstep.kube.store import ObjectCache

KEY = ("default", "demo")


def pod(uid: str, version: int, **meta: Any) -> dict[str, Any]:
    labels = {"ray.io/cluster": "demo", "ray.io/node-type": "worker", "ray.io/group": "tpu"}
    named = {"name": f"pod-{uid}", "namespace": "default", "uid": uid, "labels": labels}
    return {"metadata": {**named, "resourceVersion": str(version), **meta}, "spec": {}}


def uids(store: ObjectCache) -> set[str]:
    return {p.uid for p in store.pods(KEY)}


def test_what_was_written_is_there_before_the_watch_tells() -> None:
    store = ObjectCache()
    store.put_pod(pod("a", 5))
    assert uids(store) == {"a"}


def test_an_older_sighting_changes_nothing() -> None:
    store = ObjectCache()
    store.put_pod(pod("a", 7, deletionTimestamp="2026-01-01T00:00:00Z"))
    store.put_pod(pod("a", 5))
    assert store.pods(KEY)[0].leaving is not None


def test_an_answer_that_comes_after_the_end_raises_nobody() -> None:
    store = ObjectCache()
    store.put_pod(pod("a", 5))
    store.drop_pod(pod("a", 8))
    store.put_pod(pod("a", 6, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert uids(store) == set()


def test_a_list_tells_what_is_gone_and_leaves_what_is_newer_than_it() -> None:
    store = ObjectCache()
    store.put_pod(pod("gone", 3))
    store.put_pod(pod("there", 4))
    store.put_pod(pod("just written", 12))
    changed = store.pods_listed(None, [pod("there", 4)], 10)
    assert uids(store) == {"there", "just written"}
    assert changed == {KEY}


def test_a_list_of_one_namespace_says_nothing_of_others() -> None:
    store = ObjectCache()
    store.put_pod(pod("a", 3))
    store.pods_listed("another", [], 10)
    assert uids(store) == {"a"}


def test_a_cluster_made_anew_under_its_name_is_the_newer_one() -> None:
    store = ObjectCache()
    old = {"metadata": {"namespace": "default", "name": "demo", "uid": "1", "resourceVersion": "3"}}
    new = {"metadata": {"namespace": "default", "name": "demo", "uid": "2", "resourceVersion": "9"}}
    store.put_cluster(old)
    store.put_cluster(new)
    store.drop_cluster(old)
    assert store.clusters[KEY] is new


def test_an_answer_that_comes_after_a_clusters_end_raises_it_no_more() -> None:
    store = ObjectCache()
    cluster = {"metadata": {"namespace": "default", "name": "demo", "uid": "1", "resourceVersion": "3"}}
    store.put_cluster(cluster)
    store.drop_cluster({"metadata": {**cluster["metadata"], "resourceVersion": "9"}})
    store.put_cluster({"metadata": {**cluster["metadata"], "resourceVersion": "8"}})
    assert store.clusters == {}
    store.put_cluster({"metadata": {**cluster["metadata"], "uid": "2", "resourceVersion": "12"}})
    store.clusters_listed(None, [], 20)
    store.put_cluster({"metadata": {**cluster["metadata"], "uid": "2", "resourceVersion": "15"}})
    assert store.clusters == {}


def test_services_come_and_go() -> None:
    store = ObjectCache()
    service = pod("x", 3)
    store.put_service(service)
    assert set(store.services(KEY)) == {"pod-x"}
    store.services_listed(None, [], 2)
    assert set(store.services(KEY)) == {"pod-x"}, "it is newer than the list"
    store.put_service({**pod("x", 2), "spec": {"type": "NodePort"}})
    assert store.services(KEY)["pod-x"].type == "ClusterIP", "it is newer than the answer"
    store.drop_service(pod("x", 5))
    assert store.services(KEY) == {}
