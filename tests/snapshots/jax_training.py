"""Training functions of JAX programs that save their state."""

from __future__ import annotations

import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import everstep as train
from everstep.jax import State

PACE_S = 0.05


def note(config: dict[str, Any], **facts: Any) -> None:
    """A line in this rank's own file: what happened, seen from inside."""
    context = train.get_context()
    line = {"pid": os.getpid(), "at": time.monotonic(), "epoch": context.get_attempt(), **facts}
    with (Path(config["notes"]) / f"rank-{context.get_world_rank()}.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def fingerprint(state: State) -> str:
    """Of all that this process has of a state, bit for bit."""
    content = state.capture()
    found = hashlib.sha256(json.dumps(content.tree).encode())
    for name, array in sorted(content._arrays.items()):
        found.update(name.encode() + np.asarray(array).tobytes())
    return found.hexdigest()


class Moments(NamedTuple):
    """As optimizers have them: a tuple whose fields have names."""

    count: Any
    mean: Any


@partial(jax.jit, donate_argnums=(0, 1))
def update(params: Any, moments: Moments, x: Any) -> tuple[Any, Moments, Any]:
    def loss_of(params: Any) -> Any:
        return jnp.square(x @ params["weight"] + params["bias"]).mean()

    loss, slopes = jax.value_and_grad(loss_of)(params)
    mean = jax.tree.map(lambda m, g: 0.9 * m + g, moments.mean, slopes)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, mean), Moments(moments.count + 1, mean), loss


def first_state(rows: int) -> State:
    """A weight that is divided among all devices, and a bias that each has."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    divided, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["all"], []))
    weight = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) / rows
    params = {
        "weight": jax.make_array_from_callback(weight.shape, divided, lambda index: weight[index]),
        "bias": jax.make_array_from_callback((2,), whole, lambda index: np.zeros(2, np.float32)[index]),
    }
    count = jax.make_array_from_callback((), whole, lambda index: np.zeros((), np.int32))
    moments = Moments(count, jax.tree.map(lambda p: p * 0, params))
    rank = train.get_context().get_world_rank()
    return State(params=params, moments=moments, key=jax.random.key(rank), own=np.array([rank]), losses=[])


def whole_of(state: State) -> str:
    """A fingerprint of what all processes have of the arrays between them."""
    arrays = multihost_utils.process_allgather((state.params, state.moments.mean), tiled=True)
    found = hashlib.sha256()
    for array in jax.tree.leaves(arrays):
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()


def steps(config: dict[str, Any]) -> list[float]:
    """Trains until it is told to stop, or for so many steps. Returns the weight."""
    rows = config.get("rows", 8)
    state = first_state(rows)
    step = state.restore()
    note(config, step=step, restored=True, state=fingerprint(state) if step else "", whole=whole_of(state))
    rank = train.get_context().get_world_rank()
    until = Path(config["until"])
    mesh = Mesh(np.array(jax.devices()), ("all",))
    whole = NamedSharding(mesh, PartitionSpec())
    while step < config.get("steps", 1 << 30):
        stop = bool(multihost_utils.broadcast_one_to_all(np.array(rank == 0 and until.exists())))
        step += 1
        x = jax.make_array_from_callback(
            (1, rows), whole, lambda index, n=step: np.full((1, rows), 0.1 * n, np.float32)[index]
        )
        state.params, state.moments, loss = update(state.params, state.moments, x)
        state.key, _ = jax.random.split(state.key)
        state.own = state.own + 1000
        state.losses = [*state.losses[-3:], float(loss)]
        note(config, step=step, state=fingerprint(state), whole=whole_of(state))
        train.report({"step": step}, state=state, step=step)
        note(config, step=step, reported=True)
        if stop:
            break
        time.sleep(PACE_S)
    return list(np.asarray(multihost_utils.process_allgather(state.params["weight"], tiled=True)).ravel())


def mistaken(config: dict[str, Any]) -> dict[str, str]:
    """Reports states as one should not, and then one as one should. Returns what it is told about each
    mistake.
    """
    told = {}
    for mistake in config["mistakes"]:
        try:
            _make(mistake)
        except Exception as error:
            told[mistake] = str(error)
    train.report({}, state=State(params=jnp.ones(4)), step=1)
    return told


def _make(mistake: str) -> None:
    match mistake:
        case "not an array":
            State(params={"a": [object()]})
        case "donated":
            state = State(params=jnp.ones(4))
            jax.jit(lambda x: x + 1, donate_argnums=0)(state.params)
            train.report({}, state=state, step=1)
        case "only a shape":
            train.report({}, state=State(params=jax.ShapeDtypeStruct((2,), jnp.float32)), step=1)
