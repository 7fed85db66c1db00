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


def test_a_sharding_that_gives_two_processes_the_same_samples_is_refused():
    """Each would have its own samples in the same place of one array."""
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=2"
    for found in run("refusals_of_jax", 2, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"):
        everywhere, model, second_axis, local = found
        assert "holds 8 of 8 samples, expected 4" in everywhere
        assert "holds 8 of 8 samples, expected 4" in model
        assert "first axis" in second_axis
        assert "holds 8 of 8 samples, expected 4" in local
