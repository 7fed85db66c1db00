"""``num_workers=0``: what is stored is stored as with workers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import everstep
from everstep import Checkpoint, RunConfig, ScalingConfig, Trainer
from everstep.driver import journal
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.store import open_store


def train(config: dict[str, list[int]]) -> None:
    step = 0
    checkpoint = everstep.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            step = int((Path(folder) / "step").read_text())
    config["began_at"].append(step)
    folder = tempfile.mkdtemp()
    (Path(folder) / "step").write_text(str(step + 1))
    everstep.report({"step": step + 1}, checkpoint=Checkpoint(folder))


def test_a_run_whose_journal_has_lost_an_archive_goes_on(tmp_path: Path) -> None:
    began_at: list[int] = []

    def fit() -> int:
        Trainer(
            train,
            train_loop_config={"began_at": began_at},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=str(tmp_path), if_finished="continue"),
        ).fit()
        return began_at[-1]

    assert fit() == 0
    store = ImmediateStore(open_store(tmp_path / "run")).child(journal.FOLDER)
    scan = complete(journal.scan_journal(store))
    log = journal.Journal(store, scan.next, scan.first, scan.archives)
    complete(log.compact())
    assert fit() == 1
    for archive in (tmp_path / "run" / journal.FOLDER).glob("archive-*"):
        archive.unlink()
    assert fit() == 2
    assert complete(journal.scan_journal(store)).is_whole, "it has a new beginning"
