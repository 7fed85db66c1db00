"""Arrays on several devices of one process: what is saved of them, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

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


def run(script: str) -> Any:
    """With four devices. Returns what it prints."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ODD = """
import json
from typing import Any, NamedTuple
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from everstep.errors import ConfigError
from everstep.saved.snapshots import At
from everstep.jax.copying import ArrayCopier
from everstep.jax.state import CapturedArrays, State
from everstep.snapshots.content import InMemory
from everstep.snapshots.keeper import Keeper
from everstep.snapshots.writing import OwnMemory

class Pair(NamedTuple):
    one: Any
    other: Any

def restored(part, template=None, later=None):
    keeper, copier = Keeper(0, 1, OwnMemory(lambda *_: None)), ArrayCopier()
    keeper.take(CapturedArrays({"part": part}, 0, copier), At(1, 1), 1, {}, remember=True)
    state = State(part=part if template is None else template[0])
    state.load(InMemory(0, [0], 1, lambda rank, files: keeper.find(At(1, 1), rank, files)), 0)
    if later is not None:
        keeper.settled([], At(1, 1))
        keeper.take(CapturedArrays({"part": later}, 0, copier), At(1, 2), 2, {}, remember=True)
    return state.part

def refused(*parts):
    try:
        restored(*parts)
    except ConfigError as error:
        return str(error)

key = jax.random.key(7)
divided = jax.device_put(jnp.arange(8.0), NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x")))
abstract = restored({"key": key}, [{"key": jax.eval_shape(lambda: key)}])["key"]
slashes = restored({"a": {"b/c": jnp.zeros(1)}, "a/b": {"c": jnp.ones(1)}})
empty = (None, [0.5]), ([], [[1.0]]), ([], [None]), ([0.5], [None])
print(json.dumps({
    "key": jax.random.key_data(restored({"key": key}, None, {"key": jax.random.key(8)})["key"]).tolist(),
    "abstract key": jax.random.key_data(abstract).tolist(),
    "other key": refused({"key": jax.random.split(key)}, [{"key": key}]),
    "big-endian": restored(np.arange(3, dtype=">f4")).tolist(),
    "slashes": [int(number[0]) for number in jax.tree.leaves(slashes)],
    "shards": refused({"w": divided, "w@1": jnp.zeros(3)}),
    "empty": [repr(restored(*each)) for each in empty],
    "pair": [repr(restored(Pair(1, 2.5))), repr(restored((Pair(None, None),)))],
    "scalar": repr(restored(np.int64(3))),
}))
"""


def test_odd_trees_come_back_as_they_were_or_are_refused() -> None:
    found = run(ODD)
    assert found["key"] == [0, 7], "a later snapshot has been written over what was restored"
    assert found["abstract key"] == [0, 7]
    assert "part/key was [2, 2] when the state was saved, and is [2] now" in found["other key"]
    assert found["big-endian"] == [0, 1, 2]
    assert found["slashes"] == [0, 1]
    assert "part/w@1 is the name of an array, and of a shard of another" in found["shards"]
    assert found["empty"] == ["None", "[]", "[]", "[0.5]"]
    assert found["pair"] == ["Pair(one=1, other=2.5)", "(Pair(one=None, other=None),)"]
    assert found["scalar"] == "np.int64(3)"


def test_arrays_come_back_on_the_sharding_of_the_template() -> None:
    found = run(SCRIPT)
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
