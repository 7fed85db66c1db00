"""How the samples of one step are cut into micro-batches, and which rank gets which. Arithmetic only.

The cut doesn't depend on the number of ranks: micro-batch ``m`` has the samples ``m * micro_batch`` and
following of its step, on any rank. Micro-batches are dealt to ranks like cards, ``m`` to rank
``m % world_size``, so that micro-batches ``j`` of all ranks together are consecutive samples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """One micro-batch of a rank: places of samples in their step. Those after the first ``real`` are padding,
    which has weight 0.
    """

    offsets: tuple[int, ...]
    real: int


def micro_batches_in(samples: int, micro_batch: int) -> int:
    return -(-samples // micro_batch)


def deal(
    samples: int, global_batch: int, micro_batch: int, rank: int, world_size: int, even: bool
) -> list[Cut]:
    """A rank's micro-batches of a step: at least one, if need be of padding alone.

    With ``even``, all ranks get equally many in every step, each of ``micro_batch`` samples, as a program
    that is the same in all processes needs it.
    """
    number = micro_batches_in(samples, micro_batch)
    slots = -(-micro_batches_in(global_batch, micro_batch) // world_size) if even else 1
    cuts = [
        _cut(mine, samples, micro_batch, micro_batch if even else 0)
        for mine in range(rank, number, world_size)
    ]
    padding = Cut(_repeated(samples, micro_batch if even else min(micro_batch, samples)), 0)
    return cuts + [padding] * (slots - len(cuts))


def _cut(mine: int, samples: int, micro_batch: int, least: int) -> Cut:
    offsets = tuple(range(mine * micro_batch, min((mine + 1) * micro_batch, samples)))
    return Cut(offsets + _repeated(samples, least - len(offsets)), len(offsets))


def _repeated(samples: int, count: int) -> tuple[int, ...]:
    """Padding is made of the step's own samples. If one of them has no finite loss, padding adds nothing to
    that: 0 times it isn't finite, but neither is the mean of the step.
    """
    return tuple(at % samples for at in range(count))
