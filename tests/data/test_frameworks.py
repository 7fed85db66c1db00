"""Real processes: what DDP, FSDP2 and JAX make of a step's micro-batches is the mean over its samples."""

from __future__ import annotations

import pytest

from data.programs import BATCH, NUMBERS, run
from data.ranks import all_ids

EXPECTED = [sum(NUMBERS[number] for number in ids) / len(ids) for ids in all_ids(1, len(NUMBERS), **BATCH)]


def test_torch_averages_gradients_to_the_mean_over_the_global_batch():
    pytest.importorskip("torch")
    for uneven, padded, sharded in run("gradients_of_torch", 3):
        assert uneven == pytest.approx(EXPECTED, rel=1e-12)
        assert padded == pytest.approx(EXPECTED, rel=1e-12)
        assert sharded == pytest.approx(EXPECTED, rel=1e-12)


@pytest.mark.parametrize(("world_size", "devices"), [(1, 4), (2, 2)])
def test_jax_sums_global_arrays_to_the_mean_over_the_global_batch(world_size, devices):
    pytest.importorskip("jax")
    flags = f"--xla_force_host_platform_device_count={devices}"
    for found in run("gradients_of_jax", world_size, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"):
        assert [gradient for gradient, _, _ in found] == pytest.approx(EXPECTED, rel=1e-12)
        assert [samples for _, samples, _ in found] == [20] * 5
        micro_batches = 5 if world_size == 1 else 3
        assert [shapes for _, _, shapes in found] == [[[4 * world_size]] * micro_batches] * 5
