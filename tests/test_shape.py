"""The code stays small enough to read: limits on files, classes and the controller, and one meaning a name.

What is above a limit is named here, with the reason. What is named and isn't above it any more fails too, so
that the lists only get shorter.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import everstep

SOURCES = Path(everstep.__file__).parent
FILES = {str(path.relative_to(SOURCES)): path.read_text() for path in sorted(SOURCES.rglob("*.py"))}

MOST_LINES = 500
MOST_ATTRIBUTES = 15
MOST_METHODS = 25
MOST_CODE_IN_CONTROL = 2_000

LONG_FILES: set[str] = set()
LARGE_CLASSES: set[str] = set()
NAMED_TWICE = {
    "RayTrainReportCallback": "Ray Train has one for Lightning and one for Transformers, of this name",
    "State": "of torch and of JAX: a script imports the one of its framework",
}

UNSEEN = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


class Measured(NamedTuple):
    file: str
    name: str
    attributes: int
    methods: int

    @property
    def is_large(self) -> bool:
        return self.attributes > MOST_ATTRIBUTES or self.methods > MOST_METHODS


def classes(file: str, source: str) -> Iterator[Measured]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield Measured(file, node.name, len({a for m in methods for a in assigned(m)}), len(methods))


def assigned(method: ast.AST) -> Iterator[str]:
    """The attributes of ``self`` that it sets."""
    for node in ast.walk(method):
        match node:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                yield name


def code_lines(source: str) -> int:
    """Lines with code on them: no blank ones, comments or docstrings."""
    seen: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in UNSEEN:
            seen.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):
                assert node.end_lineno is not None
                seen.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(seen)


@functools.cache
def every_class() -> list[Measured]:
    """Not when this file is imported, which every process that runs tests does."""
    return [one for file, source in FILES.items() for one in classes(file, source)]


def test_files_are_short() -> None:
    assert {file for file, source in FILES.items() if source.count("\n") > MOST_LINES} == LONG_FILES


def test_classes_are_small() -> None:
    assert {f"{one.file} {one.name}" for one in every_class() if one.is_large} == LARGE_CLASSES


def test_the_controller_can_be_read_in_one_sitting() -> None:
    lines = sum(code_lines(source) for file, source in FILES.items() if file.startswith("control/"))
    assert 0 < lines <= MOST_CODE_IN_CONTROL


def test_only_the_simulator_looks_into_the_controller() -> None:
    readers = {file for file, source in FILES.items() if "beliefs_of" in source}
    assert {Path(file).parent.name for file in readers} == {"control", "sim"}


def test_a_public_class_name_means_one_thing() -> None:
    where = defaultdict(list)
    for one in every_class():
        if not one.name.startswith("_"):
            where[one.name].append(one.file)
    assert {name for name, files in where.items() if len(files) > 1} == NAMED_TWICE.keys()


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = 1\n\n# why\ny = 2\n", 2),
        ('"""What\n\nis here."""\nx = 1\n', 1),
        ('x = """a\nb"""\n', 2),
        ("def f() -> int:\n    '''Why.'''\n    return (\n        1\n    )\n", 4),
    ],
)
def test_code_is_counted_without_blanks_comments_and_docstrings(source: str, lines: int) -> None:
    assert code_lines(source) == lines


def test_attributes_are_counted_once_and_nested_functions_are_no_methods() -> None:
    source = (
        "class A:\n def f(self):\n  self.x = self.y = 1\n  def g(): pass\n async def h(self): self.x += 1\n"
    )
    assert [*classes("a.py", source)] == [Measured("a.py", "A", 2, 2)]
