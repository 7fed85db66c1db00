"""What an agent tells its template, the process that workers are forked from, and what that says."""

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


class TemplateWord(msgspec.Struct, frozen=True, tag=True):
    pass


class Loaded(TemplateWord, frozen=True):
    forks: bool
    why_not: str
    seconds: float


class LoadFailed(TemplateWord, frozen=True):
    message: str
    traceback: str


class Forked(TemplateWord, frozen=True):
    rank: int
    epoch: int
    pid: int


class Ended(TemplateWord, frozen=True):
    pid: int
    status: int
    peak_rss: int
    by_us: bool


AnyWord = Loaded | LoadFailed | Forked | Ended

order = msgspec.msgpack.Decoder(AnyOrder)
word = msgspec.msgpack.Decoder(AnyWord)
