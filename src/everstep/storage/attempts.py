"""Which attempts of a run, and which incarnations of its replica groups, have begun: as storage shows it
beside the journal. Folders are named after them, so no number is used twice, also if the journal is lost and
those folders have been removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from everstep.identity import Incarnation
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.checkpoints import NAMES, OURS

_NOTED = re.compile(r"\.e(?P<epoch>\d+)(g(?P<group>\d+)\.(?P<generation>\d+))?")
"""How the name of a note begins: of an attempt, or of a report that claims a name."""


async def note(store: AsyncStore, epoch: int, generations: Iterable[tuple[int, int]] = ((0, 0),)) -> None:
    """For the owner of the run, before anything is named after them. ``generations``: by replica group."""
    later = {f"g{group}.{generation}" if generation else "" for group, generation in generations}
    for which in sorted(later):
        await store.create(f"{NAMES}/.e{epoch}{which}", b"")


async def begun(store: AsyncStore, folders: Iterable[str], last_epoch: int) -> list[Incarnation]:
    """Those that were noted, and those after which these folders are named. ``last_epoch``: the last that is
    known already. A list may lag behind: what comes after the last in it is asked for by name.
    """
    notes = [file.path.removeprefix(f"{NAMES}/") for file in await store.list(NAMES)]
    found = [*map(OURS.fullmatch, folders), *map(_NOTED.match, notes)]
    numbers = (one.group("epoch", "group", "generation") for one in found if one is not None)
    noted = [Incarnation(*(int(number or 0) for number in each)) for each in numbers]
    next_epoch = 1 + max([last_epoch, *(one.epoch for one in noted)])
    while await store.exists(f"{NAMES}/.e{next_epoch}"):
        noted.append(Incarnation(next_epoch, 0, 0))
        next_epoch += 1
    return noted
