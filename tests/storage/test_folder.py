"""What only a folder has to deal with: drafts, permissions, and a disk that is full."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.errors import StorageAccessError, StorageError
from everstep.storage import checkpoints, folder as folders, restore
from everstep.storage.store import open_store, probe
from storage import blocking


@pytest.fixture(params=["unnamed drafts", "named drafts"])
def drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems with and without files that have no name."""
    if request.param == "named drafts":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)


@pytest.mark.usefixtures("drafts")
def test_a_file_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    with folders.Draft(tmp_path) as draft:
        draft.write(memoryview(b"half"))
        assert list(open_store(tmp_path).list()) == []
        draft.write(memoryview(b" and half"))
        assert draft.publish(tmp_path / "f")
        assert not draft.publish(tmp_path / "f")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"half and half"


@pytest.mark.usefixtures("drafts")
def test_folders_and_files_are_the_users_alone_also_those_in_between(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a" / "b")
    store.create("c/x", b"")
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(tmp_path / "a/b/c/x").st_mode) == 0o600


def test_a_path_below_a_file_is_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageAccessError, match="storage_path.*Not a directory"):
        probe(open_store(tmp_path / "file" / "below"))


_IN_A_SMALL_FILE_SYSTEM = """
import resource, sys
from pathlib import Path
from everstep.errors import StorageError
from everstep.storage import checkpoints
from everstep.storage.store import open_store
limit = int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
run = open_store(sys.argv[1])
try:
    checkpoints.upload_part(run, checkpoints.Share(sys.argv[2], 0, 1, 1), Path(sys.argv[4]))
except StorageError as error:
    print(error)
else:
    print("done")
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder with room for 4 MiB: a file system of that size, or a limit on the size of files."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = (
        sys.platform == "linux"
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True
        ).returncode
        == 0
    )
    try:
        yield place, 0 if mounted else 4 << 20
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_and_the_next_checkpoint_that_fits_is_saved(
    tmp_path: Path, small_disk: tuple[Path, int]
) -> None:
    place, limit = small_disk
    source = tmp_path / "source"
    source.mkdir()

    def upload(name: str, size: int) -> str:
        (source / "weights").write_bytes(bytes(size))
        arguments = [str(place / "run"), name, str(limit), str(source)]
        return subprocess.run(
            [sys.executable, "-c", _IN_A_SMALL_FILE_SYSTEM, *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert upload("fits", 1 << 20) == "done\n"
    run = open_store(place / "run")
    blocking.commit(run, "fits", 1, 1, blocking.read_parts(run, "fits"))
    said = upload("too-big", 8 << 20)
    assert "no space left" in said
    assert "keep fewer checkpoints" in said
    assert blocking.read_parts(run, "too-big") == []
    assert list(run.list("too-big")) == []
    assert blocking.read_manifest(run, "fits") is not None
    assert upload("fits-too", 1 << 20) == "done\n"


def test_an_error_of_the_disk_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        open_store(tmp_path).create("a", b"")
    monkeypatch.undo()
    assert list(open_store(tmp_path).list()) == []


def test_something_that_is_no_file_is_not_left_out_in_silence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        checkpoints.upload_part(open_store(tmp_path / "run"), checkpoints.Share("c", 0, 1, 1), source)


def test_a_folder_that_is_removed_while_something_is_written_into_it_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folders.FolderStore(tmp_path)
    publish = folders.Draft.publish

    def publish_too_late(self: folders.Draft, target: Path) -> bool:
        shutil.rmtree(target.parent)
        return publish(self, target)

    monkeypatch.setattr(folders.Draft, "publish", publish_too_late)
    with pytest.raises(StorageError, match="was removed while manifest was written"):
        store.create("checkpoint/manifest", b"x")
    monkeypatch.undo()
    assert store.create("checkpoint/manifest", b"x")


def test_a_folder_that_goes_while_a_file_in_it_is_deleted_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folders.FolderStore(tmp_path)
    store.create("checkpoint/manifest", b"x")
    sync = folders.sync_folder

    def sync_too_late(folder: Path) -> None:
        shutil.rmtree(folder)
        sync(folder)

    monkeypatch.setattr(folders, "sync_folder", sync_too_late)
    store.delete(["checkpoint/manifest"])
    assert list(store.list()) == []


@pytest.fixture
def unlistable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file in it, that the disk can't list."""
    folder = tmp_path / "unlistable"
    folder.mkdir()
    (folder / "file").write_text("x")
    real = os.scandir

    def scandir(path: str | Path = ".") -> object:
        if os.fspath(path) == str(folder):
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return folder


def test_a_folder_that_can_not_be_listed_is_not_an_empty_one(unlistable: Path) -> None:
    with pytest.raises(StorageError, match="Input/output error"):
        open_store(unlistable).list()


def test_no_checkpoint_is_saved_without_the_files_that_can_not_be_listed(
    unlistable: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").write_text("m")
    run = open_store(tmp_path.parent / f"{tmp_path.name}-run")
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.upload_part(run, checkpoints.Share("c", 0, 1, 1), tmp_path)
    assert list(run.list()) == []


def test_a_draft_that_was_left_behind_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    """A process that is killed while it copies into a folder of the user's leaves one, and that folder may be
    reported later.
    """
    source = tmp_path / "source"
    source.mkdir()
    (source / "model").write_text("m")
    draft = folders.Draft(source, named=True)
    draft.write(memoryview(b"half of something"))
    run = open_store(tmp_path / "run")
    part = checkpoints.upload_part(run, checkpoints.Share("c", 0, 1, 1, 0, 0, 1), source)
    blocking.commit(run, "c", 1, 1, [part.record])
    assert [file.path for file in restore.verify(run.child("c")).files] == ["model"]
    with draft:
        pass


def test_a_folder_that_was_moved_and_linked_can_be_cleared(tmp_path: Path) -> None:
    run = open_store(tmp_path / "run")
    run.create("c/model", b"m")
    (tmp_path / "run" / "c").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "c").symlink_to(tmp_path / "elsewhere")
    run.clear("c")
    assert run.folders() == []
    assert (tmp_path / "elsewhere" / "model").exists(), "what lies outside of a run isn't Everstep's"
