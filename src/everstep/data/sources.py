"""Sources whose samples are asked for by number: ``len(source)`` and ``source[i]``.

That is the protocol of torch's map-style data sets, of Hugging Face data sets, of Grain's data sources, of
arrays and of lists. Here are the checks of a source, its identity, and how its samples are loaded and put
into a batch. Sources that are read in sequence are in ``sequence``.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from everstep.data.errors import SampleError, ShortSourceError
from everstep.data.order import MAX_LENGTH
from everstep.errors import ConfigError

Collate = Callable[[list[Any]], Any]


def plain(source: Any) -> Any:
    """A number of NumPy's as Python's own; every other source as it is."""
    if isinstance(source, bool):
        return source
    return int(source) if isinstance(source, Integral) else source


def length_of(source: object) -> int:
    """How many samples a source promises. A number is a source as well, of its own numbers."""
    if isinstance(source, int) and not isinstance(source, bool):
        length = source
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        try:
            length = len(source)
        except OverflowError as error:
            raise _too_long(f"more than {sys.maxsize}") from error
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"Stream.source is a {type(source).__name__} without a length: {error}.",
                "Give a map-style data set, or a source of shards that are read in sequence.",
                "Stream.source",
            ) from error
    else:
        raise ConfigError(
            f"Stream.source is a {type(source).__name__}, expected one with len(source) and source[i], or "
            "shards.",
            "Give a map-style data set, the number of samples, or shards that can be restored "
            "(everstep.data.JsonlFiles, ParquetFiles, or a Shards of your own): an iterator can't be put "
            "back to its place.",
            "Stream.source",
        )
    if length < 1:
        raise ConfigError(
            f"Stream.source has {length} samples, expected 1 or more.", "Check its path.", "Stream.source"
        )
    if length > MAX_LENGTH:
        raise _too_long(str(length))
    return length


def _too_long(length: str) -> ConfigError:
    return ConfigError(
        f"Stream.source has {length} samples, expected {MAX_LENGTH} or fewer.",
        "Check what its len() counts.",
        "Stream.source",
    )


def identity_of(source: object, name: str | None) -> str:
    """A short text that differs where sources do, as far as is known without reading them."""
    kind = type(source).__name__[:20]
    if name is not None:
        kind, identity = name[:20], name
    elif callable(own := getattr(source, "fingerprint", None)):
        identity = str(own())
    elif isinstance(of_hugging_face := getattr(source, "_fingerprint", None), str):
        identity = of_hugging_face
    elif isinstance(source, int):
        kind = identity = "numbers"
    else:
        identity = f"{type(source).__module__}.{type(source).__qualname__}"
        identity += "".join(str(getattr(source, has, "")) for has in ("shape", "dtype"))
    readable = kind.encode("ascii", "replace").decode()  # as JSON, other letters have up to twelve bytes
    return f"{readable}-{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}"


def samples_of(source: Any, ids: Sequence[int]) -> list[Any]:
    """The samples with these numbers. The one that can't be loaded is named."""
    if isinstance(source, int):
        return list(ids)
    if callable(many := getattr(source, "__getitems__", None)):
        try:
            samples = list(many(list(ids)))
        except Exception as error:
            _one_by_one(source, ids)
            raise _failed(source, ids, error) from error  # each alone can be loaded
        if len(samples) != len(ids):
            kind = type(source).__name__
            raise SampleError(ids, f"{kind}.__getitems__ gave {len(samples)} samples for {len(ids)} numbers")
        return samples
    return _one_by_one(source, ids)


def _one_by_one(source: Any, ids: Sequence[int]) -> list[Any]:
    samples: list[Any] = []
    try:
        for number in ids:
            samples.append(source[number])
    except Exception as error:
        raise _failed(source, [ids[len(samples)]], error) from error
    return samples


def _failed(source: Any, ids: Sequence[int], error: Exception) -> SampleError:
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, IndexError):
        length = len(source)
        verb = f"promises {length} samples" if max(ids) < length else f"has {length} samples now"
        return ShortSourceError(
            ids,
            f"{type(source).__name__} {verb}, and this one isn't there ({what})",
            "Put the missing data back, or start a new run with the shorter source",
            trace,
        )
    return SampleError(ids, what, traceback=trace)


def collated(samples: list[Any], ids: Sequence[int], collate: Collate) -> Any:
    """The samples as one batch. If they don't fit together, the error names them."""
    try:
        return collate(samples)
    except Exception as error:
        what = f"{getattr(collate, '__name__', 'collate_fn')} raised {type(error).__name__}: {error}"
        raise SampleError(
            ids,
            what,
            "Give a collate_fn that fits these samples",
            "".join(traceback.format_exception(error)),
        ) from error


def stacked(samples: list[Any]) -> Any:
    """The default: arrays, tensors and numbers are stacked, tuples and mappings part by part, and all else
    stays a list.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple):
        parts = [stacked(list(part)) for part in zip(*samples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        return torch.stack(samples)
    if isinstance(first, (int, float)) or hasattr(first, "__array__"):
        return _as_array(samples)
    return samples


def _as_array(samples: list[Any]) -> Any:
    try:
        import numpy
    except ImportError:
        return samples
    return numpy.stack(samples)
