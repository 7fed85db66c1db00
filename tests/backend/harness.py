"""A template process and its forks, as an agent will have them, with nothing of the agent around them.

Run as a script, this file is the template: it has imported what the backend asks for, and forks a round of
workers for every line that it reads. ``Template`` is the other end, for tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOIN_S = 60.0
ROUND_S = 120.0
"""A round that takes longer is broken: its workers are killed, and the test fails."""
SOURCES = Path(__file__).parents[2] / "src"


# The tests' end


@dataclass
class Outcome:
    """How one rank ended."""

    said: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    exit_code: int | None = None
    signal: int | None = None

    def get(self, key: str) -> Any:
        """What the rank said under ``key``; ``None`` if it didn't."""
        return next((words[key] for words in self.said if key in words), None)


class Template:
    """A template process. ``run`` forks a round of workers, and tells how each of them ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the template died"
        return json.loads(answer)

    def run(self, job: str, world_size: int, **more: Any) -> list[Outcome]:
        answer = self.ask(job=job, world_size=world_size, **more)
        assert answer["left_over"] == [], "the round left processes or files behind"
        assert not answer["timed_out"], f"the round didn't end: {answer['outcomes']}"
        return [Outcome(**outcome) for outcome in answer["outcomes"]]


@contextlib.contextmanager
def template(backend: str, **variables: str) -> Iterator[Template]:
    """A template for ``"torch"`` or ``"jax"``, with these environment variables."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), **variables}
    process = subprocess.Popen(
        [sys.executable, __file__, backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield Template(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(ROUND_S)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


# The template's end


def serve(backend_name: str) -> None:
    """Import, then answer one request a line until there are no more."""
    answers = os.fdopen(os.dup(1), "w")  # what frameworks print must not be taken for an answer
    os.dup2(2, 1)
    module = importlib.import_module(f"everstep.backend.{backend_name}")
    backend = module.TorchBackend() if backend_name == "torch" else module.JaxBackend()
    for name in backend.preload():
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if request["job"] == "spoil":  # an operation where none should be: forks hang from here on
            backend.probe()
            answer: Any = {}
        elif request["job"] == "probe":
            answer = {"finished": probe(backend, request["patience_s"])}
        else:
            answer = run_round(backend, backend_name, request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def probe(backend: Any, patience_s: float) -> bool:
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        backend.probe()
        os._exit(0)
    theirs.close()
    mine.settimeout(patience_s)
    try:
        finished = mine.recv(1) == b""
    except TimeoutError:
        finished = False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    mine.close()
    return finished


def run_round(backend: Any, backend_name: str, request: Mapping[str, Any]) -> dict[str, Any]:
    fds_before = set(os.listdir("/proc/self/fd"))
    world_size, started = request["world_size"], time.perf_counter()
    outcomes = [Outcome() for _ in range(world_size)]
    logs = [tempfile.TemporaryFile() for _ in range(world_size)]  # noqa: SIM115
    pids, links = [], []
    for rank in range(world_size):
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            os.dup2(logs[rank].fileno(), 1)
            os.dup2(logs[rank].fileno(), 2)
            for inherited in (mine, *links):
                inherited.close()
            Worker(backend, backend_name, theirs, rank, world_size, request).live()
        theirs.close()
        pids.append(pid)
        links.append(mine)
    timed_out = not _listen(outcomes, pids, links, request, started)
    for rank, pid in enumerate(pids):
        if timed_out:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        outcomes[rank].signal = -code if code < 0 else None
        outcomes[rank].exit_code = code if code >= 0 else None
        logs[rank].seek(0)
        outcomes[rank].log = logs[rank].read().decode(errors="replace")
        logs[rank].close()
        links[rank].close()
    left_over = sorted(set(os.listdir("/proc/self/fd")) - fds_before) + _children()
    return {"outcomes": [vars(o) for o in outcomes], "left_over": left_over, "timed_out": timed_out}


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _listen(
    outcomes: list[Outcome],
    pids: list[int],
    links: list[socket.socket],
    request: Mapping[str, Any],
    started: float,
) -> bool:
    """Pass messages on until every worker has hung up. Whether they did so in time."""
    waiting_for_kill = set(range(len(links))) if request.get("kill") is not None else set()
    with selectors.DefaultSelector() as readable:
        for rank, link in enumerate(links):
            readable.register(link, selectors.EVENT_READ, (rank, bytearray()))
        while readable.get_map():
            events = readable.select(started + ROUND_S - time.perf_counter())
            if not events:
                return False
            for key, _ in events:
                rank, buffer = key.data
                try:
                    data = links[rank].recv(65536)
                except ConnectionResetError:  # it was killed with our words unread
                    data = b""
                if not data:
                    readable.unregister(links[rank])
                buffer += data
                *lines, rest = bytes(buffer).split(b"\n")
                buffer[:] = rest
                for words in map(json.loads, lines):
                    outcomes[rank].said.append(words | {"at": time.perf_counter() - started})
                    if "endpoint" in words or "leaving" in words:
                        _tell_all(links, words)
                    elif "stepped" in words and rank in waiting_for_kill:
                        waiting_for_kill.discard(rank)
                        if not waiting_for_kill:
                            os.kill(pids[request["kill"]], signal.SIGKILL)
    return True


def _tell_all(links: list[socket.socket], words: dict[str, Any]) -> None:
    for link in links:
        with contextlib.suppress(OSError):  # one that is gone already
            link.sendall(json.dumps(words).encode() + b"\n")


# A worker's end


class Worker:
    """One fork: its place, its way to the template, and the job that it was given."""

    def __init__(
        self,
        backend: Any,
        backend_name: str,
        link: socket.socket,
        rank: int,
        world_size: int,
        request: Mapping[str, Any],
    ) -> None:
        from everstep.backend.base import Member

        self.backend, self.link, self.request = backend, link, request
        self.framework = {"torch": TorchJobs, "jax": JaxJobs}[backend_name](self)
        self.lines = link.makefile()
        place = {"local_rank": rank, "local_world_size": world_size, "node_rank": 0, "num_nodes": 1}
        self.member = Member(
            rank=rank,
            world_size=world_size,
            **{**place, **request.get("member", {})},
            group_rank=rank,
            group_size=world_size,
        )

    def say(self, **words: Any) -> None:
        self.link.sendall(json.dumps(words).encode() + b"\n")

    def heard(self, key: str) -> Any:
        """Wait for the template to pass something on."""
        for line in self.lines:
            words = json.loads(line)
            if key in words:
                return words[key]
        raise AssertionError("the template went away")

    def live(self) -> None:
        try:
            self.be_a_worker()
        except BaseException as error:
            traceback.print_exc()
            kind, peer = type(error).__name__, self.backend.is_peer_failure(error)
            self.say(raised=str(error), kind=kind, peer=peer)
            os._exit(1)
        os._exit(0)

    def be_a_worker(self) -> None:
        member = self.member
        for name, value in self.backend.environment(member).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.backend.reseed(1000 + member.rank)
        if member.rank == 0:
            self.say(endpoint=self.backend.host(member))
        endpoint = self.heard("endpoint")
        if member.rank in self.request.get("absent", ()):
            return
        self.backend.join(member, endpoint, self.request.get("join_s", JOIN_S))
        self.say(joined=True)
        job: Callable[[], Any] = getattr(self.framework, self.request["job"])
        self.say(returned=job())
        self.say(leaving=member.rank)
        self.backend.leave(member)
        self.say(left=True)

    def listening(self) -> list[str]:
        import psutil

        connections = psutil.Process().net_connections(kind="tcp")
        return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


class Jobs:
    """What a round may do, whatever the framework. ``all_reduce`` sums one number of every rank."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def all_reduce(self) -> float:
        raise NotImplementedError

    def compute(self) -> None:
        """Something that needs no peer."""
        raise NotImplementedError

    def one_step(self) -> float:
        total = self.all_reduce()
        self.worker.say(stepped=1)
        return total

    def step_forever(self) -> None:
        while True:
            self.one_step()

    def compute_forever(self) -> None:
        self.one_step()
        while True:
            self.compute()

    def leave_without_peers(self) -> None:
        """Return although a peer died: its echo is caught."""
        try:
            self.step_forever()
        except RuntimeError as error:
            if not self.worker.backend.is_peer_failure(error):
                raise

    def one_rank_errs(self) -> None:
        self.one_step()
        if self.worker.member.rank == 1:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")
        self.step_forever()

    def listen(self) -> list[str]:
        self.all_reduce()
        addresses = self.worker.listening()
        self.all_reduce()  # nobody leaves before all have looked
        return addresses

    def leader_returns_first(self) -> None:
        self.all_reduce()
        if self.worker.member.rank != 0:
            assert self.worker.heard("leaving") == 0
            self.compute()

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def sigterm(self) -> bool:
        """Whether ``SIGTERM`` still ends this process, as it did before the framework was there."""
        caught = Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0]
        return not int(caught, 16) >> (signal.SIGTERM - 1) & 1


class TorchJobs(Jobs):
    def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        numbers = torch.full((1000,), float(self.worker.member.rank + 1))
        dist.all_reduce(numbers)
        return float(numbers[-1])

    def compute(self) -> None:
        import torch

        torch.ones(300, 300) @ torch.ones(300, 300)

    def ranks_disagree(self) -> None:
        """Sums arrays of different sizes: the user's mistake, though gloo is who says so."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1000 if self.worker.member.rank else 10))

    def group_over_env(self) -> float:
        import torch.distributed as dist

        self.all_reduce()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="env://")
        return self.all_reduce()

    def draw(self) -> list[float]:
        import torch

        return [float(torch.rand(1)), float(torch.randint(1 << 30, (1,)))]

    def data_parallel(self) -> dict[str, Any]:
        """Train with what a user of Ray Train has in the function; every rank must end with one model."""
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        import everstep.torch as train

        pretend_session(self.worker.member.rank, self.worker.member.world_size)
        torch.manual_seed(self.worker.member.rank)
        model = train.prepare_model(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(16.0)[:, None] / 16)
        loader = train.prepare_data_loader(DataLoader(data, batch_size=2, shuffle=True))
        loader.sampler.set_epoch(0)
        seen = []
        for (batch,) in loader:
            seen += (batch * 16).flatten().tolist()
            optimizer.zero_grad()
            ((model(batch) - 3 * batch) ** 2).mean().backward()
            optimizer.step()
        weights = [float(p) for p in model.parameters()]
        return {"kind": type(model).__name__, "seen": seen, "weights": weights}

    def loader_seeds(self) -> list[float]:
        """What the processes of a data loader draw, in Python, NumPy and torch."""
        from torch.utils.data import DataLoader

        import everstep.torch as train

        pretend_session(self.worker.member.rank, self.worker.member.world_size)
        if self.worker.request.get("reproducible"):
            train.enable_reproducibility(7)
        loader = train.prepare_data_loader(DataLoader(Draws(), batch_size=1, num_workers=2))
        return [number for batch in loader for number in batch.flatten().tolist()]


class Draws:
    """A data set of random numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        import random

        import numpy
        import torch

        return torch.tensor(
            [random.random(), numpy.random.random(), float(torch.rand(1, dtype=torch.float64))]
        )


class JaxJobs(Jobs):
    def all_reduce(self) -> float:
        import jax
        import numpy
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
        mine = numpy.full(jax.local_device_count(), self.worker.member.rank + 1.0, numpy.float32)
        numbers = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("ranks")), mine)
        return float(jax.jit(lambda array: array.sum())(numbers))

    def compute(self) -> None:
        import jax.numpy as jnp

        jnp.ones((300, 300)).sum().block_until_ready()

    def devices(self) -> list[int]:
        import jax

        return [jax.process_count(), jax.device_count(), jax.local_device_count()]


def pretend_session(rank: int, world_size: int) -> types.ModuleType:
    """Stand in for the session that a real worker has."""

    class Context:
        def get_world_rank(self) -> int:
            return rank

        def get_world_size(self) -> int:
            return world_size

    session = types.ModuleType("everstep.training")
    session.get_context = Context  # type: ignore[attr-defined]
    sys.modules["everstep.training"] = session
    return session


if __name__ == "__main__":
    serve(sys.argv[1])
