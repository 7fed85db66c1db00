"""Training functions whose whole state is on an accelerator."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bench.steps import StepLog


class Phases:
    """What a worker did before its first step, and when: a line for each worker."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / "phases.jsonl"
        self._times = {"function": time.monotonic()}

    def reached(self, name: str) -> None:
        self._times[name] = time.monotonic()

    def write(self) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(self._times) + "\n")


def train_gpt(config: dict[str, Any]) -> None:
    """A GPT with AdamW, its state in fp32 and built on its device; ends when the file ``stop`` is there."""
    import torch

    import everstep as train
    from bench.gpt import Gpt

    phases = Phases(config["folder"])
    log = StepLog(config["folder"], train.get_context().get_world_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(config["vocabulary"], (config["batch"], config["length"] + 1), device=device)
    phases.reached("device")
    with device:
        model = Gpt(config["vocabulary"], config["length"], config["width"], config["layers"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    phases.reached("model")
    state = train.torch.State(model=model, optimizer=optimizer)
    step = state.restore()
    phases.reached("restore")
    stop = Path(config["folder"]) / "stop"
    first = True
    while not stop.exists():
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = {"loss": loss.item()}
        step += 1
        log.made(step)
        if first:
            phases.reached("first step")
            phases.write()
            first = False
        train.report(metrics, state=state, step=step)


def train_layers(config: dict[str, Any]) -> None:
    """Layers one after another, with Adam, in fp32; ends when the file ``stop`` is there."""
    import jax
    import jax.numpy as jnp

    import everstep as train
    from everstep.jax import State

    phases = Phases(config["folder"])
    log = StepLog(config["folder"], train.get_context().get_world_rank())
    width, layers = config["width"], config["layers"]
    inputs = jax.random.normal(jax.random.key(0), (config["batch"], width))
    inputs.block_until_ready()
    phases.reached("device")

    def loss_of(params: Any, x: Any) -> Any:
        for weight in params:
            x = jax.nn.relu(x @ weight)
        return (x * x).mean()

    def update(params: Any, adam: Any, x: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(params, x)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam["first"], slopes)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, adam["second"], slopes)
        params = jax.tree.map(lambda p, m, v: p - 1e-5 * m / (jnp.sqrt(v) + 1e-8), params, first, second)
        return params, {"first": first, "second": second}, loss

    @jax.jit
    def build() -> Any:
        keys = jax.random.split(jax.random.key(1), layers)
        params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
        zeros = [jnp.zeros((width, width)) for _ in keys]
        return params, {"first": zeros, "second": [jnp.zeros((width, width)) for _ in keys]}

    update = jax.jit(update, donate_argnums=(0, 1))
    params, adam = build()
    jax.block_until_ready(params)
    phases.reached("model")
    state = State(params=params, adam=adam)
    del params, adam
    step = state.restore()
    phases.reached("restore")
    stop = Path(config["folder"]) / "stop"
    first = True
    while not stop.exists():
        state.params, state.adam, loss = update(state.params, state.adam, inputs)
        metrics = {"loss": float(loss)}
        step += 1
        log.made(step)
        if first:
            phases.reached("first step")
            phases.write()
            first = False
        train.report(metrics, state=state, step=step)
