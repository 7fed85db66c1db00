"""A worker's words are kept until a driver has dealt with them, in memory and then on disk, and none is lost
when the disk is full.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import given, strategies as st

from everstep.agent.spool import Spool


class Disk:
    """Takes ``room`` more bytes, and writes as much of the last piece as fits, as real ones do."""

    def __init__(self) -> None:
        self.room = 0
        self._write = os.pwrite

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, data[: self.room], offset)
        self.room -= written
        return written


steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("acknowledge"), st.integers(0, 100)),
        st.tuples(st.just("free"), st.integers(0, 200)),
    ),
    max_size=80,
)


@given(steps)
def test_what_is_not_acknowledged_is_given_again_byte_for_byte(
    actions: list[tuple[str, bytes | int]],
) -> None:
    disk = Disk()
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.pwrite", disk.pwrite):
        spool = Spool(Path(folder) / "spool", in_memory=64, on_disk=1000, segment=50)
        everything = b""
        acknowledged = 0
        for what, how in actions:
            if isinstance(how, bytes):
                spool.append(how)  # as the last words of a worker are, whether there is room or not
                everything += how
            elif what == "acknowledge":
                acknowledged = max(acknowledged, len(everything) * how // 100)
                spool.acknowledge(acknowledged)
            else:
                disk.room += how
                spool.make_room()
            kept = list(spool.chunks())
            assert spool.acknowledged == acknowledged
            assert spool.end == len(everything)
            assert b"".join(data for _, data in kept) == everything[acknowledged:]
            offset = acknowledged
            for at, data in kept:
                assert at == offset
                offset += len(data)
            if not disk.room and not spool.waits_for_disk:
                assert not spool.full or len(everything) - acknowledged >= 1000
        spool.acknowledge(len(everything))
        assert list(spool.chunks()) == []
        assert list(Path(folder).iterdir()) == []
        assert not spool.full


def test_it_says_when_it_is_full(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", in_memory=10, on_disk=20)
    spool.append(b"x" * 10)
    assert not spool.full
    spool.append(b"x" * 20)
    assert spool.full
    spool.acknowledge(30)
    assert not spool.full


def test_what_the_disk_refuses_is_kept_and_written_once_there_is_room(tmp_path: Path) -> None:
    disk = Disk()
    with mock.patch("os.pwrite", disk.pwrite):
        spool = Spool(tmp_path / "spool", in_memory=10, on_disk=1000)
        disk.room = 7
        spool.append(b"in memory!")
        spool.append(b"half of this")
        assert spool.full
        assert spool.waits_for_disk
        assert b"".join(data for _, data in spool.chunks()) == b"in memory!half of this"
        disk.room = 100
        spool.make_room()
        assert not spool.full
        assert b"".join(data for _, data in spool.chunks()) == b"in memory!half of this"


def test_a_frame_that_was_cut_by_a_full_disk_goes_on_once_what_came_before_is_acknowledged(
    tmp_path: Path,
) -> None:
    """Its end has not been read yet, so it can't be acknowledged itself: it must not wait for the disk."""
    disk = Disk()
    with mock.patch("os.pwrite", disk.pwrite):
        spool = Spool(tmp_path / "spool", in_memory=10, on_disk=1000)
        spool.append(b"whole one!")
        spool.append(b"half")
        assert spool.full
        spool.acknowledge(10)
        assert not spool.full
        spool.append(b" rest")
        assert list(spool.chunks()) == [(10, b"half"), (14, b" rest")]


def test_space_on_disk_is_given_back_as_it_is_acknowledged(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", in_memory=0, on_disk=1000, segment=10)
    for _ in range(10):
        spool.append(b"0123456789")
    assert len(list(tmp_path.iterdir())) == 10
    spool.acknowledge(75)
    assert len(list(tmp_path.iterdir())) == 3
