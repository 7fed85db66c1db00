"""What every store does, whatever it is made of."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from everstep.errors import ConfigError, DamagedCheckpointError, StorageAccessError
from everstep.storage.bucket import PIECE
from everstep.storage.folder import FolderStore
from everstep.storage.store import FileRecord, Store, open_store, probe
from storage.server import S3Server


def test_an_object_is_made_once(store: Store) -> None:
    assert store.create("a/b", b"mine")
    assert not store.create("a/b", b"yours")
    assert store.read("a/b") == b"mine"


def test_making_the_same_object_again_is_no_conflict(store: Store) -> None:
    assert store.create("a", b"mine, by nonce 1")
    assert store.create("a", b"mine, by nonce 1")


def test_of_many_that_make_one_object_at_once_one_does(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: store.create("a", f"writer {i}".encode()), range(8)))
    assert made.count(True) == 1
    assert store.read("a") == f"writer {made.index(True)}".encode()


def test_what_is_not_there_is_none(store: Store) -> None:
    assert store.read("a/b") is None
    assert store.digest("a/b") is None
    assert not store.exists("a/b")
    assert list(store.list("a")) == list(store.folders("a")) == list(store.folders()) == []


def test_listings_are_in_order_and_by_whole_names(store: Store) -> None:
    for key in ("ab/x", "a/2", "a/10", "a/sub/deep", "b"):
        store.create(key, key.encode())
    assert [file.path for file in store.list()] == ["a/10", "a/2", "a/sub/deep", "ab/x", "b"]
    assert store.list("a") == [
        FileRecord("a/10", 4, ""),
        FileRecord("a/2", 3, ""),
        FileRecord("a/sub/deep", 10, ""),
    ]
    assert [file.path for file in store.list("a", after="a/10")] == ["a/2", "a/sub/deep"]
    assert store.folders() == ["a", "ab"]
    assert store.folders("a") == ["sub"]


def test_deleting_is_done_when_nothing_is_there(store: Store) -> None:
    for key in ("a/x", "a/y", "a/sub/z", "b"):
        store.create(key, b"")
    store.delete(["a/x", "a/never"])
    store.delete(["a/x"])
    store.delete([])
    assert not store.exists("a/x")
    store.clear("a")
    store.clear("a")
    assert [file.path for file in store.list()] == ["b"]


def test_a_child_is_the_same_store_seen_from_below(store: Store) -> None:
    child = store.child("run").child("c")
    child.create("x", b"1")
    assert store.read("run/c/x") == b"1"
    assert [file.path for file in child.list()] == ["x"]
    assert child.address("x") == store.address("run/c/x")
    assert child.address() == f"{store.address()}/run/c"


def test_a_replaced_object_is_the_new_one(store: Store) -> None:
    store.replace("a", b"one")
    store.replace("a", b"two")
    assert store.read("a") == b"two"


def test_a_store_survives_a_pickle(store: Store) -> None:
    store.create("a", b"1")
    again = pickle.loads(pickle.dumps(store.child("x")))
    assert again.create("b", b"2")
    assert store.read("x/b") == b"2"


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE + 12345])
def test_a_file_comes_back_as_it_went(
    store: Store, make_file: Callable[..., Path], tmp_path: Path, size: int
) -> None:
    contents = os.urandom(size)
    record = store.upload(make_file("f", contents), "shards/0", "rank 0")
    assert record == FileRecord("shards/0", size, sha256(contents).hexdigest())
    assert store.digest("shards/0") == record
    back = tmp_path / "back" / "0"
    assert store.download("shards/0", back, record) == record
    assert back.read_bytes() == contents
    assert os.listdir(back.parent) == ["0"]


@pytest.mark.parametrize("size", [10, PIECE + 10])
def test_the_first_owner_of_a_name_keeps_it(store: Store, make_file: Callable[..., Path], size: int) -> None:
    mine, yours = make_file("mine", b"m" * size), make_file("yours", b"y" * size)
    record = store.upload(mine, "f", "rank 0")
    assert store.upload(yours, "f", "rank 1") is None
    assert store.upload(make_file("short", b"short"), "f", "rank 1") is None
    assert store.upload(mine, "f", "rank 0") == record
    assert store.digest("f") == record


def test_of_two_that_bring_one_name_at_once_one_keeps_it_and_its_digest_is_right(
    store: Store, make_file: Callable[..., Path]
) -> None:
    files = [make_file(str(i), bytes([i]) * (PIECE + i * PIECE // 2)) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda i: store.upload(files[i], "f", f"rank {i}"), range(3)))
    (kept,) = [record for record in found if record is not None]
    assert store.digest("f") == kept


def test_a_download_that_is_not_what_was_saved_is_named_and_leaves_nothing(
    store: Store, make_file: Callable[..., Path], tmp_path: Path
) -> None:
    record = store.upload(make_file("f", b"contents"), "f", "rank 0")
    assert record is not None
    target = tmp_path / "target" / "f"
    for expected, said in [
        (FileRecord("f", 8, "0" * 64), "f has other contents"),
        (FileRecord("f", 9, record.sha256), "f has 8 bytes, 9 were saved"),
    ]:
        with pytest.raises(DamagedCheckpointError, match=said):
            store.download("f", target, expected)
    with pytest.raises(DamagedCheckpointError, match="gone is missing"):
        store.download("gone", target)
    assert not target.parent.exists() or not os.listdir(target.parent)


def test_a_probe_finds_nothing_wrong_and_leaves_nothing_behind(store: Store) -> None:
    probe(store)
    assert list(store.list()) == []


def test_a_store_that_lets_objects_be_made_twice_is_refused(tmp_path: Path) -> None:
    class Careless(FolderStore):
        def create(self, key: str, data: bytes) -> bool:
            self.replace(key, data)
            return True

    with pytest.raises(StorageAccessError, match="does not refuse an object that exists already"):
        probe(Careless(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\nb"])
def test_a_key_that_would_mean_different_things_in_different_stores_is_refused(
    store: Store, key: str
) -> None:
    with pytest.raises(ConfigError, match="can't name an object"):
        store.create(key, b"")


_names = st.text(
    st.characters(categories=("L", "N", "P", "S"), exclude_characters="/"), min_size=1, max_size=40
).filter(lambda name: name not in (".", "..") and name.isprintable() and len(name.encode()) < 200)


@settings(max_examples=60)
@given(names=st.lists(_names, min_size=1, max_size=4, unique=True))
def test_names_of_files_are_kept_as_they_are(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for store in (
        open_store(tmp_path_factory.mktemp("folder")),
        open_store(f"memory://{os.urandom(8).hex()}"),
    ):
        for name in names:
            store.create(f"a/{name}", name.encode())
        assert {file.path for file in store.list("a")} == {f"a/{name}" for name in names}
        assert all(store.read(f"a/{name}") == name.encode() for name in names)


def test_awkward_names_go_through_s3(server: S3Server) -> None:
    store = open_store(f"s3://{server.bucket()}", server.options())
    names = ["a b", "ü", "100%", "%41", "x#y", "a?b", "q&r=1", "a+b", "c:d", ".hidden", "[1]", "\\", "~"]
    for name in names:
        assert store.create(name, name.encode())
    assert [file.path for file in store.list()] == sorted(names)
    assert all(store.read(name) == name.encode() for name in names)


@pytest.mark.parametrize("address", ["hdfs://a/b", "s3://", "s3:///prefix", "https://host/path"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a store"):
        open_store(address)


def test_a_prefix_is_kept_as_it_is_written() -> None:
    assert open_store("s3://bucket/runs/a#b?c/").address("x") == "s3://bucket/runs/a#b?c/x"
    assert open_store("file:///data/my%20runs").address() == "/data/my runs"


_TRANSFER = """
import sys
from pathlib import Path
from everstep.storage.store import open_store

def resident(what):  # not ru_maxrss: a process inherits that
    (line,) = [line for line in open("/proc/self/status") if line.startswith(what)]
    return int(line.split()[1]) * 1024

store = open_store(sys.argv[1], eval(sys.argv[2]))
store.create("warm", b"up")
source = Path(sys.argv[3])
before = resident("VmRSS")
record = store.upload(source, "f", "rank 0")
store.download("f", source.with_name("back"), record)
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_file_is_never_in_memory_as_a_whole(kind: str, server: S3Server, tmp_path: Path) -> None:
    size = (512 if kind == "folder" else 128) << 20
    source = tmp_path / "big"
    with source.open("wb") as out:
        out.truncate(size)
    address = str(tmp_path / "store") if kind == "folder" else f"s3://{server.bucket()}"
    done = subprocess.run(
        [sys.executable, "-c", _TRANSFER, address, repr(server.options()), str(source)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < int(done.stdout) < 112 << 20 < size
