"""Getting a checkpoint back: whole, once a host, or with the name of what is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from everstep import Checkpoint
from everstep.errors import DamagedCheckpointError, StorageError
from everstep.storage import checkpoints, restore
from everstep.storage.bucket import PIECE
from everstep.storage.store import Store, open_store
from everstep.worker.restored import RestoredCheckpoint
from processes import wait_for
from storage import blocking
from storage.blocking import fetch
from storage.faults import Fault, FaultyProxy, Request
from storage.server import S3Server

FILES = {"model": b"weights" * 1000, "shards/0": bytes(PIECE + 100), "empty": b"", "shards/1": b"x"}


def save(run: Store, tmp_path: Path, folder: str = "c", files: dict[str, bytes] = FILES) -> Store:
    """A committed checkpoint."""
    source = tmp_path / f"source-{folder}"
    for name, contents in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(contents)
    part = checkpoints.upload_part(run, checkpoints.Share(folder, 0, 1, 1), source)
    blocking.commit(run, folder, 1, 1, [part.record])
    return run.child(folder)


def contents_of(folder: Path) -> dict[str, bytes]:
    names = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in names
        if not path.name.startswith(".") and ".parts" not in path.parts
    }


def test_a_checkpoint_is_fetched_whole(store: Store, tmp_path: Path) -> None:
    checkpoint = save(store, tmp_path)
    place = fetch(checkpoint, tmp_path / "cache")
    assert contents_of(place) == FILES
    assert (str(place) == checkpoint.address()) == checkpoint.is_local


def test_what_was_never_committed_can_not_be_fetched(store: Store, tmp_path: Path) -> None:
    store.create("c/model", b"half of it")
    for ask in (restore.verify, lambda checkpoint: fetch(checkpoint, tmp_path / "cache")):
        with pytest.raises(DamagedCheckpointError, match=r"\.manifest\.json is missing"):
            ask(store.child("c"))


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"x",
    "corrupted": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "deleted": lambda data: None,
}


# An empty file can be neither truncated nor corrupted.
POSSIBLE = [
    (name, damage)
    for name in [*FILES, ".manifest.json"]
    for damage in DAMAGES
    if FILES.get(name, b"x") or damage in ("longer", "deleted")
]


@pytest.mark.parametrize(("name", "damage"), POSSIBLE)
def test_any_one_file_that_is_damaged_is_named(store: Store, tmp_path: Path, name: str, damage: str) -> None:
    checkpoint = save(store, tmp_path)
    before = checkpoint.read(name)
    assert before is not None
    after = DAMAGES[damage](before)
    if after is None:
        checkpoint.delete([name])
    else:
        checkpoint.replace(name, after)
    with pytest.raises(DamagedCheckpointError) as caught:
        restore.verify(checkpoint)
    assert caught.value.file == name
    with pytest.raises(DamagedCheckpointError) as caught:
        fetch(checkpoint, tmp_path / "cache")
    assert caught.value.file == name
    assert name in str(caught.value)
    assert checkpoint.address() in str(caught.value)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_any_byte_goes_unseen(data: st.DataObject, tmp_path: Path) -> None:
    run = open_store(f"memory://{os.urandom(8).hex()}")
    files = {"a": b"some weights", "b/c": b"\0" * 9}
    checkpoint = save(run, tmp_path, files=files)
    name = data.draw(st.sampled_from([*files, ".manifest.json"]))
    before = checkpoint.read(name)
    assert before is not None
    at = data.draw(st.integers(0, len(before) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != before[at]))
    checkpoint.replace(name, before[:at] + bytes([byte]) + before[at + 1 :])
    try:
        manifest = restore.verify(checkpoint)
    except StorageError:
        return
    # Some changes of the manifest do no harm: what it says of the files is the same.
    assert name == ".manifest.json"
    assert {file.path for file in manifest.files} == set(files)


def test_damage_after_the_first_look_is_seen_at_the_second(tmp_path: Path) -> None:
    checkpoint = save(open_store(tmp_path / "run"), tmp_path)
    cache = tmp_path / "cache"
    fetch(checkpoint, cache)
    model = tmp_path / "run" / "c" / "model"
    model.write_bytes(b"W" + model.read_bytes()[1:])
    with pytest.raises(DamagedCheckpointError, match="model has other contents"):
        fetch(checkpoint, cache)


@pytest.mark.parametrize("seen_before", [False, True])
def test_a_file_that_was_added_is_named_and_costs_nothing(
    tmp_path: Path, seen_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save(open_store(tmp_path / "run"), tmp_path)
    if seen_before:
        fetch(checkpoint, tmp_path / "cache")
    (tmp_path / "run" / "c" / "shard-of-another").write_bytes(b"w")
    assert fetch(checkpoint, tmp_path / "cache") == tmp_path / "run" / "c"
    assert "shard-of-another was added after it was committed" in caplog.text


def test_what_file_systems_and_tools_leave_in_a_folder_is_no_damage(tmp_path: Path) -> None:
    checkpoint = save(open_store(tmp_path / "run"), tmp_path)
    (tmp_path / "run" / "c" / ".nfs0001").write_bytes(b"x")
    assert fetch(checkpoint, tmp_path / "cache") == tmp_path / "run" / "c"


def test_a_folder_is_restored_although_there_is_no_room_for_a_note_about_it(tmp_path: Path) -> None:
    checkpoint = save(open_store(tmp_path / "run"), tmp_path)
    (tmp_path / "file").touch()
    assert fetch(checkpoint, tmp_path / "file" / "cache") == Path(checkpoint.address())
    (Path(checkpoint.address()) / "model").write_bytes(b"scribble")
    with pytest.raises(DamagedCheckpointError):
        fetch(checkpoint, tmp_path / "file" / "cache")


def test_a_remote_checkpoint_that_finds_no_room_says_where(tmp_path: Path) -> None:
    checkpoint = save(open_store(f"memory://{os.urandom(8).hex()}/run"), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/cache.*XDG_CACHE_HOME"):
        fetch(checkpoint, tmp_path / "file" / "cache")


def test_a_folder_is_read_through_once_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save(open_store(tmp_path / "run"), tmp_path)
    fetch(checkpoint, tmp_path / "cache")
    monkeypatch.setattr(restore, "verify", lambda _: pytest.fail("read again"))
    assert fetch(checkpoint, tmp_path / "cache") == tmp_path / "run" / "c"


def test_metadata_that_the_user_changed_is_no_damage(store: Store, tmp_path: Path) -> None:
    checkpoint = save(store, tmp_path, files={"model": b"1", ".metadata.json": b"{}"})
    checkpoint.replace(".metadata.json", b'{"a": 1}')
    restore.verify(checkpoint)
    place = fetch(checkpoint, tmp_path / "cache")
    assert (place / ".metadata.json").read_text() == '{"a": 1}'


# ---------------------------------------------------------------------- one download a host

_FETCH = """
import sys
from pathlib import Path
from everstep.storage import restore
from everstep.storage.store import open_store
with restore.borrow(open_store(sys.argv[1], eval(sys.argv[2])), Path(sys.argv[3])) as place:
    print(place)
"""


def fetching(address: str, options: dict[str, str], cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _FETCH, address, repr(options), str(cache)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_of_one_host_share_one_download(
    faulty: Store, proxy: FaultyProxy, server: S3Server, tmp_path: Path
) -> None:
    checkpoint = save(faulty, tmp_path)
    proxy.seen.clear()
    options = server.options(proxy.port)
    processes = [fetching(checkpoint.address(), options, tmp_path / "cache") for _ in range(4)]
    places = {process.communicate()[0] for process in processes}
    assert len(places) == 1
    assert contents_of(Path(places.pop().strip())) == FILES
    assert len(pieces(proxy, "shards/0")) == 2
    assert len(pieces(proxy, "model")) == 1


def test_a_download_that_was_killed_is_gone_on_with_by_the_next(
    faulty: Store, proxy: FaultyProxy, server: S3Server, tmp_path: Path
) -> None:
    checkpoint = save(faulty, tmp_path)
    proxy.seen.clear()

    def stall_the_large_one(request: Request) -> Fault | None:
        return Fault.STALL if request.method == "GET" and "shards/0" in request.path else None

    proxy.judge = stall_the_large_one
    options = server.options(proxy.port)
    victim = fetching(checkpoint.address(), options, tmp_path / "cache")
    wait_for(lambda: pieces(proxy, "shards/1") and pieces(proxy, "shards/0"), "a half-done download")
    proxy.always(None)
    heirs = [fetching(checkpoint.address(), options, tmp_path / "cache") for _ in range(2)]
    victim.kill()
    victim.wait()
    assert victim.stdout is not None
    victim.stdout.close()
    for heir in heirs:
        place = Path(heir.communicate()[0].strip())
        assert contents_of(place) == FILES


def pieces(proxy: FaultyProxy, name: str) -> list[Request]:
    return [r for r in list(proxy.seen) if r.method == "GET" and r.path.split("?")[0].endswith(f"/c/{name}")]


def test_a_copy_in_the_cache_needs_only_a_look_at_its_manifest(
    faulty: Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    checkpoint = save(faulty, tmp_path)
    place = fetch(checkpoint, tmp_path / "cache")
    proxy.judge = lambda request: None if request.path.endswith(".manifest.json") else Fault.RESET
    assert fetch(checkpoint, tmp_path / "cache") == place


def test_the_copy_of_a_run_that_was_removed_is_not_taken_for_another_of_the_same_name(tmp_path: Path) -> None:
    run = open_store(f"memory://{os.urandom(8).hex()}/run")
    old = save(run, tmp_path, "c", {"weights": b"old", "optimizer": b"old"})
    assert contents_of(fetch(old, tmp_path / "cache"))["weights"] == b"old"
    run.clear("c")
    new = save(run, tmp_path / "new", "c", {"weights": b"new"})
    assert contents_of(fetch(new, tmp_path / "cache")) == {"weights": b"new"}


def test_a_copy_that_somebody_changed_is_mended(faulty: Store, tmp_path: Path) -> None:
    checkpoint = save(faulty, tmp_path)
    place = fetch(checkpoint, tmp_path / "cache")
    (place / "model").write_bytes(b"scribble")
    (place / "shards" / "1").unlink()
    assert contents_of(fetch(checkpoint, tmp_path / "cache")) == FILES


def test_older_copies_go_but_not_while_they_are_read(tmp_path: Path) -> None:
    run = open_store(f"memory://{os.urandom(8).hex()}/run")
    cache = tmp_path / "cache"
    folders = [save(run, tmp_path, f"c{i}", {"f": str(i).encode()}) for i in range(5)]
    with restore.borrow(folders[0], cache) as first:
        for at, checkpoint in enumerate(folders[1:]):
            place = fetch(checkpoint, cache)
            os.utime(cache / f"{place.name}.verified", (at, at))
        assert (first / "f").read_bytes() == b"0"
        copies = [path.name for path in cache.iterdir() if path.is_dir()]
        assert first.name in copies
        assert len(copies) <= 2 + restore.KEPT_COPIES
    assert fetch(folders[4], cache)
    assert (cache / place.name / "f").read_bytes() == b"4"


def test_a_user_without_a_home_has_a_cache_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert restore.default_cache() == tmp_path / "home" / "everstep" / "checkpoints"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    cache = restore.default_cache()
    assert cache.parent.parent == tmp_path
    assert cache.parent.stat().st_mode & 0o077 == 0
    cache.parent.chmod(0o777)
    with pytest.raises(StorageError, match="not this user's alone"):
        restore.default_cache()


# ---------------------------------------------------------------------- Checkpoint at a URI


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_checkpoint_at_a_uri_reads_as_one_in_a_folder(server: S3Server, home: Path) -> None:
    address = f"s3://{server.bucket()}/run"
    save(open_store(address, server.options()), home)
    checkpoint = Checkpoint(f"{address}/c/", storage_options=server.options())
    with checkpoint.as_directory() as folder:
        assert contents_of(Path(folder)) == FILES
        with checkpoint.as_directory() as again:
            assert again == folder
    assert contents_of(Path(checkpoint.to_directory())) == FILES
    target = home / "target"
    assert checkpoint.to_directory(target) == str(target)
    assert contents_of(target) == FILES


_COPY = """
import sys
from everstep import Checkpoint
print(Checkpoint(sys.argv[1], storage_options=eval(sys.argv[2])).to_directory(sys.argv[3] or None))
"""


@pytest.mark.parametrize("together", [False, True])
def test_processes_of_one_host_share_one_download_to_directories_of_their_own(
    faulty: Store, proxy: FaultyProxy, server: S3Server, home: Path, together: bool
) -> None:
    address = save(faulty, home).address()
    Checkpoint(address, storage_options=server.options()).set_metadata({"step": 1})
    proxy.seen.clear()
    options, target = repr(server.options(proxy.port)), str(home / "target") if together else ""
    command = [sys.executable, "-c", _COPY, address, options, target]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    places = [Path(process.communicate()[0].strip()) for process in processes]
    assert len(set(places)) == (1 if together else 3)
    for place in places:
        assert contents_of(place) == FILES
        assert Checkpoint(place).get_metadata() == {"step": 1}
    assert len(pieces(proxy, "shards/0")) == 2
    assert len(pieces(proxy, "model")) == 1
    (places[0] / "model").write_bytes(b"the user's own")
    with Checkpoint(address, storage_options=server.options()).as_directory() as folder:
        assert contents_of(Path(folder)) == FILES


def test_metadata_at_a_uri(server: S3Server, home: Path) -> None:
    address = f"s3://{server.bucket()}/run"
    save(open_store(address, server.options()), home)
    checkpoint = Checkpoint(f"{address}/c", storage_options=server.options())
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"step": 1})
    checkpoint.update_metadata({"loss": 0.5})
    assert checkpoint.get_metadata() == {"step": 1, "loss": 0.5}
    assert "hush" not in repr(Checkpoint("s3://b/c", storage_options={"aws_secret_access_key": "hush"}))


def test_a_folder_at_a_uri_without_a_manifest_is_copied_each_time(server: S3Server, home: Path) -> None:
    address = f"s3://{server.bucket()}/mine"
    store = open_store(address, server.options())
    store.create("sub/f", b"one")
    checkpoint = Checkpoint(address, storage_options=server.options())
    with checkpoint.as_directory() as folder:
        assert contents_of(Path(folder)) == {"sub/f": b"one"}
    assert not os.path.exists(folder)
    store.replace("sub/f", b"two")
    with checkpoint.as_directory() as folder:
        assert contents_of(Path(folder)) == {"sub/f": b"two"}


def test_a_uri_where_nothing_is_says_so(server: S3Server, home: Path) -> None:
    checkpoint = Checkpoint(f"s3://{server.bucket()}/gone", storage_options=server.options())
    with pytest.raises(StorageError, match=r"no checkpoint at s3://.*/gone"), checkpoint.as_directory():
        pass


def test_what_a_worker_restores_is_not_copied_without_its_manifest(tmp_path: Path) -> None:
    """Which goes first when a checkpoint is removed, maybe while it is being restored."""
    checkpoint = save(open_store(tmp_path / "run"), tmp_path)
    checkpoint.delete([checkpoints.MANIFEST])
    with pytest.raises(DamagedCheckpointError, match="manifest.json is missing"):
        RestoredCheckpoint(checkpoint.address()).to_directory(tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_damaged_checkpoint_is_not_copied_out(store: Store, home: Path) -> None:
    checkpoint = save(store, home)
    checkpoint.replace("model", b"w" * len(FILES["model"]))
    with pytest.raises(DamagedCheckpointError, match="model has other contents"):
        restore.copy_out(checkpoint, home / "target")
