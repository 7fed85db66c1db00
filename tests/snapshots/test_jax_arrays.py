"""Arrays on several devices of one process: what is saved of them, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax")

SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from everstep.saved.snapshots import At
from everstep.jax.copying import ArrayCopier
from everstep.jax.state import CapturedArrays, State
from everstep.snapshots.content import InMemory
from everstep.snapshots.keeper import Keeper
from everstep.snapshots.writing import OwnMemory

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
on = lambda *axes: NamedSharding(mesh, P(*axes))
whole = np.arange(48.0, dtype=np.float32).reshape(4, 12)
tree = {
    "both": jax.device_put(whole, on("x", "y")),
    "rows": jax.device_put(whole.astype(jnp.bfloat16), on("x")),
    "none": jax.device_put(whole, on()),
    "empty": jnp.zeros((0, 3)),
    "key": jax.random.key(7),
    "plain": np.arange(3),
    "number": 5,
}
content = CapturedArrays({"tree": tree}, 0, ArrayCopier())
keeper = Keeper(0, 1, OwnMemory(lambda *_: None))
keeper.take(content, At(1, 1), 3, {}, remember=True)
keeper.complete()
like = {
    **tree,
    "both": jax.ShapeDtypeStruct((4, 12), jnp.float32, sharding=on("y", None)),
    "key": jax.random.key(0),
    "plain": np.zeros(3, int),
    "number": 0,
}
state = State(tree=like)
state.load(InMemory(0, [0], 1, lambda rank, files: keeper.find(At(1, 1), rank, files)), 0)
found = state.tree
print(json.dumps({
    "shards": {name: [list(s.shape), list(s.offset)] for name, s in content.shards.items()},
    "same": [
        bool((np.asarray(found[name]) == np.asarray(tree[name])).all())
        for name in ("both", "rows", "none", "plain")
    ],
    "sharding": [found[name].sharding == like[name].sharding for name in ("both", "rows", "none")],
    "key": bool((jax.random.key_data(found["key"]) == jax.random.key_data(tree["key"])).all()),
    "empty": list(found["empty"].shape),
    "number": found["number"],
}))
"""


def test_arrays_come_back_on_the_sharding_of_the_template() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] == [True] * 4
    assert found["sharding"] == [True] * 3
    assert (found["key"], found["empty"], found["number"]) == (True, [0, 3], 5)
    shards = found["shards"]
    assert [shards[f"tree/both{n}"] for n in ("", "@1", "@2", "@3")] == [
        [[2, 6], [0, 0]],
        [[2, 6], [0, 6]],
        [[2, 6], [2, 0]],
        [[2, 6], [2, 6]],
    ]
    assert [name for name in shards if name.startswith("tree/none")] == ["tree/none"], "saved once"
    assert [name for name in shards if name.startswith("tree/rows")] == ["tree/rows", "tree/rows@1"]
