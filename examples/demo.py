"""Train a small model on four workers, break it in three ways, and watch it recover: ``make demo``.

The training loop is ``train`` below, and is all that you would write. The rest plays the bad luck: it makes
virtual hosts on this machine, then kills a worker, freezes a host and takes a slice away, in mid-training.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import everstep
from everstep.control.commands import PhaseChanged, Recovered
from everstep.failures import Kind
from everstep.jax import JaxTrainer
from everstep.journal import journal
from everstep.journal.records import Closed, Committed, Opened
from everstep.observe.display import cause_of, phases_of
from everstep.observe.registry import LiveWorker, hosts_of, live_runs
from everstep.testing import LocalCluster

SLICES = 3  # the run takes two
NOTICE_S = 13.0  # workers leave 10 s before the end of it, and have a checkpoint by then
EXPECTED = {Kind.SIGNAL, Kind.HOST_SILENT, Kind.PREEMPTED}

# ---------------------------------------------------------------------- what you would write


def train(config: dict[str, Any]) -> None:
    """One worker: its share of every batch, with gradients averaged over all workers by JAX."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    rank = everstep.get_context().get_world_rank()

    step, state = 0, new_model(seed=0)
    checkpoint = everstep.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            step, state = load(Path(folder), state)
    state = jax.device_put(state, whole)

    while step < config["steps"]:
        points, labels = spirals(np.random.default_rng([step, rank]), config["batch"])
        batch = [jax.make_array_from_process_local_data(split, array) for array in (points, labels)]
        state, loss, accuracy = update(state, *batch)
        step += 1
        metrics = {"step": step, "loss": float(loss), "accuracy": float(accuracy)}

        saved = None
        if rank == 0 and (step % config["save_every"] == 0 or everstep.should_checkpoint()):
            saved = save(step, state)
        everstep.report(metrics, saved, delete_local_checkpoint_after_upload=True)
        time.sleep(config["pause_s"])  # so that there is something to watch


def save(step: int, state: Any) -> everstep.Checkpoint:
    folder = Path(tempfile.mkdtemp())
    np.savez(folder / "state.npz", *jax.tree.leaves(state), step=step)
    return everstep.Checkpoint.from_directory(folder)


def load(folder: Path, like: Any) -> tuple[int, Any]:
    with np.load(folder / "state.npz") as file:
        leaves = [file[f"arr_{i}"] for i in range(len(file.files) - 1)]
        return int(file["step"]), jax.tree.unflatten(jax.tree.structure(like), leaves)


# ---------------------------------------------------------------------- on which of two spirals is a point?


def spirals(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    label = rng.integers(0, 2, count)
    turn = 3 * np.pi * np.sqrt(rng.random(count))
    angle = turn + np.pi * label
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1) * turn[:, None] / 10
    points += rng.normal(0, 0.02, points.shape)
    return points.astype(np.float32), label.astype(np.float32)


def new_model(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    layers = [
        (rng.normal(0, scale, (inputs, outputs)).astype(np.float32), np.zeros(outputs, np.float32))
        for inputs, outputs, scale in ((2, 64, 3.0), (64, 64, 0.125), (64, 1, 0.125))
    ]
    return {"layers": layers, "momentum": jax.tree.map(np.zeros_like, layers)}


def predict(layers: Any, points: jax.Array) -> jax.Array:
    for weights, bias in layers[:-1]:
        points = jnp.sin(points @ weights + bias)
    weights, bias = layers[-1]
    return (points @ weights + bias)[:, 0]


def loss_of(layers: Any, points: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    guess = predict(layers, points)
    return jnp.mean(jnp.logaddexp(0, guess) - labels * guess), jnp.mean((guess > 0) == (labels > 0.5))


@jax.jit
def update(state: Any, points: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    (loss, accuracy), slope = jax.value_and_grad(loss_of, has_aux=True)(state["layers"], points, labels)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], slope)
    layers = jax.tree.map(lambda w, m: w - 0.004 * m, state["layers"], momentum)
    return {"layers": layers, "momentum": momentum}, loss, accuracy


# ---------------------------------------------------------------------- the bad luck


class Watch(everstep.UserCallback):
    """Knows how far training has come, for those who wait for that."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.changed = threading.Condition()
        self.epoch = self.step = 0
        self.over = False

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        with self.changed:
            self.epoch, self.step = live_runs()[self.run].epoch, metrics[0]["step"]
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def wait_until_over(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.over, timeout_s)

    def wait_for_steps(self, count: int, after_epoch: int = 0) -> bool:
        """Until every rank has made so many steps after that epoch. False if the run is over first."""
        with self.changed:
            self.changed.wait_for(lambda: self.over or self.epoch > after_epoch)
            goal = self.step + count
            self.changed.wait_for(lambda: self.over or self.step >= goal)
            return not self.over


def break_things(cluster: LocalCluster, watch: Watch) -> None:
    """Three faults, each some steps after training has got over the one before."""
    if not watch.wait_for_steps(50):
        return
    epoch, victim = watch.epoch, worker_of(watch.run, rank=1)
    say(f"kill -9 rank 1 (pid {victim.pid} on {victim.host})")
    with suppress(ProcessLookupError):  # somebody else was quicker
        os.kill(victim.pid, signal.SIGKILL)

    if not watch.wait_for_steps(50, after_epoch=epoch):
        return
    epoch, frozen = watch.epoch, worker_of(watch.run, rank=3).host
    say(f"freeze {frozen} (SIGSTOP for all of it): it doesn't answer, and isn't gone either")
    cluster.freeze_host(frozen)

    if not watch.wait_for_steps(25, after_epoch=epoch):
        return
    say(f"thaw {frozen}: it was replaced meanwhile, and is spare capacity now")
    cluster.thaw_host(frozen)

    if not watch.wait_for_steps(50):
        return
    doomed = worker_of(watch.run, rank=0)
    say(f"take {doomed.slice} away, with a notice of {NOTICE_S:g} s")
    cluster.preempt_slice(doomed.slice, NOTICE_S)


def bring_capacity(cluster: LocalCluster, watch: Watch) -> None:
    """A cloud: for a slice that is gone, a new one comes. So whoever breaks things finds more."""
    while not watch.wait_until_over(1.0):
        run = live_runs().get(watch.run)
        if run is not None:
            hosts = Counter(host.slice for host in hosts_of(run).values())
            whole = sum(count == cluster.hosts_per_slice for count in hosts.values())
            for _ in range(SLICES - whole):
                cluster.add_slice()


def worker_of(run: str, rank: int) -> LiveWorker:
    return next(worker for worker in live_runs()[run].workers if worker.rank == rank)


def say(line: str) -> None:
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[1;33mdemo: {line}\033[0m" if bold else f"demo: {line}", flush=True)


# ---------------------------------------------------------------------- what came of it


def tell(run: Path) -> set[Kind]:
    """Print what failed and what that cost, from the run's journal. Gives the kinds of failures it had."""
    records = list(journal.read(run))
    recoveries = [record for record in records if isinstance(record, Recovered) and record.cause is not None]

    what = Table(title="what failed, and what was kept", title_justify="left", box=SIMPLE_HEAD, expand=True)
    what.add_column("", style="dim")
    for header, style, ratio in (("failed", "bold red", 4), ("recovered by", "green", 3), ("kept", "", 4)):
        what.add_column(header, style=style, ratio=ratio, overflow="fold")
    what.add_column("steps lost", justify="right")
    what.add_column("seconds", justify="right", style="bold")
    where = Table(title="seconds by phase", title_justify="left", box=SIMPLE_HEAD, expand=True)
    where.add_column("", style="dim")
    for phase, _ in phases_of(recoveries[0]) if recoveries else ():
        where.add_column(phase, justify="right")
    where.add_column("all", justify="right", style="bold")

    for number, record in enumerate(recoveries, start=1):
        figures = (str(record.steps_lost), f"{record.total_s:.2f}")
        failed = cause_of(record).partition(" (")[0]
        what.add_row(str(number), failed, record.rung.value, record.kept, *figures)
        where.add_row(str(number), *(f"{s:.2f}" for _, s in phases_of(record)), f"{record.total_s:.2f}")
    what.add_section()
    seconds = sum(record.total_s for record in recoveries)
    lost = sum(record.steps_lost for record in recoveries)
    what.add_row("", f"{len(recoveries)} failures", "", "", str(lost), f"{seconds:.2f}")
    where.add_section()
    by_phase = zip(*([s for _, s in phases_of(record)] for record in recoveries), strict=True)
    where.add_row("", *(f"{sum(column):.2f}" for column in by_phase), f"{seconds:.2f}")
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(what, where)

    opened = next(record.at for record in records if isinstance(record, Opened))
    closed = next(record.at for record in records if isinstance(record, Closed))
    saved = sum(isinstance(record, Committed) for record in records)
    phases = [record for record in records if isinstance(record, PhaseChanged)]
    running = sum(
        after.at - before.at for before, after in itertools.pairwise(phases) if before.phase == "running"
    )
    console.print(
        f"{closed - opened:.1f} s in all, {running:.1f} s of them with all workers running "
        f"(goodput {running / (closed - opened):.0%}); {saved} checkpoints."
    )
    return {record.cause.kind for record in recoveries if record.cause is not None}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a small model, break it in three ways, watch it recover."
    )
    parser.add_argument("--steps", type=int, default=400, help="how many steps to train (%(default)s)")
    steps = parser.parse_args().steps
    run = f"demo-{secrets.token_hex(2)}"
    watch = Watch(run)
    say("4 workers on 2 slices of 2 hosts; a third slice is spare. Break more of it from elsewhere:")
    say(f"    everstep kill {run} --rank 1      (or --host slice-0-host-1, or --slice slice-1)")
    with (
        tempfile.TemporaryDirectory(prefix="everstep-demo-") as storage,
        LocalCluster(slices=SLICES, hosts_per_slice=2, workers_per_host=1) as cluster,
    ):
        trainer = JaxTrainer(
            train,
            train_loop_config={"steps": steps, "batch": 256, "save_every": 20, "pause_s": 0.02},
            scaling_config=everstep.ScalingConfig(num_workers=4),
            run_config=everstep.RunConfig(
                name=run,
                storage_path=storage,
                failure_config=everstep.FailureConfig(max_failures=-1),
                checkpoint_config=everstep.CheckpointConfig(num_to_keep=2),
                callbacks=[watch],
            ),
            engine=cluster,
        )
        others = [threading.Thread(target=f, args=(cluster, watch)) for f in (break_things, bring_capacity)]
        for thread in others:
            thread.start()
        try:
            result = trainer.fit()
        finally:
            watch.end()
            for thread in others:
                thread.join()
        recovered = tell(Path(result.path))
    metrics = result.metrics or {}
    missing = sorted(EXPECTED - recovered)
    if missing or metrics.get("step") != steps:
        say(
            f"failed. Expected {steps} steps, got {metrics}; no recovery from: {', '.join(missing) or 'none'}"
        )
        return 1
    say(f"{steps} steps, accuracy {metrics['accuracy']:.1%}, as if nothing had happened.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
