"""Amounts of memory and storage, as people read them."""

from __future__ import annotations

_MIB, _GIB = 1 << 20, 1 << 30


def in_units(size: float) -> str:
    """Bytes in GiB, or in MiB below one."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
