"""Training functions that hang, each in its own way, and some that only look like it."""

from __future__ import annotations

import ast
import ctypes
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import everstep as train

from .training import note, restore_step, save_step


def sleep() -> None:
    time.sleep(3600)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def keep_the_lock() -> None:
    """A C call that keeps Python's lock: no other thread of this process can run Python code."""
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):  # the second time it waits for itself
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def spin_in_c() -> None:
    """The same, at full speed: a regular expression that backtracks for ever is one C call."""
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def wait_for_a_child() -> None:
    """As a data loader does whose worker is stuck."""
    subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"], check=True)


def leave() -> None:
    sys.exit(0)


HANGS: dict[str, Callable[[], None]] = {
    hang.__name__: hang for hang in (sleep, stop_itself, keep_the_lock, spin_in_c, wait_for_a_child, leave)
}


def explained(way: str, at: int, steps: int) -> str:
    """What the message has of a rank that hangs in this way: its line, if it is in one."""
    match way:
        case "return" | "leave":
            return f"returned from the training function after {at - 1} reports, and"
        case "skip":  # then it is a collective ahead, and the last one of the others is without it
            return f"returned from the training function after {steps} reports, and"
        case _:
            return f", at {place_of(way)}; "


def place_of(way: str) -> str:
    """File, line and function: the last call of the function that hangs in this way."""
    lines, first = inspect.getsourcelines(HANGS[way])
    statements = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.Expr)]
    last = max(node.lineno for node in statements if isinstance(node.value, ast.Call))
    return f"{__file__}:{first - 1 + last} in {way}"


def due(config: dict[str, Any], step: int) -> str | None:
    """How this rank hangs at this step of the attempt: each attempt has another way, the last has none."""
    context = train.get_context()
    turn = context.get_attempt() - 1
    if context.get_world_rank() != config["rank"] or step != config["at"] or turn >= len(config["ways"]):
        return None
    way: str = config["ways"][turn]
    return way


def plain(config: dict[str, Any]) -> None:
    """Ranks that don't wait for each other."""
    for step in range(1, config["steps"] + 1):
        if way := due(config, step):
            HANGS[way]()
        train.report({"step": step})
        time.sleep(0.02)


def with_barriers(config: dict[str, Any]) -> None:
    """Ranks that wait for each other in Everstep's own collectives; rank 0 saves."""
    start = restore_step()
    for step in range(start + 1, start + config["steps"] + 1):
        if way := due(config, step - start):
            HANGS[way]()
        train.collective.barrier()
        saves = train.get_context().get_world_rank() == 0
        train.report({"step": step}, checkpoint=save_step(step) if saves else None)


def with_torch(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    for step in range(1, config["steps"] + 1):
        way = due(config, step)
        if way == "return":
            return
        if way is not None and way != "skip":
            HANGS[way]()
        if way != "skip":
            dist.all_reduce(torch.ones(4))
        train.report({"step": step})


def with_jax(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    for step in range(1, config["steps"] + 1):
        way = due(config, step)
        if way == "return":
            return
        if way is not None:
            HANGS[way]()
        multihost_utils.process_allgather(jnp.ones(2) * jax.process_index())
        train.report({"step": step})


def busy_for(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10_000))


def evaluates(config: dict[str, Any]) -> None:
    """Rank 0 computes for much longer than a step takes, and the others wait for it."""
    for step in range(1, 6):
        if step == 3 and train.get_context().get_world_rank() == 0:
            busy_for(config["busy_s"])
        train.collective.barrier()
        train.report({"step": step})
        note(config, step=step)


def at_step_three(config: dict[str, Any], dawdle: Callable[[], None], ranks: tuple[int, ...]) -> None:
    """These ranks do something else for longer than makes a hang, and the others wait for them."""
    for step in range(1, 6):
        if step == 3 and train.get_context().get_world_rank() in ranks:
            dawdle()
        train.collective.barrier()
        train.report({"step": step})


def idles(config: dict[str, Any]) -> None:
    """All ranks wait for data, and nothing says that it is on its way."""
    at_step_three(config, lambda: time.sleep(config["idle_s"]), (0, 1, 2))


def naps(config: dict[str, Any]) -> None:
    """Rank 0 sleeps, does next to nothing, and sleeps again."""
    at_step_three(config, lambda: [time.sleep(config["nap_s"]) for _ in range(4)] and None, (0,))


def polls(config: dict[str, Any]) -> None:
    """Rank 0 looks now and then whether it may go on."""

    def poll() -> None:
        until = time.monotonic() + config["idle_s"]
        while time.monotonic() < until:
            time.sleep(0.5)

    at_step_three(config, poll, (0,))


def compiles(config: dict[str, Any]) -> None:
    """Rank 0 waits for a compiler, which is a process of its own."""
    compiler = (
        f"import time\nuntil = time.monotonic() + {config['busy_s']}\nwhile time.monotonic() < until: pass"
    )
    at_step_three(config, lambda: subprocess.run([sys.executable, "-c", compiler], check=True) and None, (0,))


def pauses(config: dict[str, Any]) -> None:
    """All ranks do nothing at all, for much longer than a step takes, and say so first."""
    for step in range(1, 6):
        if step == 3:
            with train.pause("eval"):
                time.sleep(config["idle_s"])
        train.report({"step": step})
        note(config, step=step)


def starts_slowly(config: dict[str, Any]) -> None:
    """Nothing is seen of it before its first report."""
    time.sleep(config["idle_s"])
    for step in range(1, 6):
        train.report({"step": step})


def beats(config: dict[str, Any]) -> None:
    """It reports seldom, and says meanwhile that it gets on."""
    for step in range(1, 4):
        until = time.monotonic() + (config["idle_s"] if step == 2 else 0.0)
        while time.monotonic() < until:
            train.heartbeat()
            time.sleep(0.1)
        train.report({"step": step})


def crashes(config: dict[str, Any]) -> None:
    train.report({"step": 1})
    read_nowhere()


def read_nowhere() -> None:
    ctypes.string_at(0)


def until_told(config: dict[str, Any]) -> None:
    """Steps until there is a file."""
    step = 0
    while not os.path.exists(config["enough"]):
        step += 1
        train.report({"step": step})
        note(config, step=step)
        time.sleep(0.05)


def until_told_or_hung(config: dict[str, Any]) -> None:
    """The same, in step with the ranks of its replica group; one rank hangs when there is a file, once."""
    step = 0
    hangs = Path(config["hangs"])
    while not train.collective.broadcast_from_rank_zero(os.path.exists(config["enough"])):
        step += 1
        if train.get_context().get_world_rank() == config["rank"] and hangs.exists():
            hangs.unlink()
            sleep()
        train.report({"step": step})
        note(config, step=step)
        time.sleep(0.05)


def all_reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4))


def stalls_in_restore(config: dict[str, Any], meet: Callable[[], None] = train.collective.barrier) -> None:
    """The first attempt dies after a checkpoint; in the second, a rank can't read it."""
    context = train.get_context()
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory():
            if context.get_attempt() == 2 and context.get_world_rank() == config["rank"]:
                HANGS[config["ways"][0]]()
    for step in range(1, config["steps"] + 1):
        meet()
        saves = context.get_world_rank() == 0 and step == config["at"] - 2
        train.report({"step": step}, checkpoint=save_step(step) if saves else None)
        if saves:
            train.get_all_reported_checkpoints()
        meet()
        if context.get_attempt() == 1 and step == config["at"]:
            os._exit(3)


def stalls_in_restore_with_torch(config: dict[str, Any]) -> None:
    stalls_in_restore(config, all_reduce)


def stalls_in_upload(config: dict[str, Any], meet: Callable[[], None] = train.collective.barrier) -> None:
    """A function of the user's that uploads, and never ends."""
    for step in range(1, config["steps"] + 1):
        meet()
        way = due(config, step)
        train.report(
            {"step": step},
            checkpoint=save_step(step) if train.get_context().get_world_rank() == config["rank"] else None,
            checkpoint_upload_fn=partial(never_ends, way) if way else None,
        )


def stalls_in_upload_with_torch(config: dict[str, Any]) -> None:
    stalls_in_upload(config, all_reduce)


def never_ends(way: str, checkpoint: train.Checkpoint, name: str) -> train.Checkpoint:
    HANGS[way]()
    return checkpoint
