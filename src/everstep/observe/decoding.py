"""Metrics as journals and messages have them, decoded. What can't be decoded counts as no metrics."""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.protocol.metrics import flat_numbers


def decoded(raw: msgspec.Raw) -> dict[Any, Any]:
    try:
        found = msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def decoded_numbers(raw: msgspec.Raw) -> dict[str, float]:
    """Numbers alone; those in nested dicts are called ``a/b``."""
    return dict(flat_numbers(decoded(raw)))
