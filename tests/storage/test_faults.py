"""Storage that errs, stalls and loses answers: a store behind a proxy that breaks what passes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.errors import StorageAccessError, StorageError
from everstep.storage import checkpoints, restore
from everstep.storage.bucket import PIECE
from everstep.storage.retry import LONGEST_PAUSE_S, attempts
from everstep.storage.store import Limits, Store, open_store, probe
from storage import blocking
from storage.faults import Fault, FaultyProxy
from storage.server import S3Server

PASSING = [Fault.ERROR, Fault.BUSY, Fault.RESET, Fault.STALL, Fault.LOST, Fault.LATE, Fault.CUT]


@pytest.mark.parametrize("fault", PASSING)
def test_one_fault_is_not_seen_by_who_makes_an_object(
    faulty: Store, proxy: FaultyProxy, fault: Fault
) -> None:
    proxy.next("PUT", fault)
    assert faulty.create("a", b"mine")
    assert faulty.read("a") == b"mine"
    assert [done for _, done in proxy.done] == [fault]


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.LATE])
def test_a_lost_answer_does_not_make_somebody_elses_object_ours(
    faulty: Store, proxy: FaultyProxy, fault: Fault
) -> None:
    assert faulty.create("a", b"by nonce 1")
    proxy.next("PUT", fault)
    assert not faulty.create("a", b"by nonce 2")
    assert faulty.read("a") == b"by nonce 1"


@pytest.mark.parametrize("fault", PASSING)
def test_one_fault_is_not_seen_by_who_reads_lists_or_deletes(
    faulty: Store, proxy: FaultyProxy, fault: Fault
) -> None:
    faulty.create("a/b", b"1")
    proxy.next("GET", fault)
    assert faulty.read("a/b") == b"1"
    proxy.next("GET", fault)
    assert [file.path for file in faulty.list("a")] == ["a/b"]
    proxy.next("HEAD", fault)
    assert faulty.exists("a/b")
    proxy.next("POST", fault)
    faulty.delete(["a/b"])
    assert not faulty.exists("a/b")
    assert [done for _, done in proxy.done] == [fault] * 4


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize(
    ("method", "of"), [("PUT", "partNumber=2"), ("POST", "uploads"), ("POST", "uploadId"), ("GET", "big")]
)
def test_one_fault_in_a_file_of_several_pieces_is_not_seen(
    faulty: Store,
    proxy: FaultyProxy,
    make_file: Callable[..., Path],
    tmp_path: Path,
    fault: Fault,
    method: str,
    of: str,
) -> None:
    contents = os.urandom(2 * PIECE + 1)
    source = make_file("big", contents)
    proxy.next(method, fault, containing=of)
    record = faulty.upload(source, "big", "rank 0")
    assert record is not None
    faulty.download("big", tmp_path / "back", record)
    assert (tmp_path / "back").read_bytes() == contents
    assert [done for _, done in proxy.done] == [fault]


@pytest.mark.parametrize("seed", range(3))
def test_checkpoints_are_whole_where_one_request_in_ten_fails(
    faulty: Store, proxy: FaultyProxy, make_file: Callable[..., Path], tmp_path: Path, seed: int
) -> None:
    proxy.at_random(0.1, seed, Fault.ERROR, Fault.BUSY, Fault.RESET, Fault.LOST, Fault.CUT)
    probe(faulty)
    for step in range(3):
        folder = checkpoints.folder_name(1, step, None, 0)
        parts = []
        for rank in range(2):
            source = make_file(f"{step}/{rank}/shard-{rank}", os.urandom(PIECE + 1)).parent
            for small in range(5):
                (source / f"small-{rank}-{small}").write_text(f"{step} {small}")
            share = checkpoints.Share(folder, rank, 1, step)
            parts.append(checkpoints.upload_part(faulty, share, source).record)
        blocking.commit(faulty, folder, 1, step, parts)
        place = blocking.fetch(faulty.child(folder), tmp_path / "cache")
        assert (place / "small-1-4").read_text() == f"{step} 4"
        assert (place / "shard-0").read_bytes() == (
            tmp_path / "files" / str(step) / "0" / "shard-0"
        ).read_bytes()
    assert proxy.done


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.RESET, Fault.STALL])
def test_a_store_that_never_answers_is_an_error_inside_the_deadline(
    server: S3Server, proxy: FaultyProxy, make_file: Callable[..., Path], fault: Fault
) -> None:
    limits = Limits(operation_s=1.0, answer_s=0.3, piece_s=0.3, slowest_rate=float(1 << 40))
    store = open_store(f"s3://{server.bucket()}/run", server.options(proxy.port), limits)
    big = make_file("big", bytes(PIECE + 1))
    proxy.always(fault)
    for work in (
        lambda: store.create("a", b""),
        lambda: store.read("a"),
        lambda: store.list("a"),
        lambda: store.upload(big, "big", "rank 0"),
    ):
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"s3://.*attempts in 1 s failed") as caught:
            work()
        assert not isinstance(caught.value, StorageAccessError)
        assert time.monotonic() - began < 5.0


def test_the_next_checkpoint_is_saved_once_storage_is_back(
    faulty: Store, proxy: FaultyProxy, make_file: Callable[..., Path]
) -> None:
    source = make_file("one/f", b"1").parent
    proxy.always(Fault.BUSY)
    with pytest.raises(StorageError):
        checkpoints.upload_part(faulty, checkpoints.Share("c1", 0, 1, 1), source)
    proxy.always(None)
    part = checkpoints.upload_part(faulty, checkpoints.Share("c2", 0, 1, 2), source)
    blocking.commit(faulty, "c2", 1, 2, [part.record])
    assert restore.verify(faulty.child("c2")).index == 2
    assert blocking.read_manifest(faulty, "c1") is None


def test_credentials_that_are_refused_are_not_tried_again(faulty: Store, proxy: FaultyProxy) -> None:
    proxy.always(Fault.FORBIDDEN)
    with pytest.raises(StorageAccessError, match=r"s3://.*[Cc]heck that these credentials may"):
        probe(faulty)
    assert len([request for request in proxy.seen if request.method == "PUT"]) == 1
    for work in (lambda: faulty.read("a"), lambda: faulty.list("a"), lambda: faulty.folders()):
        with pytest.raises(StorageAccessError):
            work()


def test_a_bucket_that_is_not_there_is_named_with_the_remedy(server: S3Server) -> None:
    store = open_store("s3://never-made/run", server.options())
    with pytest.raises(StorageAccessError, match="Make the bucket never-made first"):
        probe(store)
    with pytest.raises(StorageAccessError, match="never-made"):
        store.read("a")
    with pytest.raises(StorageAccessError, match="never-made"):
        store.list()


def test_an_option_that_is_not_known_is_named() -> None:
    with pytest.raises(StorageAccessError, match=r"regoin.*storage_options"):
        probe(open_store("s3://bucket/run", {"regoin": "eu-west-1"}))


def test_options_win_over_the_environment_and_the_environment_is_enough(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = server.bucket()
    for name, value in server.options().items():
        monkeypatch.setenv(name.upper() if name != "allow_http" else "AWS_ALLOW_HTTP", value)
    probe(open_store(f"s3://{bucket}/run"))
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    probe(open_store(f"s3://{bucket}/run", server.options()))


def test_secrets_are_not_in_what_is_printed(server: S3Server) -> None:
    options = {**server.options(), "aws_secret_access_key": "hush"}
    store = open_store("s3://never-made/run", options)
    assert "hush" not in repr(store)
    with pytest.raises(StorageAccessError) as caught:
        probe(store)
    assert "hush" not in str(caught.value)


def test_pauses_grow_to_a_bound_are_drawn_at_random_and_end_with_the_deadline() -> None:
    now, slept = 0.0, []

    def sleep(pause: float) -> None:
        nonlocal now
        slept.append(pause)
        now += pause

    left = list(attempts(60.0, clock=lambda: now, sleep=sleep, draw=lambda: 1.0))
    assert slept[:5] == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert max(slept) == LONGEST_PAUSE_S
    assert left[0] == 60.0
    assert now < 60.0
    assert len(left) == len(slept) + 1
    now = 0.0
    assert len(list(attempts(0.0, clock=lambda: now, sleep=sleep))) == 1


def test_retries_leave_the_users_random_numbers_alone() -> None:
    import random

    random.seed(1)
    before = random.getstate()
    list(attempts(1.0, clock=iter([0.0, 0.0, 0.0, 2.0, 2.0, 2.0]).__next__, sleep=lambda _: None))
    assert random.getstate() == before
