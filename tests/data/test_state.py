"""Real workers train a GPT on a stream whose place is part of the state, and are killed and resized."""

from __future__ import annotations

import itertools
import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import everstep as train
from data.ranks import in_step, streams
from everstep.control.commands import Recovered
from everstep.data import JsonlFiles, Step, Stream
from everstep.journal import journal
from everstep.testing import LocalCluster

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

NEVER_S = 3600.0
MORE = 4
"""Steps that are trained after each thing that happened."""


class Training:
    """A run, in one ``fit()`` or several."""

    def __init__(self, folder: Path, **batch: Any) -> None:
        folder.mkdir()
        self.folder, self.batch, self.until = folder, {**batch, "seed": 1, "epochs": None}, folder / "until"
        self.seen: list[list[int]] = []
        self._rows: dict[int, dict[str, Any]] = {}

    def fit(
        self,
        workers: int | tuple[int, int],
        steps: int | None,
        *,
        killed_at: int | None = None,
        every_s: float = NEVER_S,
        pace_s: float = 0.0,
        engine: Any = "local",
        callbacks: tuple[train.UserCallback, ...] = (),
    ) -> None:
        from data.gpt import train_gpt
        from everstep.torch import TorchTrainer

        result = TorchTrainer(
            train_gpt,
            train_loop_config={
                "batch": self.batch,
                "until": str(self.until),
                "steps": steps,
                "killed_at": killed_at,
                "pace_s": pace_s,
            },
            scaling_config=train.ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=0.5),
            run_config=train.RunConfig(
                name="run",
                storage_path=str(self.folder),
                failure_config=train.FailureConfig(max_failures=-1),
                checkpoint_config=train.CheckpointConfig(storage_every_s=every_s, num_to_keep=2),
                callbacks=list(callbacks),
                if_finished="continue",
            ),
            engine=engine,
        ).fit()
        self.seen = result.return_value
        # Of a step that was lost and done again, the later row is that of the model that there is.
        self._rows |= {row["step"]: row for row in result.metrics_history}

    @property
    def rows(self) -> list[dict[str, Any]]:
        assert sorted(self._rows) == list(range(len(self._rows)))
        return [self._rows[step] for step in sorted(self._rows)]

    @property
    def curve(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    def restored_from(self) -> list[str]:
        """Where each recovery found the state."""
        found = [record for record in journal.read(self.folder / "run") if isinstance(record, Recovered)]
        return [record.state_from.split(",")[0] for record in found]

    def check_samples(self) -> None:
        """Exactly the global batch in every step, and in the history of the state every sample once."""
        assert {row["samples"] for row in self.rows} == {self.batch["global_batch"]}
        steps = zip(Stream(500, **self.batch, rank=0, world_size=1), self.rows, strict=False)
        assert self.seen == [[number for micro in step for number in micro.ids] for step, _ in steps]

    def check_place_in_storage(self) -> None:
        found = sorted(self.folder.glob("run/checkpoint_*/state-00000.json"))
        for index in map(json.loads, map(Path.read_text, found)):
            assert index["tree"]["data"]["step"] == index["step"] == len(index["tree"]["seen"]) > 0
        assert found


def furthest(one: Training, other: Training) -> float:
    return max(abs(a - b) for a, b in zip(one.curve, other.curve, strict=True))


def test_a_gpt_killed_on_three_workers_and_continued_on_two_has_the_undisturbed_curve(tmp_path: Path) -> None:
    """Neither divides the seven micro-batches of a step evenly. On three, sums depend on their order."""
    batch = {"global_batch": 14, "micro_batch": 2}
    undisturbed, disturbed = Training(tmp_path / "one", **batch), Training(tmp_path / "other", **batch)
    undisturbed.fit(3, 12)
    disturbed.fit(3, 7, killed_at=4)
    assert disturbed.restored_from() == ["memory"]
    assert disturbed.curve == undisturbed.curve[:7], "bit for bit at an equal number of workers"
    disturbed.fit(2, 12)
    disturbed.check_samples()
    disturbed.check_place_in_storage()
    assert furthest(disturbed, undisturbed) < 1e-6
    assert undisturbed.curve[-1] < undisturbed.curve[0]


def test_lanes_that_two_ranks_have_saved_are_restored_by_three(tmp_path: Path) -> None:
    """A rank saves the lanes that it reads. With another number of ranks, each needs what others saved."""
    from everstep.snapshots.content import Folder
    from everstep.snapshots.layout import Index, index_file
    from everstep.torch import State
    from everstep.torch.copying import Copiers
    from everstep.torch.state import CapturedTensors

    for shard in range(6):
        (tmp_path / f"{shard}.jsonl").write_text("".join(f"{10 * shard + line}\n" for line in range(7)))
    source = JsonlFiles(sorted(tmp_path.glob("*.jsonl")))
    options = {"global_batch": 6, "micro_batch": 1, "seed": 4, "epochs": None, "window": 3, "lanes": 6}

    def samples(group: list[Stream], steps: int) -> list[list[int]]:
        def of(step: tuple[Step, ...]) -> list[int]:
            return sorted(int(sample) for rank in step for micro in rank for sample in micro.batch)

        return [of(step) for step in itertools.islice(in_step(group), steps)]

    undisturbed = samples(streams(1, source, **options), 9)
    two = streams(2, source, **options)
    found = samples(two, 4)
    (tmp_path / "saved").mkdir()
    for rank, stream in enumerate(two):
        index = Index(stream.step, rank, 2, CapturedTensors({"data": stream}, rank, Copiers()).tree, {})
        (tmp_path / "saved" / index_file(rank)).write_bytes(index.encoded())
    three = streams(3, source, **options)
    for rank, stream in enumerate(three):
        State(data=stream).load(Folder(tmp_path / "saved"), rank)
    assert found + samples(three, 5) == undisturbed


class Trouble(train.UserCallback):
    """Kills a worker at each size, changes the number of hosts to each of ``sizes``, and ends training."""

    def __init__(self, cluster: LocalCluster, sizes: list[int], until: Path) -> None:
        self.cluster, self.until = cluster, until
        self.coming = list(sizes)
        self.sizes: list[int] = []
        self._killed: set[int] = set()
        self._strikes = True
        self._next = MORE

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        row = metrics[0]
        if not self.sizes or self.sizes[-1] != row["workers"]:
            self.sizes.append(row["workers"])
            self._strikes, self._next = True, row["step"] + MORE
        there = row["workers"] == len(self.cluster.slices)
        if not there or row["step"] < self._next or row["pid"] in self._killed:
            return
        self._next = row["step"] + MORE
        if self._strikes:
            self._strikes = False
            self._killed.add(row["pid"])
            os.kill(row["pid"], signal.SIGKILL)
        elif self.coming:
            self._resize(self.coming.pop(0))
        else:
            self.until.touch()

    def _resize(self, wanted: int) -> None:
        while len(self.cluster.slices) > wanted:
            self.cluster.remove_slice(list(self.cluster.slices)[-1])
        while len(self.cluster.slices) < wanted:
            self.cluster.add_slice(wait=False)


@pytest.mark.soak
def test_a_gpt_on_8_then_5_then_7_workers_and_back_has_the_undisturbed_curve(tmp_path: Path) -> None:
    batch = {"global_batch": 24, "micro_batch": 2}
    disturbed, undisturbed = Training(tmp_path / "disturbed", **batch), Training(tmp_path / "un", **batch)
    with LocalCluster(slices=8) as cluster:
        trouble = Trouble(cluster, [5, 7, 8], disturbed.until)
        disturbed.fit((5, 8), None, every_s=1.0, pace_s=0.05, engine=cluster, callbacks=(trouble,))
    seen = iter(trouble.sizes)
    assert all(size in seen for size in (8, 5, 7, 8)), trouble.sizes
    undisturbed.fit(8, len(disturbed.rows))
    disturbed.check_samples()
    disturbed.check_place_in_storage()
    apart = furthest(disturbed, undisturbed)
    print(f"{len(disturbed.rows)} steps, workers {trouble.sizes}, apart by {apart:.1e}")
    assert apart < 1e-6
    smaller = next(at for at, row in enumerate(disturbed.rows) if row["workers"] != 8)
    assert smaller > MORE, "a worker was killed before that"
    assert disturbed.curve[:smaller] == undisturbed.curve[:smaller], "bit for bit at an equal number"
    assert "memory" in disturbed.restored_from()
