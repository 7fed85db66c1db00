"""The reference says everything that there is, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import everstep
from everstep import Deadlines

from .pages import PAGES, ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import reference


@pytest.mark.parametrize("page", reference.PAGES)
def test_the_page_is_what_the_docstrings_say(page: str) -> None:
    assert PAGES[f"docs/{page}"].read_text() == reference.PAGES[page](), "run: make reference"


def test_every_public_name_is_there() -> None:
    assert set(reference.names_of("everstep")) == set(everstep.__all__) - {"__version__", "collective"}
    for module, public in reference.public_names():
        assert public.docstring, f"{module}.{public.name} has no docstring"
        assert not reference.undocumented_fields(public), f"of {module}.{public.name}"


def test_every_method_that_users_call_says_what_it_does() -> None:
    for module, public in reference.public_names():
        if module == "everstep" and isinstance(public.node, ast.ClassDef):
            for method in public.node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    assert ast.get_docstring(method), f"{public.name}.{method.name}"


@pytest.mark.parametrize("field", [field.name for field in fields(Deadlines)])
def test_every_time_limit_says_when_to_change_it(field: str) -> None:
    row = next(line for line in reference.deadlines_page().splitlines() if line.startswith(f"| `{field}` |"))
    assert re.search(r"\b(Raise|Lower) it\b", row), row


def _variables() -> set[str]:
    """Strings in the sources that look like the name of an environment variable."""
    found = set()
    for file in (ROOT / "src" / "everstep").rglob("*.py"):
        if "kube" in file.parts:
            continue  # the operator's are those of the Pods that it makes
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(rf"\A(?:{_PREFIXES})[A-Z0-9_]*\Z", node.value))
    return found


_PREFIXES = (
    "ACCELERATE_|CUBLAS_|CUDA_|EVERSTEP_[A-Z]|GLOO_|GROUP_|JAX_|LOCAL_|MASTER_|"
    "MEGASCALE_|MKL_|NCCL_|NODE_RANK|NUM_REPLICA_|OMP_|RANK(?!S)|RAY_ADDRESS|"
    "REPLICA_GROUP_|ROLE_|RUST_LOG|TF_|TMPDIR|TORCHELASTIC_|TORCHFT_|TORCHINDUCTOR_|"
    "TORCH_|TPU_|WORLD_SIZE|XDG_"
)


def test_every_environment_variable_is_there() -> None:
    page = PAGES["docs/environment.md"].read_text()
    said = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page))
    assert _variables() - said == set(), "not in docs/environment.md"
    gone = {name for name in said if name.startswith("EVERSTEP_")} - _variables()
    assert gone == set(), "in docs/environment.md, and nowhere else"


def test_every_page_is_in_the_navigation() -> None:
    navigation = Path(ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        if page.startswith("docs/"):
            assert f": {page.removeprefix('docs/')}" in navigation, page
