"""Every test can fail: its conditions are conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.relative_to(HERE) for path in HERE.rglob("*.py"))


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """All that is asserted or waited for."""
    for node in ast.walk(tree):
        match node:
            case ast.Assert(condition) | ast.Call(ast.Name("wait_for"), [ast.Lambda(_, condition), *_]):
                yield condition


def cannot_fail(condition: ast.expr) -> bool:
    match condition:
        # ``a == b if c else d`` compares nothing where it isn't ``c``: ``d`` was meant to be compared with.
        case ast.IfExp() | ast.Lambda() | ast.GeneratorExp() | ast.JoinedStr():
            return True
        case ast.Constant(value):
            return bool(value)
        case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements) | ast.Dict(elements):
            return bool(elements)
        case ast.BoolOp(ast.Or(), parts):
            return any(map(cannot_fail, parts))
        case ast.BoolOp(ast.And(), parts):
            return all(map(cannot_fail, parts))
        case ast.NamedExpr(_, value):
            return cannot_fail(value)
    return False


def lines_that_cannot_fail(source: str) -> list[int]:
    return [condition.lineno for condition in conditions(ast.parse(source)) if cannot_fail(condition)]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_no_condition_is_always_true(file: Path) -> None:
    assert lines_that_cannot_fail((HERE / file).read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "assert kinds == {1} if killed else {2}",
        "assert a == b or 'a message'",
        "assert (a == b, 'a message')",
        "assert (x > 0 for x in found)",
        "assert lambda: done",
        "assert f'{a} is {b}'",
        "assert (seen := [1])",
        "wait_for(lambda: seen == 1 if quick else 2, 'what is seen')",
    ],
)
def test_conditions_that_look_like_one_are_found(line: str) -> None:
    assert lines_that_cannot_fail(line) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "assert kinds == ({1} if killed else {2})",
        "assert a == b, 'a message'",
        "assert a == b or c",
        "assert [x for x in found]",
        "assert all(x > 0 for x in found)",
        "assert not []",
        "wait_for(lambda: seen == 1, 'what is seen')",
    ],
)
def test_conditions_that_can_fail_are_not_named(line: str) -> None:
    assert lines_that_cannot_fail(line) == []
