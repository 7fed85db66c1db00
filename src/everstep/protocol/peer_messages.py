"""Messages between agents about snapshots in their memory: a question and an answer, one frame each.

An agent asks over a Unix socket: that of the other agent, on one machine, or one of its own host, from where
the question is passed on.
"""

from __future__ import annotations

import msgspec

from everstep.saved.snapshots import At

CHUNK = 4 << 20
"""Of a file, with one question."""


class PeerAddress(msgspec.Struct, frozen=True):
    """Where an agent answers."""

    address: str
    """The socket; empty: the one in the folder of the agent that asks."""
    route: str = ""
    """For whom the question is, if another process listens at the socket and passes it on."""


class Read(msgspec.Struct, frozen=True):
    """A rank's snapshot: the record that says what it is, or a part of a file."""

    route: str
    run: str
    rank: int
    at: At
    file: str = ""
    """Empty: the record."""
    offset: int = 0
    size: int = 0


class Data(msgspec.Struct, frozen=True):
    data: bytes
    missing: str = ""
    """Why it can't be had."""


read = msgspec.msgpack.Decoder(Read)
data = msgspec.msgpack.Decoder(Data)
