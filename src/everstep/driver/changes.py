"""What differs between two starts of a run, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from everstep.journal import records

_NAMED = 3
"""Files; of more, only how many there are."""


def changes(before: records.Opened, config: str, workers: tuple[int, int], code: Mapping[str, str]) -> str:
    """``code``: digests of what the workers run, by name (``payload.code_digests``)."""
    found = [] if before.config == config else ["train_loop_config"]
    was = (before.workers_min, before.workers_max)
    if was != workers:
        least, most = was
        found.append(
            f"ScalingConfig.num_workers, which was {least if least == most else f'{least} to {most}'}"
        )
    if before.code:
        names = [name for name in {**before.code, **code} if before.code.get(name) != code.get(name)]
        # The number of workers is a part of it that has been named.
        found += [name for name in names if not os.path.isabs(name) and (name != SCALING or was == workers)]
        found += _files([name for name in names if os.path.isabs(name)])
    return "; ".join(found) or "the training function, a module that it imports, or ScalingConfig"


SCALING = "ScalingConfig"


def _files(paths: list[str]) -> list[str]:
    named = [os.path.relpath(path) for path in sorted(paths)[:_NAMED]]
    more = len(paths) - len(named)
    return [*named, *([f"{more} more file{'s' if more > 1 else ''}"] if more else [])]
