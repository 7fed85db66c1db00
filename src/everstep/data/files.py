"""Data sets that are files: arrays of NumPy, lines of JSON, Parquet."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from everstep.data.errors import DataError
from everstep.data.sequence import Reader, Shards
from everstep.errors import ConfigError

Paths = Iterable[str | os.PathLike[str]] | str | os.PathLike[str]


class NumpyFiles:
    """The rows of ``.npy`` files, one file after the other, as one map-style source. Files are mapped into
    memory, so that only the rows which are used are read.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = _found(paths, "NumpyFiles")
        self._open()

    def _open(self) -> None:
        import numpy

        self._arrays = [numpy.load(path, mmap_mode="r") for path in self._paths]
        self._ends = list(accumulate(len(array) for array in self._arrays))

    def __getstate__(self) -> list[Path]:
        """Other processes map the files themselves: an array would travel with all of its contents."""
        return self._paths

    def __setstate__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._open()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not in range({len(self)})")
        file = bisect_right(self._ends, index)
        row = self._arrays[file][index - (self._ends[file - 1] if file else 0)]
        return row.copy()  # not a view: a batch would keep the whole file mapped

    def fingerprint(self) -> str:
        return _fingerprint(self._paths)


class JsonlFiles(Shards):
    """Files with one JSON value on each line. Empty lines are passed over."""

    def __init__(self, paths: Paths) -> None:
        self._paths = _found(paths, "JsonlFiles")

    def __len__(self) -> int:
        return len(self._paths)

    def open(self, shard: int) -> Reader:
        return _Lines(self._paths[shard])

    def fingerprint(self) -> str:
        return _fingerprint(self._paths)


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._at = 0

    def __next__(self) -> Any:
        for line in self._file:
            began, self._at = self._at, self._at + len(line)
            if line.strip():
                try:
                    return json.loads(line)
                except ValueError as error:
                    raise DataError(
                        f"{self._path} has no JSON at byte {began}: {error}.", "Mend the line."
                    ) from error
        self._file.close()
        raise StopIteration

    def state(self) -> int:
        return self._at

    def restore(self, state: int) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if state > size:
            raise _shorter(self._path, f"{state} bytes were read of it, and it has {size}")
        self._file.seek(state)
        self._at = state


class ParquetFiles(Shards):
    """Rows of Parquet files, each a dict. Needs pyarrow.

    Args:
        paths: The files.
        columns: Which columns to read. By default all.
    """

    def __init__(self, paths: Paths, columns: Iterable[str] | None = None) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                f"ParquetFiles needs pyarrow, which isn't installed for {sys.executable}.",
                "Install it there: pip install pyarrow.",
                "ParquetFiles",
            )
        self._paths = _found(paths, "ParquetFiles")
        self._columns = None if columns is None else list(columns)

    def __len__(self) -> int:
        return len(self._paths)

    def open(self, shard: int) -> Reader:
        return _Rows(self._paths[shard], self._columns)

    def fingerprint(self) -> str:
        return f"{_fingerprint(self._paths)} {self._columns}"


class _Rows:
    def __init__(self, path: Path, columns: list[str] | None) -> None:
        from pyarrow.parquet import ParquetFile

        self._path, self._columns = path, columns
        self._file = ParquetFile(path)
        self._rows = self._rows_from(0)
        self._at = 0

    def __next__(self) -> Any:
        row = next(self._rows)
        self._at += 1
        return row

    def state(self) -> int:
        return self._at

    def restore(self, state: int) -> None:
        if state > self._file.metadata.num_rows:
            raise _shorter(
                self._path, f"{state} rows were read of it, and it has {self._file.metadata.num_rows}"
            )
        self._rows = self._rows_from(state)
        self._at = state

    def _rows_from(self, first: int) -> Iterator[Any]:
        """Row groups before the first row aren't read."""
        for group in range(self._file.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            if first < rows:
                yield from self._file.read_row_group(group, columns=self._columns).slice(first).to_pylist()
            first = max(0, first - rows)


def _found(paths: Paths, owner: str) -> list[Path]:
    """The files, in an order that doesn't depend on how a folder was listed."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = sorted(Path(path) for path in given)
    missing = [path for path in found if not path.is_file()]
    if missing or not found:
        raise ConfigError(
            f"{owner}: no file {missing[0]}." if missing else f"{owner}: no files.",
            "Give paths of files that every rank can read.",
            f"{owner}.paths",
        )
    return found


def _fingerprint(paths: list[Path]) -> str:
    """Names and sizes: the folder may be another one after a restart."""
    return " ".join(f"{path.name}:{path.stat().st_size}" for path in paths)


def _shorter(path: Path, sizes: str) -> DataError:
    return DataError(
        f"{path} is shorter than when the place in it was saved: {sizes}.",
        "Put the file back, or start a new run.",
    )
