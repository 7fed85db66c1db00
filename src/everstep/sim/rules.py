"""What must hold of a run's storage, under all faults of drivers, agents, networks and the store.

Every change of the store is seen here at the instant at which it takes effect, with a model of the journal
that knows which objects count: those that were made at the end of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from everstep.control import commands as c
from everstep.identity import Incarnation
from everstep.journal import journal, records
from everstep.journal.history import History
from everstep.journal.records import AnyRecord
from everstep.saved.checkpoints import CheckpointRef, in_order
from everstep.sim.disk import Disk, View
from everstep.sim.time import RuleBroken
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.checkpoints import MANIFEST, Manifest

RUN = "run/"
_LOG = f"{RUN}{journal.FOLDER}/"
_decoder = msgspec.json.Decoder(Manifest)


@dataclass(frozen=True)
class Written:
    """A manifest."""

    data: bytes
    manifest: Manifest
    openings: int
    """How often the run had been taken when it was written."""


@dataclass
class Known:
    """What the journal says of a checkpoint."""

    order: int | None = None
    """None: it was never committed there. A manifest may have another: that of a driver that was replaced,
    and wrote it before the one that records it.
    """
    damaged: bool = False


class Rules:
    """Watches the disk."""

    def __init__(self, disk: Disk) -> None:
        self._view = View(disk, RUN)
        self.records: list[AnyRecord] = []
        """What the journal must say: all that was ever written at its end, in order."""
        self._known: dict[str, Known] = {}
        """By folder."""
        self.given_up: set[str] = set()
        self.manifests: dict[str, Written] = {}
        """All that were ever written, by folder."""
        self.damaged = False
        """Something of the journal was damaged by a fault: what it hit is lost."""
        self.owner = ""
        """The driver that has taken the run last."""
        self.spoilt: set[str] = set()
        """Checkpoints whose files were damaged by a fault."""
        self.shards: Mapping[str, set[int]] = {}
        """The ranks that have something to add, by folder."""
        self._highest = 0
        self._taken_at: list[int] = []
        """The numbers at which the run was taken."""
        self._strays: set[str] = set()
        """Objects of the journal that were not made at its end."""
        self._behind: dict[str, str] = {}
        """Drivers that have made one, and which."""
        self.keep: int | None = None
        """How many checkpoints retention keeps."""
        self._snapshot = records.Compacted([], 1)
        disk.watcher = self

    # ------------------------------------------------------------------ every change

    def created(self, key: str, data: bytes) -> None:
        if key.startswith(_LOG) and key.removeprefix(_LOG).isdigit():
            self._appended(int(key.removeprefix(_LOG)), data)
        elif key.endswith(f"/{MANIFEST}") and not (manifest := _decoder.decode(data)).void:
            folder = _folder(key)
            if {*manifest.ranks} != self.shards.get(folder, {*manifest.ranks}):
                raise RuleBroken(f"5: {folder} is committed with the shards of {manifest.ranks} only")
            self.manifests.setdefault(_folder(key), Written(data, manifest, len(self._taken_at)))

    def _appended(self, number: int, data: bytes) -> None:
        if number <= self._highest:
            self._strays.add(f"{_LOG}{journal.key_of(number)}")
            return  # by a driver that was behind: it is no part of the journal
        self._highest = number
        for record in records.decode(data):
            match record:
                case records.Compacted():
                    self._snapshot = record
                    if self.damaged:
                        self._read_new_beginning(record.archives)
                case records.Deleted():
                    self._give_up(record.folder)
                case records.Committed():
                    self._known[record.folder] = Known(record.order)  # it can be read again, too
                case records.Damaged():
                    self._known.setdefault(record.folder, Known()).damaged = True
                case records.Opened():
                    self._taken_at.append(number)
                    self.owner = record.nonce
                case _:
                    pass
            if not isinstance(record, records.Compacted):
                self.records.append(record)

    def _read_new_beginning(self, archives: Sequence[str]) -> None:
        """A journal that was damaged may begin anew, with records that were never written before."""
        for name in archives:
            for record in records.decode(self._view.disk.objects.get(_LOG + name, b"")):
                if isinstance(record, records.Deleted):
                    self._give_up(record.folder)

    def _give_up(self, folder: str) -> None:
        """Only retention gives up what is committed, and never the newest."""
        if folder in self.manifests and folder not in self.given_up:
            if self.keep is None:
                raise RuleBroken(f"4: {folder} is given up, and all checkpoints are to be kept")
            if self._is_newest(self._ref(folder)):
                raise RuleBroken(f"4: {folder} is given up, and is the newest")
            if self._is_pending(folder):
                raise RuleBroken(f"4: {folder} is given up, and waits for its validation")
        self.given_up.add(folder)

    def _is_newest(self, ref: CheckpointRef) -> bool:
        """Of the checkpoints that the journal knows, and not as damaged: a file that has rotted is noticed
        when it is read, and a manifest whose writer got no answer when it is written again.
        """
        known = {folder for folder, one in self._known.items() if one.order is not None}
        damaged = {folder for folder, one in self._known.items() if one.damaged}
        gone = self.manifests.keys() & (self.given_up | damaged)
        there = {folder: self._ref(folder) for folder in self.manifests.keys() - gone}
        if self.damaged:
            # Nobody knows what was let go before: how replica groups compare is known no more.
            others = (other for other in there.values() if other != ref)
            return all(other.epoch < ref.epoch or _precedes(other, ref) for other in others)
        let_go: dict[Incarnation, CheckpointRef] = {}
        for one in sorted(map(self._ref, gone & known), key=lambda one: one.index):
            let_go[one.incarnation] = one
        known.add(ref.folder)
        return in_order((there[f] for f in there.keys() & known), let_go.values())[-1:] == [ref]

    def _is_pending(self, folder: str) -> bool:
        """Whether its validation was asked for, and isn't over. Nobody knows what a damaged journal lost."""
        if self.damaged or not self.manifests[folder].manifest.validation:
            return False
        return not any(isinstance(r, records.Validated) and r.folder == folder for r in self.records)

    def appending(self, process: str, key: str, data: bytes) -> None:
        """A driver that is behind may write the same again, and a claim to the run, and nothing else."""
        is_record = key.startswith(_LOG) and key.removeprefix(_LOG).isdigit()
        if is_record and self._behind.get(process, key) != key:
            if not isinstance(next(records.decode(data)), records.Opened):
                raise RuleBroken(f"8: {process} writes on, and was replaced")
            del self._behind[process]

    def appended(self, process: str, key: str) -> None:
        """A driver believes that this object is its own. It can't know better where all that says so is lost,
        and what isn't isn't listed yet.
        """
        if key in self._strays and not (self.damaged and self._view.disk.lag.made_s):
            self._behind[process] = key

    def deleting(self, key: str) -> None:
        if key.startswith(_LOG):
            self._deleting_record(key.removeprefix(_LOG))
            return
        folder = _folder(key)
        if folder.startswith("checkpoint_") and folder not in self.given_up:
            what = "a committed checkpoint" if folder in self.manifests else "a folder"
            raise RuleBroken(f"4: {what} is removed, and the journal does not give it up: {key}")

    def _deleting_record(self, name: str) -> None:
        if name.isdigit():
            if int(name) in self._taken_at and not self.damaged:
                raise RuleBroken(f"8: {name} is free again, and who was replaced there may append")
            if self._snapshot.upto <= int(name) <= self._highest and not self.damaged:
                raise RuleBroken(f"4: {name} is removed from the journal, and is in no archive")
        elif name in self._snapshot.archives:
            raise RuleBroken(f"4: {name} is removed, and the journal needs it")

    def lost(self, key: str) -> None:
        """By a fault. The last number of all is free again then: nobody can know that it was used."""
        name = key.removeprefix(_LOG)
        if name.isdigit() and int(name) == self._highest:
            names = [path.removeprefix(_LOG) for path in self._view.disk.below(_LOG)]
            self._highest = max((int(name) for name in names if name.isdigit()), default=0)

    def lists_caught_up(self) -> None:
        """A manifest that the journal doesn't know is found by the next driver that takes the run."""
        for folder, written in self.manifests.items():
            self.manifests[folder] = replace(written, openings=len(self._taken_at))

    # ------------------------------------------------------------------ a start of workers

    def _ref(self, folder: str) -> CheckpointRef:
        found = self.manifests[folder].manifest
        order = self._known.get(folder, Known()).order
        order = found.order if order is None else order
        return CheckpointRef(folder, found.epoch, found.index, found.group, found.generation, order)

    def known(self) -> list[str]:
        """Those that can be restored, and that the journal surely knows: where lists lag, nobody can know of
        others, nor of what damage has taken from it.
        """
        if self.damaged:
            return []
        known = {folder for folder, one in self._known.items() if one.order is not None}
        return [folder for folder in self.restorable() if folder in known]

    def restorable(self) -> list[str]:
        """Checkpoints that exist and are whole, by epoch and index."""
        found = []
        for folder, written in self.manifests.items():
            manifest = written.manifest
            there = (self._view.exists(f"{folder}/{file.path}") for file in manifest.files)
            if folder not in self.given_up and folder not in self.spoilt and all(there):
                found.append((manifest.epoch, manifest.index, folder))
        return [folder for _, _, folder in sorted(found)]

    def check_start(self, checkpoint: str | None, at_least: str | None) -> None:
        """``at_least``: what a driver that starts without workers must have found."""
        if checkpoint is not None and checkpoint not in self.manifests:
            raise RuleBroken(f"5: {checkpoint} is restored, and was never committed")
        if at_least is None or at_least in self.given_up | self.spoilt:
            return
        if (checkpoint or "") < at_least:
            raise RuleBroken(f"5: {checkpoint} is restored, and {at_least} is newer and whole")

    # ------------------------------------------------------------------ at the end

    def check_end(self) -> None:
        for folder, written in self.manifests.items():
            if folder not in self.given_up and self._view.read(f"{folder}/{MANIFEST}") != written.data:
                raise RuleBroken(f"9: the manifest of {folder} is gone, and nobody gave it up")
        log = ImmediateStore(self._view).child(journal.FOLDER)
        scan = complete(journal.scan_journal(log))
        history = History.of(scan.records())
        rows = [bytes(row) for row in history.metrics]
        if not self.damaged:
            if scan.damage:
                raise RuleBroken(f"the journal is damaged, by nobody: {scan.damage}")
            found = [record for record in scan.records() if not isinstance(record, records.Compacted)]
            if found != self.records:
                raise RuleBroken(_difference(found, self.records))
            if len(rows) != len(set(rows)):
                raise RuleBroken("rows of metrics are there twice")
            waiting = [kept.ref.folder for kept in history.pending()]
            if waiting and history.outcome == c.Outcome.FINISHED.value:
                raise RuleBroken(f"9: the run has finished, and {waiting} wait for their validation")
            charged, spent = sum(history.ledger.until().total.values()), worker_seconds(self.records)
            if abs(charged - spent) > 0.001 * spent:
                raise RuleBroken(f"the ledger has {charged:.3f} s of workers, and they had {spent:.3f} s")
        if not self.damaged:
            # What a driver writes that has been replaced is found when the run is taken the next time.
            before = {f for f, written in self.manifests.items() if written.openings < len(self._taken_at)}
            lost = before - self.given_up - {*history.checkpoints, *history.damaged}
            if lost:
                raise RuleBroken(f"4: the journal does not know of {sorted(lost)}, which are committed")

    def rows(self) -> set[bytes]:
        return {
            bytes(row)
            for record in self.records
            if isinstance(record, records.Metrics)
            for row in record.rows
        }


def worker_seconds(found: Iterable[AnyRecord]) -> float:
    """Seconds from each opening of the run to its last record, times the workers that were wanted. Until
    it has ended, it goes on between two drivers; of clocks that differ, none sets it back.
    """
    spent = offset = 0.0
    wanted, now, ended = 0, 0.0, True
    for record in found:
        if isinstance(record, records.Opened):
            offset = record.wall - record.at
        at = getattr(record, "at", None)
        if at is None:
            continue
        before, now = now, max(now, at + offset)
        if isinstance(record, records.Opened):
            spent += 0.0 if ended else wanted * (now - before)
            wanted, ended = max(1, record.workers_max), False
            continue
        spent += wanted * (now - before)
        ended = ended or isinstance(record, records.Closed)
    return spent


def _precedes(one: CheckpointRef, other: CheckpointRef) -> bool:
    """Whether they are of one incarnation, in this order."""
    return one.incarnation == other.incarnation and one.index < other.index


def _folder(key: str) -> str:
    return key.removeprefix(RUN).split("/")[0]


def _difference(found: Sequence[AnyRecord], expected: Sequence[AnyRecord]) -> str:
    for number, record in enumerate(expected):
        if number >= len(found):
            return f"the journal has lost {len(expected) - len(found)} records, the first is {record}"
        if found[number] != record:
            return f"record {number} of the journal is {found[number]}, and {record} was written"
    return f"the journal has {len(found) - len(expected)} records too many"
