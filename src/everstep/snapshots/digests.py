"""Checksums of what lies in memory."""

from __future__ import annotations

import hashlib
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from everstep.snapshots.segments import Segment

BLOCK = 1 << 20
"""Bytes that are summed up into one number."""
_MOST_THREADS = 8


def digest(segment: Segment) -> bytes:
    """Of a file in memory: SHA-256 of its size, of the sum of each block as 64-bit integers, modulo 2⁶⁴,
    little-endian, and of the bytes after the last whole integer. It finds what was torn or flipped, at about
    the speed of memory.
    """
    import numpy  # where there are tensors, there is NumPy

    memory = segment.map()
    each = BLOCK // 8
    count = len(memory) // 8
    numbers = numpy.frombuffer(memory, dtype=numpy.int64, count=count)
    whole = count // each
    blocks = numbers[: whole * each].reshape(whole, each)
    # The program that trains needs processors, too: with as many threads as there are, its steps took longer.
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 4, whole // 64))
    with ThreadPoolExecutor(threads) as pool:  # NumPy adds up without Python's lock
        found = [int(n) for some in pool.map(_row_sums, numpy.array_split(blocks, threads)) for n in some]
    if whole * each < count:
        found.append(int(numbers[whole * each :].sum()))
    sums = struct.pack(f"<{len(found)}q", *found) + memory[count * 8 :]
    return hashlib.sha256(struct.pack("<Q", segment.size) + sums).digest()


def _row_sums(blocks: Any) -> Any:
    return blocks.sum(axis=1)
