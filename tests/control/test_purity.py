"""The controller and what it builds on do no I/O: they import nothing that could."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import everstep

SOURCES = Path(everstep.__file__).parent
ALLOWED = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "everstep.backoff",
    "everstep.control",
    "everstep.deadlines",
    "everstep.failures",
    "everstep.health",
    "everstep.identity",
    "everstep.saved",
    "everstep.topology",
    "everstep.wording",
    "functools",
    "math",
    "msgspec",
    "re",
    "typing",
}
ROOMS = ("control", "health", "saved", "topology")
FILES = [
    *(
        SOURCES / name
        for name in ("backoff.py", "deadlines.py", "failures.py", "goodput.py", "identity.py", "wording.py")
    ),
    *(path for room in ROOMS for path in sorted((SOURCES / room).glob("*.py"))),
]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_that_could_do_io_is_imported(path: Path) -> None:
    names = imported(path)
    strange = {name for name in names if not any(name == ok or name.startswith(f"{ok}.") for ok in ALLOWED)}
    assert strange == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_is_opened_and_nobody_is_asked(path: Path) -> None:
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls & {"open", "input", "exec", "eval", "__import__"} == set()
