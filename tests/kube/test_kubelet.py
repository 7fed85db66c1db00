"""The kubelet of these tests ends Pods as a real one does."""

from __future__ import annotations

from everstep.testing.kube.pods import Grace


def test_hooks_and_the_end_of_the_containers_share_one_grace() -> None:
    now = 100.0
    grace = Grace(60.0, lambda: now)
    assert grace.left == 60.0
    now += 55.0
    assert grace.left_for_the_end == 5.0, "not another sixty"
    now += 55.0
    assert grace.left == 0.0
    assert grace.left_for_the_end == 2.0, "however long a hook took"
