"""Writes the reference pages of the documentation from the sources: ``docs/api.md`` and ``docs/deadlines.md``
from docstrings, and ``docs/state-machine.md`` from the table of phases.

Sources are parsed, not imported, but for that table: no framework has to be there, and it takes no time.
``tests/docs/test_reference.py`` compares the pages with what this writes.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
MODULES = {
    "everstep": "What every script uses. `import everstep as train`.",
    "everstep.collective": "Between the ranks of a run, without a framework.",
    "everstep.torch": "PyTorch. Needs `everstep[torch]`; `FaultTolerantDDP` and `average_gradients` need "
    "`everstep[torchft]`.",
    "everstep.jax": "JAX. Needs `everstep[jax]`.",
    "everstep.huggingface.transformers": "Transformers. Needs `everstep[transformers]`.",
    "everstep.lightning": "Lightning. Needs `everstep[lightning]`.",
    "everstep.integrations.tensorboard": "TensorBoard. Needs `everstep[tensorboard]`: "
    "[the guide](watching.md).",
    "everstep.integrations.wandb": "Weights & Biases. Needs `everstep[wandb]`.",
    "everstep.integrations.mlflow": "MLflow. Needs `everstep[mlflow]`.",
    "everstep.integrations.tracker": "For a tracker of your own.",
    "everstep.data": "Data that is read exactly once: [the guide](data.md).",
    "everstep.testing": "Virtual hosts and slices on one machine.",
}
"""The public modules, in the order of the page."""

WRITTEN_BY = (
    "<!-- Written by scripts/reference.py from docstrings: edit those, then run `make reference`. -->"
)


@dataclass(frozen=True)
class Public:
    """A public name, and where it is defined."""

    module: str
    name: str
    node: ast.AST
    docstring: str


# ---------------------------------------------------------------------- finding


@cache
def _file_of(module: str) -> Path:
    path = SOURCES.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _statements(module: str) -> tuple[ast.stmt, ...]:
    """Of a module, with those that only type checkers see."""
    found: list[ast.stmt] = []
    for node in ast.parse(_file_of(module).read_text()).body:
        found += node.body if isinstance(node, ast.If) else [node]
    return tuple(found)


def names_of(module: str) -> list[str]:
    """Its public names: ``__all__``, or what it defines without an underscore."""
    defined = []
    for node in _statements(module):
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=elements)):
                if all(isinstance(each, ast.Constant) for each in elements):
                    return [str(ast.literal_eval(each)) for each in elements]
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if not name.startswith("_"):
                defined.append(name)
            case ast.ImportFrom(names=aliases, module=home) if module == "everstep" and home:
                defined += [alias.asname for alias in aliases if alias.asname == alias.name]
    return defined


def find(module: str, name: str) -> Public:
    """Where ``name`` of ``module`` is defined, through as many imports as it takes."""
    statements = _statements(module)
    for at, node in enumerate(statements):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return Public(module, name, node, ast.get_docstring(node) or "")
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if (
                found == name
            ):
                return Public(module, name, node, _string_after(statements, at))
            case ast.ImportFrom(module=str(home), names=aliases) if home.startswith("everstep"):
                for alias in aliases:
                    if (alias.asname or alias.name) == name:
                        return find(home, alias.name)
    raise LookupError(f"{module}.{name} is public, and is defined nowhere")


def _string_after(statements: tuple[ast.stmt, ...] | list[ast.stmt], at: int) -> str:
    """The docstring of an attribute: the string that follows it."""
    match statements[at + 1 : at + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return inspect.cleandoc(text)
        case _:
            return ""


def undocumented_fields(public: Public) -> list[str]:
    """Fields of a class that neither have a docstring nor are among its arguments."""
    if not isinstance(public.node, ast.ClassDef):
        return []
    arguments = re.findall(r"^    ([\w, ]+):", public.docstring, re.MULTILINE)
    return [name for name, _, text in _fields(public.node) if not text and name not in ", ".join(arguments)]


def public_names() -> Iterator[tuple[str, Public]]:
    """Each with the module that users import it from."""
    for module in MODULES:
        for name in names_of(module):
            yield module, find(module, name)


# ---------------------------------------------------------------------- writing


def api_page() -> str:
    lines = [
        "# API reference",
        "",
        WRITTEN_BY,
        "",
        "Every public name. A name that starts with an underscore, or that isn't on this page, may change in "
        "any release. [From Ray Train](from-ray-train.md) says how each name compares with Ray Train's; "
        "[time limits](deadlines.md) and [environment variables](environment.md) have pages of their own.",
        "",
    ]
    for module, introduction in MODULES.items():
        lines += [f"## {module}", "", introduction, ""]
        for name in names_of(module):
            lines += _entry(find(module, name))
    return "\n".join(lines).rstrip() + "\n"


def _entry(public: Public) -> list[str]:
    match public.node:
        case ast.ClassDef() as node:
            return [f"### {public.name}", "", *_class(public, node)]
        case ast.FunctionDef() as node:
            return [f"### {public.name}", "", *_code(_signature(node)), *_text(public.docstring)]
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return [
                f"### {public.name}",
                "",
                *_code(f"{public.name} = {ast.unparse(value)}"),
                *_text(public.docstring),
            ]
        case _:
            raise TypeError(f"{public.module}.{public.name} is neither a class, a function nor a value")


def _class(public: Public, node: ast.ClassDef) -> list[str]:
    if public.name == "Deadlines":
        return [*_text(public.docstring), "Its fields are [a page of their own](deadlines.md).", ""]
    fields, methods = [field for field in _fields(node) if field[2]], _methods(node)
    constructor = next(
        (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None
    )
    lines: list[str] = []
    if constructor is not None and not _is_error(node):
        lines += _code(_signature(constructor, name=public.name, bound=True))
    lines += _text(public.docstring)
    if fields:
        lines += ["| field | default | |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {default} | {_cell(text)} |" for name, default, text in fields]
        lines.append("")
    for method in methods:
        is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in method.decorator_list)
        text = _cell(ast.get_docstring(method) or "")
        call = f".{method.name}" if is_property else _one_line(method)
        lines.append(f"- `{call}`" + (f": {text}" if text else ""))
    return [*lines, ""] if methods else lines


def _is_error(node: ast.ClassDef) -> bool:
    return node.name.endswith("Error")


def _fields(node: ast.ClassDef) -> list[tuple[str, str, str]]:
    """Public attributes of a class with their defaults and docstrings."""
    found = []
    for at, statement in enumerate(node.body):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if not name.startswith("_"):
                default = "" if value is None else f"`{_default(value)}`"
                found.append((name, default, _string_after(node.body, at)))
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                found.append((name, f"`{ast.unparse(value)}`", _string_after(node.body, at)))
    return found


def _default(value: ast.expr) -> str:
    match value:
        case ast.Call(func=ast.Name(id="field"), keywords=keywords):
            for keyword in keywords:
                if keyword.arg == "default":
                    return ast.unparse(keyword.value)
                if keyword.arg == "default_factory":
                    made = ast.unparse(keyword.value)
                    return {"dict": "{}", "list": "[]"}.get(made, f"{made}()")
    return ast.unparse(value)


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Those for users. Hooks that only a library calls have no docstring."""
    return [
        m
        for m in node.body
        if isinstance(m, ast.FunctionDef) and not m.name.startswith("_") and ast.get_docstring(m)
    ]


def _signature(node: ast.FunctionDef, *, name: str = "", bound: bool = False) -> str:
    """As one would write it, an argument a line where it is long."""
    parts = _arguments(node, bound=bound)
    name = name or node.name
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and not bound else ""
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _one_line(node: ast.FunctionDef) -> str:
    return f".{node.name}({', '.join(_arguments(node, bound=True, typed=False))})"


def _arguments(node: ast.FunctionDef, *, bound: bool, typed: bool = True) -> list[str]:
    """Each as text. ``self`` is left out, and what is only there to be refused (``**refused``)."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_argument(a, d, typed) for a, d in zip(plain, defaults, strict=True)]
    if bound and plain and plain[0].arg in ("self", "cls"):
        parts = parts[1:]
    if arguments.vararg is not None:
        parts.append("*" + _argument(arguments.vararg, None, typed))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [
        _argument(a, d, typed) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None and arguments.kwarg.arg != "refused":
        parts.append("**" + _argument(arguments.kwarg, None, typed))
    return parts


def _argument(argument: ast.arg, default: ast.expr | None, typed: bool) -> str:
    said = argument.arg
    if typed and argument.annotation is not None:
        said += f": {ast.unparse(argument.annotation)}"
        return said if default is None else f"{said} = {ast.unparse(default)}"
    return said if default is None else f"{said}={ast.unparse(default)}"


def _code(text: str) -> list[str]:
    # Not marked as Python: it is a signature, not something to run.
    return ["```text", text, "```", ""]


def _text(docstring: str) -> list[str]:
    """A docstring as Markdown: sections of arguments are lists, indented code is fenced."""
    lines: list[str] = []
    section = False
    code: list[str] = []
    for line in docstring.splitlines():
        if lines and (lines[-1].endswith("::") or code) and (line.startswith("    ") or not line):
            code.append(line.removeprefix("    "))
            continue
        if code:
            lines[-1] = lines[-1].removesuffix("::") + ":"
            lines += ["", "```text", *_trimmed(code), "```", ""]
            code = []
        if re.fullmatch(r"(Args|Returns|Raises|Attributes):", line):
            lines += [line, ""]
            section = True
        elif section and (entry := re.match(r"    (\*{0,2}\w+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.startswith("    "):
            lines.append("  " + line.strip())
        else:
            section = section and not line
            lines.append(line)
    if code:
        lines[-1] = lines[-1].removesuffix("::") + ":"
        lines += ["", "```text", *_trimmed(code), "```"]
    return [*_markdown("\n".join(lines)).splitlines(), ""] if docstring else []


def _trimmed(code: list[str]) -> list[str]:
    return "\n".join(code).strip("\n").splitlines()


def _markdown(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _cell(docstring: str) -> str:
    """In one line, as a table or a list wants it."""
    text = " ".join(_markdown(docstring).split())
    return re.sub(r"`[^`]*`", lambda quoted: quoted[0].replace("|", "\\|"), text)


def deadlines_page() -> str:
    public = find("everstep", "Deadlines")
    assert isinstance(public.node, ast.ClassDef)
    lines = [
        "# Time limits",
        "",
        WRITTEN_BY,
        "",
        "Everstep waits for nothing without a limit, and every limit is a field of `Deadlines`:",
        "",
        "```python",
        "from everstep import Deadlines, RunConfig",
        "",
        'RunConfig(name="mine", deadlines=Deadlines(heartbeat_timeout_s=5.0))',
        "```",
        "",
        "Seconds, unless the text says otherwise. The variable `EVERSTEP_<NAME>` overrides a field for one "
        "start, for example `EVERSTEP_HEARTBEAT_TIMEOUT_S=5`. Limits that depend on each other are checked. "
        "The defaults suit most runs: change one when its last column describes your case.",
        "",
        "| field | default | what it limits, and when to change it |",
        "| --- | ---: | --- |",
    ]
    for name, default, text in _fields(public.node):
        lines.append(f"| `{name}` | {default.strip('`')} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def state_machine_page() -> str:
    sys.path.insert(0, str(SOURCES))
    from everstep.control.table import TRANSITIONS

    rows = [(a.value, b.value, why) for (a, b), why in TRANSITIONS.items()]
    arrows = "".join(f"    {a} --> {b}: {why}\n" for a, b, why in rows)
    table = "".join(f"| {a} | {b} | {why} |\n" for a, b, why in rows)
    return f"""# The phases of a run

<!-- Made from src/everstep/control/table.py: make reference -->

A restart takes some replica groups, or all workers, from wherever they are back to training. Restarting
everything moves the run itself through these phases; restarting some groups moves only them, while the run
stays `running`. Losing the lease ends a run from anywhere.

```mermaid
stateDiagram-v2
    [*] --> new
{arrows}    ended --> [*]
```

| from | to | when |
| --- | --- | --- |
{table}"""


PAGES = {"api.md": api_page, "deadlines.md": deadlines_page, "state-machine.md": state_machine_page}


def main() -> None:
    for name, page in PAGES.items():
        path = ROOT / "docs" / name
        path.write_text(page())
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
