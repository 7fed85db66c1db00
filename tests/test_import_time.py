"""``import everstep`` brings in next to nothing. How long it takes is for the benchmarks to measure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import everstep

FRAMEWORKS = {"jax", "jaxlib", "numpy", "pandas", "pyarrow", "ray", "torch", "torchft"}
HEAVY = {"asyncio", "click", "cloudpickle", "msgspec", "obstore", "rich", "typing", "dataclasses", "logging"}


def modules_after(statement: str) -> set[str]:
    script = (
        "import sys, json\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_everstep_imports_no_framework_and_nothing_heavy():
    assert not modules_after("import everstep") & (FRAMEWORKS | HEAVY)


def test_importing_everstep_imports_no_other_module_of_ours():
    assert {name for name in modules_after("import everstep") if name.startswith("everstep")} == {"everstep"}


def test_configs_and_errors_need_no_third_party_package():
    taken = modules_after("from everstep import RunConfig, Checkpoint, TrainingFailedError; RunConfig()")
    assert not taken & (FRAMEWORKS | {"click", "cloudpickle", "msgspec", "obstore", "rich"})


@pytest.mark.parametrize("name", sorted(everstep.__all__))
def test_every_public_name_can_be_had(name):
    assert getattr(everstep, name) is not None
    assert name in dir(everstep)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = everstep.nonsense


def test_the_version_is_the_one_in_the_package_metadata():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert everstep.__version__ == project["project"]["version"]
