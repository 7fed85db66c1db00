"""Data that is seen exactly once, in steps of one size, across failures and resizes.

A training loop iterates over a ``Stream``. This package depends on no framework: torch and JAX are imported
by ``Stream.loader`` and ``Stream.global_arrays``, NumPy and pyarrow where they are used.
"""

from __future__ import annotations

from everstep.data.errors import (
    DataError,
    LoaderDiedError,
    ResumeRefusedError,
    SampleError,
    ShortSourceError,
)
from everstep.data.files import JsonlFiles, NumpyFiles, ParquetFiles
from everstep.data.sequence import Reader, Shards
from everstep.data.steps import Micro, Step
from everstep.data.stream import Stream

__all__ = [
    "Stream",
    "Step",
    "Micro",
    "JsonlFiles",
    "NumpyFiles",
    "ParquetFiles",
    "Shards",
    "Reader",
    "DataError",
    "LoaderDiedError",
    "ResumeRefusedError",
    "SampleError",
    "ShortSourceError",
]
