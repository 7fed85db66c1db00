"""A stream's loader beside a plain ``DataLoader`` over the same data set, with as many processes: samples a
second, and how long the first batch takes after a restart far out in a large data set.

Both sides take turns in this process. What a sample costs is arithmetic on arrays, as decoding is.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.figures import Outcome, Row, Sample
from bench.options import Options

TITLE = "samples through a torch DataLoader, with and without a Stream"
ROUNDS, PEER_ROUNDS = 15, 15

PEER = "DataLoader"
_MICRO, _GLOBAL, _PROCESSES = 32, 128, 2
_SAMPLES = 4_096
_LARGE, _FAR = 20_000_000, 1_000_000_000


class Pictures:
    """Small pictures that take a while to make: ``work`` passes over 3 × 64 × 64 numbers."""

    def __init__(self, length: int, work: int) -> None:
        self.length, self.work = length, work

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        import numpy

        picture = numpy.full((3, 64, 64), index % 251, dtype=numpy.float32)
        for _ in range(self.work):
            picture = picture * 1.0001 + 0.5
        return picture, index


def measure(options: Options) -> Outcome:
    cheap = Pictures(_SAMPLES, work=1)
    dear = Pictures(_SAMPLES, work=12)
    rows = [
        _both(f"cheap samples, {_PROCESSES} processes", "/s", options, _ours(cheap), _theirs(cheap)),
        _both(f"dearer samples, {_PROCESSES} processes", "/s", options, _ours(dear), _theirs(dear)),
        _both("processor time, cheap samples", "s", options, _busy(_ours(cheap)), _busy(_theirs(cheap))),
        _both("processor time, dearer samples", "s", options, _busy(_ours(dear)), _busy(_theirs(dear))),
        _both(
            "processor time, dearer samples, no processes",
            "s",
            options,
            _busy(_ours(dear, processes=0)),
            _busy(_theirs(dear, processes=0)),
        ),
        _both(
            "first batch after a restart",
            "ms",
            options,
            lambda: _first_batch(_resumed(_LARGE, _LARGE // 2).loader(num_workers=_PROCESSES)),
            lambda: _first_batch(_plain(Pictures(_LARGE, 1))),
        ),
        _both(
            "first batch after a restart, small data set",
            "ms",
            options,
            lambda: _first_batch(_resumed(_SAMPLES, _SAMPLES // 2).loader(num_workers=_PROCESSES)),
            lambda: _first_batch(_plain(Pictures(_SAMPLES, 1))),
        ),
        Row(
            "resume at sample 10⁹, to the first step",
            "ms",
            Sample(
                tuple(_timed(lambda: next(iter(_resumed(3 * _FAR, _FAR)))) for _ in range(options.rounds))
            ),
        ),
    ]
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    notes = (
        "each round measures both sides, one right after the other, and the ratio is the median of the "
        f"rounds' ratios (p10 .. p90). Load average at the end {load}",
        f"micro-batches of {_MICRO}, steps of {_GLOBAL}; prefetch_factor and all else by default. Everstep "
        "seeds the generators of random numbers for each micro-batch, DataLoader once in each process",
        f"processor time: of {_SAMPLES:,} samples, the loader's processes included; says more than the rate "
        "on a machine that does something else as well. Without processes, the training loop's generators of "
        "random numbers are put back after each micro-batch, which takes about 0.2 ms, most of it NumPy's",
        f"the cursor at sample 10⁹ has {_cursor_bytes()} bytes as JSON, of at most 256",
        f"first batch: of {_LARGE:,} samples, and of {_SAMPLES:,} in the small data set. The plain loader "
        "shuffles, and begins at the beginning; to get it to the place where the run stopped would come on "
        "top",
    )
    return Outcome("data", TITLE, tuple(rows), notes)


def _both(
    what: str, unit: Any, options: Options, ours: Callable[[], float], theirs: Callable[[], float]
) -> Row:
    """Both sides in turn, and who begins changes: what else the machine does hits both alike, and the ratio
    is that of rounds next to each other. Before the first round each runs once for the imports' sake.
    """
    paired = options.peer_rounds > 0
    sides: list[tuple[Callable[[], float], list[float]]] = [(ours, []), *([(theirs, [])] if paired else [])]
    for measured, _ in sides:
        measured()
    for at in range(options.rounds):
        for measured, found in sides if at % 2 == 0 else reversed(sides):
            gc.collect()  # ends the processes of the loader before, which would else end in this round
            found.append(measured())
    options.say(f"data: {what}: done")
    samples = [Sample(tuple(values)) for _, values in sides]
    return Row(what, unit, samples[0], samples[1] if paired else None, against=PEER, paired=paired)


def _ours(dataset: Pictures, processes: int = _PROCESSES) -> Callable[[], float]:
    def rate() -> float:
        from everstep.data import Stream

        stream = Stream(dataset, global_batch=_GLOBAL, micro_batch=_MICRO, rank=0, world_size=1)
        steps = iter(stream.loader(num_workers=processes))
        return _rate(micro.batch for step in steps for micro in step)

    return rate


def _theirs(dataset: Pictures, processes: int = _PROCESSES) -> Callable[[], float]:
    return lambda: _rate(iter(_plain(dataset, processes)))


def _plain(dataset: Pictures, processes: int = _PROCESSES) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=_MICRO, shuffle=True, num_workers=processes)  # type: ignore[var-annotated]


def _rate(batches: Iterator[Any]) -> float:
    """Samples a second after the first batches, which wait for processes to start."""
    for _ in range(2 * _PROCESSES):
        next(batches)
    began = time.perf_counter()
    count = _SAMPLES // _MICRO - 2 * _PROCESSES
    for _ in range(count):
        next(batches)
    return count * _MICRO / (time.perf_counter() - began)


def _busy(work: Callable[[], float]) -> Callable[[], float]:
    """Seconds of processor time that it takes, in this process and those that it starts and ends."""

    def taken() -> float:
        before = _processor_time()
        work()
        gc.collect()  # ends a loader's processes
        return _processor_time() - before

    return taken


def _processor_time() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _first_batch(loader: Any) -> float:
    def first() -> None:
        batch = next(iter(loader))
        if hasattr(batch, "finish"):
            next(iter(batch))

    return _timed(first)


def _resumed(length: int, sample: int) -> Any:
    from everstep.data import Stream

    options: dict[str, Any] = {"global_batch": _GLOBAL, "micro_batch": _MICRO, "rank": 0, "world_size": 1}
    source = length if length > _LARGE else Pictures(length, 1)
    stream = Stream(source, **options)
    stream.load_state_dict({**stream.state_dict(), "step": sample // _GLOBAL, "sample": sample})
    return stream


def _cursor_bytes() -> int:
    return len(json.dumps(_resumed(3 * _FAR, _FAR).state_dict()))


def _timed(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began
