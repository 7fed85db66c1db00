"""TPU generations and topologies: chips, hosts and workers of a slice, by the table."""

from __future__ import annotations

import pytest

from everstep.topology.accelerators import (
    GENERATIONS,
    TopologyError,
    chips_in,
    chips_in_pod,
    generation_of,
    nearest_multiples,
    slice_shape,
)


@pytest.mark.parametrize(
    ("kind", "topology", "chips", "chips_per_host", "hosts"),
    [
        ("TPU-V2", "4x4", 16, 4, 4),
        ("TPU-V2", "16x16", 256, 4, 64),
        ("TPU-V3", "32x32", 1024, 4, 256),
        ("TPU-V4", "2x2x1", 4, 4, 1),
        ("TPU-V4", "2x2x2", 8, 4, 2),
        ("TPU-V4", "12x12x16", 2304, 4, 576),
        ("TPU-V5P", "16x16x24", 6144, 4, 1536),
        ("TPU-V5LITEPOD", "1x1", 1, 1, 1),
        ("v5e", "2x2", 4, 4, 1),
        ("TPU-V5LITEPOD", "2x4", 8, 8, 1),
        ("TPU-V6E", "2x4", 8, 8, 1),
        ("TPU-V6E", "2x8", 16, 4, 4),
        ("TPU-V6E", "4x4", 16, 4, 4),
        ("TPU-V6E", "16x16", 256, 4, 64),
        ("TPU-V7X", "8x16x16", 2048, 4, 512),
    ],
)
def test_the_shape_of_a_slice(kind, topology, chips, chips_per_host, hosts):
    shape = slice_shape(kind, topology)
    assert (shape.chips, shape.chips_per_host, shape.hosts) == (chips, chips_per_host, hosts)


@pytest.mark.parametrize(
    ("kind", "topology", "per_worker", "workers"),
    [
        ("TPU-V6E", "4x4", 4, 4),
        ("TPU-V6E", "4x4", 1, 16),
        ("TPU-V6E", "2x4", 8, 1),
        ("TPU-V6E", "2x4", 4, 2),
        ("TPU-V4", "2x2x2", 2, 4),
    ],
)
def test_workers_of_a_slice(kind, topology, per_worker, workers):
    assert slice_shape(kind, topology).workers(per_worker) == workers


@pytest.mark.parametrize(("topology", "per_worker"), [("4x4", 8), ("4x4", 3), ("4x4", 0.5), ("2x4", 16)])
def test_chips_of_a_worker_divide_the_chips_of_a_host(topology, per_worker):
    with pytest.raises(TopologyError, match="divisor") as caught:
        slice_shape("TPU-V6E", topology).workers(per_worker)
    assert "Use 1 or 2" in caught.value.remedy


@pytest.mark.parametrize(
    ("kind", "topology", "field", "remedy"),
    [
        ("TPU-V6E", "4x16", "topology", "Did you mean"),
        ("TPU-V6E", "8x4", "topology", "'4x8'"),
        ("TPU-V4", "4x4", "topology", "Did you mean"),
        ("TPU-V6E", "banana", "topology", "'4x4'"),
        ("TPU-V6E", "4x-4", "topology", "'4x4'"),
        ("TPU-V6", "4x4", "accelerator_type", "'TPU-V6E'"),
        ("A100", "4x4", "accelerator_type", "Pick one"),
    ],
)
def test_what_there_is_none_of_is_an_error_with_a_way_out(kind, topology, field, remedy):
    with pytest.raises(TopologyError) as caught:
        slice_shape(kind, topology)
    assert caught.value.field == field
    assert remedy in caught.value.remedy


def test_every_generation_has_each_topology_once_and_hosts_come_out_whole():
    for generation in GENERATIONS.values():
        assert len(set(generation.topologies)) == len(generation.topologies)
        for topology in generation.topologies:
            shape = slice_shape(generation.name, topology)
            assert shape.hosts * shape.chips_per_host == shape.chips == chips_in(topology)


def test_pod_types_count_cores_or_chips():
    assert chips_in_pod("v6e-16") == 16
    assert chips_in_pod("v5litepod-8") == 8
    assert chips_in_pod("v4-16") == 8
    assert generation_of("v5litepod-8") is generation_of("TPU-V5E")


def test_nearest_multiples():
    assert nearest_multiples(5, 4) == [4, 8]
    assert nearest_multiples(3, 4) == [4]
    assert nearest_multiples(8, 4) == [8]
