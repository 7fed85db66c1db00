"""Messages between an agent and its template, the process that workers are forked from."""

from __future__ import annotations

import msgspec

from everstep.protocol.script import Script
from everstep.protocol.wire import WorkerSpec


class TemplateOrder(msgspec.Struct, frozen=True, tag=True):
    pass


class Load(TemplateOrder, frozen=True):
    code: bytes
    config: bytes
    python_path: list[str]
    preload: list[str]
    probe_s: float
    may_fork: bool
    script: Script = Script()


class Fork(TemplateOrder, frozen=True):
    """Comes with five descriptors: the worker's ends of its socket and of the one for memory, its standard
    output and standard error, and its progress.
    """

    spec: WorkerSpec


class End(TemplateOrder, frozen=True):
    pid: int
    signal: int


AnyOrder = Load | Fork | End


class TemplateMessage(msgspec.Struct, frozen=True, tag=True):
    pass


class Loaded(TemplateMessage, frozen=True):
    forks: bool
    why_not: str
    seconds: float


class LoadFailed(TemplateMessage, frozen=True):
    message: str
    traceback: str


class Forked(TemplateMessage, frozen=True):
    rank: int
    epoch: int
    pid: int


class Ended(TemplateMessage, frozen=True):
    pid: int
    status: int
    peak_rss: int
    by_us: bool


AnyMessage = Loaded | LoadFailed | Forked | Ended

order = msgspec.msgpack.Decoder(AnyOrder)
message = msgspec.msgpack.Decoder(AnyMessage)
