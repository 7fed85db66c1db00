"""A worker's words are kept until a driver has dealt with them, in memory and then on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, strategies as st

from everstep.agent.spool import Spool

steps = st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.integers(0, 100)), max_size=60)


@given(steps)
def test_what_is_not_acknowledged_is_given_again_byte_for_byte(actions: list[bytes | int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(Path(folder) / "spool", in_memory=64, on_disk=1000)
        everything = b""
        acknowledged = 0
        for action in actions:
            if isinstance(action, bytes):
                spool.append(action)
                everything += action
            else:
                acknowledged = max(acknowledged, len(everything) * action // 100)
                spool.acknowledge(acknowledged)
            kept = list(spool.chunks())
            assert spool.acknowledged == acknowledged
            assert b"".join(data for _, data in kept) == everything[acknowledged:]
            offset = acknowledged
            for at, data in kept:
                assert at == offset
                offset += len(data)
        spool.acknowledge(len(everything))
        assert list(spool.chunks()) == []
        assert list(Path(folder).iterdir()) == []


def test_it_says_when_it_is_full(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", in_memory=10, on_disk=20)
    spool.append(b"x" * 10)
    assert not spool.full
    spool.append(b"x" * 20)
    assert spool.full
    spool.acknowledge(30)
    assert not spool.full
