"""Workers that are to end: asked first, killed after a while, and reported once all of them are gone."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

from everstep.agent.drivers import Holder
from everstep.agent.worker_process import WorkerProcess
from everstep.agent.workers import HostWorkers
from everstep.protocol import wire


@dataclass
class StopJob:
    """Ranks that are to end. ``wire.Gone`` is sent once all of them have."""

    epoch: int
    generation: int
    ranks: list[int]
    left: set[int]


class Stops:
    def __init__(self, workers: HostWorkers, holder: Holder) -> None:
        self._workers = workers
        self._holder = holder
        self._jobs: list[StopJob] = []

    def stop(self, message: wire.Stop) -> None:
        job = StopJob(message.epoch, message.generation, message.ranks, set())
        for rank in message.ranks:
            worker = self._workers.get(message.epoch, rank)
            if worker is not None and worker.spec.generation == message.generation:
                job.left.add(rank)
                self._workers.signal(worker, signal.SIGTERM if message.grace_s > 0 else signal.SIGKILL)
        self._jobs.append(job)
        if message.grace_s > 0 and job.left:
            asyncio.get_running_loop().call_later(message.grace_s, self._kill, job)
        self._check(job)

    def _kill(self, job: StopJob) -> None:
        for rank in list(job.left):
            worker = self._workers.get(job.epoch, rank)
            if worker is not None:
                self._workers.signal(worker, signal.SIGKILL)

    def ended(self, worker: WorkerProcess) -> None:
        rank = worker.spec.member.rank
        for job in list(self._jobs):
            if job.epoch == worker.spec.epoch and rank in job.left:
                job.left.discard(rank)
                self._check(job)

    def _check(self, job: StopJob) -> None:
        if not job.left and job in self._jobs:
            self._jobs.remove(job)
            self._holder.send(wire.Gone(job.epoch, job.generation, job.ranks, self._workers.memory.copies()))
