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
from everstep.storage import checkpoints, folder as folders
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
