"""Which accelerators a worker sees: its own, and no others."""

from __future__ import annotations

from everstep.backend.base import Member

# A process that uses part of a TPU host has to give the shape of its part; with all chips it gives none.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}


def visible_devices(member: Member) -> dict[str, str | None]:
    """The variables that show a worker its own accelerators only. Read when the driver library starts, so
    they work in a fork of a process that has imported the framework and used no device.
    """
    if member.device_kind == "tpu":
        return _tpu(member)
    if member.device_kind == "gpu":
        return {"CUDA_VISIBLE_DEVICES": ",".join(member.devices)} if member.devices else {}
    return {"CUDA_VISIBLE_DEVICES": ""}


def _tpu(member: Member) -> dict[str, str | None]:
    if not member.devices:
        return {}
    bounds = _TPU_BOUNDS.get(len(member.devices)) if member.local_world_size > 1 else None
    return {
        "TPU_VISIBLE_CHIPS": ",".join(member.devices) if bounds else None,
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
        "TPU_HOST_BOUNDS": "1,1,1" if bounds else None,
    }
