"""The data sets that a ``Trainer`` hands to its workers. Their places are saved with every checkpoint."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import ConfigError

if TYPE_CHECKING:
    from everstep.data.shard import DatasetShard

logger = logging.getLogger("everstep")

TRAIN_DATASET_KEY = "train"
"""The same string as Ray Train's: the name that most scripts give to their only data set."""

PLACE_FILE = ".everstep-data-{rank}.json"
"""In a checkpoint, from each rank that saves: the places of its data sets, by name."""


class Datasets:
    """What one worker was handed, and what it has made of it."""

    def __init__(self, rank: int, given: Mapping[str, Any], places: Callable[[], Mapping[str, Any]]) -> None:
        """``places``: those in the checkpoint that the worker starts from."""
        self._rank = rank
        self._given = given
        self._places = places
        self._shards: dict[str, DatasetShard] = {}

    def shard(self, name: str | None) -> Any:
        if name is None:
            name = next(iter(self._given)) if len(self._given) == 1 else TRAIN_DATASET_KEY
        if name not in self._given:
            there = ", ".join(map(repr, self._given)) or "none"
            raise ConfigError(
                f"get_dataset_shard({name!r}): the Trainer was given {there}.",
                f"Give it: Trainer(…, datasets={{{name!r}: …}}).",
                f"Trainer.datasets[{name!r}]",
            )
        source = self._given[name]
        if isinstance(source, DividedElsewhere):
            return source.for_this_worker()
        if name not in self._shards:
            self._shards[name] = self._opened(name, source)
        return self._shards[name]

    def _opened(self, name: str, source: Any) -> DatasetShard:
        from everstep.data.group import rank_here
        from everstep.data.shard import DatasetShard

        shard = DatasetShard(name, source, rank_here())
        places = self._places()
        if name in places:
            shard.load_state_dict(places[name])
        elif places is not NOWHERE:
            logger.warning(
                "the checkpoint has no place of the data set %r, which begins anew: it was saved without "
                "get_dataset_shard(%r), or by code of your own (NO_UPLOAD)",
                name,
                name,
            )
        return shard

    def put_into(self, folder: Path, attempt: str, index: int) -> None:
        """Save the places in a checkpoint that is about to be reported: that with this index of an attempt.

        A script may report a folder again, or one that it has restored into. What is in it of other workers'
        places is then of an earlier checkpoint, and goes.
        """
        if not self._shards:
            return
        for path in folder.iterdir():
            if is_place_file(path.name) and _is_older(path, attempt, index):
                path.unlink(missing_ok=True)
        saved = {"attempt": attempt, "index": index, "places": self.places()}
        (folder / PLACE_FILE.format(rank=self._rank)).write_text(json.dumps(saved))

    def places(self) -> dict[str, Any]:
        """Where this worker is in its data sets, by name."""
        return {name: shard.state_dict() for name, shard in self._shards.items()}


def _is_older(path: Path, attempt: str, index: int) -> bool:
    try:
        saved = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # a rank that shares the folder removes or writes it just now
        return False
    return bool(saved.get("attempt") != attempt or saved["index"] < index)


NOWHERE: Mapping[str, Any] = {}
"""There is no checkpoint."""


class DividedElsewhere(ABC):
    """A data set that isn't Everstep's to divide: an engine's own. Its position isn't saved."""

    @abstractmethod
    def for_this_worker(self) -> Any: ...


def agreed_places(found: Mapping[str, bytes]) -> Mapping[str, Any]:
    """The places in a checkpoint, by the files of its ranks: for each data set those that differ.

    All ranks must have been at the same. Only of a stream with lanes, each rank has its own of them.
    """
    places: dict[str, list[Any]] = {}
    first_file: dict[str, str] = {}
    for path, content in sorted(found.items()):
        for name, place in json.loads(content)["places"].items():
            known = places.setdefault(name, [])
            first = first_file.setdefault(name, path)
            if place in known:
                continue
            known.append(place)
            if len(known) > 1 and not all("lanes" in each for each in known):
                raise ConfigError(
                    f"The checkpoint has two places of the data set {name!r}: {first} says {known[0]}, "
                    f"{path} says {place}.",
                    "Ranks must take equally many batches before they report a checkpoint together.",
                    f"Trainer.datasets[{name!r}]",
                )
    return places


def is_place_file(path: str) -> bool:
    start, end = PLACE_FILE.split("{rank}")
    return path.startswith(start) and path.endswith(end)


def checked_datasets(given: object) -> dict[str, Any]:
    """What ``Trainer(datasets=…)`` was given."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            f"Trainer.datasets is a {type(given).__name__}, expected data sets by name.",
            "Give datasets={'train': dataset}.",
            "Trainer.datasets",
        )
    for name, source in given.items():
        if not is_rays(source):
            _check(name, source)
    return dict(given)


def _check(name: str, source: Any) -> None:
    from everstep.data.sources import length_of
    from everstep.data.stream import Stream

    if isinstance(source, Stream):
        if source.given_rank is not None:
            raise ConfigError(
                f"Trainer.datasets[{name!r}] is a Stream with rank={source.given_rank.rank}: every worker "
                "would get the samples of that rank.",
                "Leave out rank=… and world_size=…: each worker has its own.",
                f"Trainer.datasets[{name!r}]",
            )
        return
    try:
        length_of(source)
    except ConfigError as error:
        raise ConfigError(
            f"Trainer.datasets[{name!r}] is a {type(source).__name__}, expected a map-style data set with "
            "samples, or a Stream.",
            "Give something with len(dataset) and dataset[i], or everstep.data.Stream(…); on the Ray engine "
            "a ray.data.Dataset.",
            f"Trainer.datasets[{name!r}]",
        ) from error


def is_rays(source: object) -> bool:
    """Whether it is a data set of Ray Data's."""
    return any(kind.__module__.startswith("ray.data") for kind in type(source).__mro__)
