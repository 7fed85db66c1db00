"""``docs/from-ray-train.md`` against the real Ray Train on one side, and against Everstep on the other."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import EverstepError

PAGE = Path(__file__).parent.parent / "docs" / "from-ray-train.md"
SURFACE = Path(__file__).parent / "ray_train_surface.py"
HOMES = {
    "ray.train": "everstep",
    "ray.train.torch": "everstep.torch",
    "ray.train.v2.jax": "everstep.jax",
    "ray.train.collective": "everstep.collective",
    "ray.train.v2.torch.torchft_config": "everstep.torch",
}
NEEDS = {"everstep.torch": "torch", "everstep.jax": "jax"}


@dataclass(frozen=True)
class Item:
    """A name (``RunConfig``), a member (``Result.config``), or a parameter of either."""

    module: str
    name: str
    member: str = ""
    parameter: str = ""

    def __str__(self) -> str:
        text = f"{self.name}.{self.member}" if self.member else self.name
        return f"{self.module}: {text}({self.parameter})" if self.parameter else f"{self.module}: {text}"


@dataclass(frozen=True)
class Row:
    status: str
    explanation: str


def read_table() -> dict[Item, Row]:
    table: dict[Item, Row] = {}
    module = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = re.fullmatch(r"## `([\w.]+)`", line)
            module = heading[1] if heading else ""
        if not module or not line.startswith("| `"):
            continue
        names, status, explanation = (cell.strip() for cell in line.strip("|").split("|"))
        for name, member, parameters in re.findall(r"`(\w+)(?:\.(\w+))?(?:\(([\w, ]+)\))?`", names):
            for parameter in parameters.split(", "):
                item = Item(module, name, member, parameter)
                assert item not in table, f"{item} is listed twice"
                table[item] = Row(status, explanation)
    return table


TABLE = read_table()


def is_refused(item: Item) -> bool:
    return TABLE.get(item, Row("", "")).status == "refused"


@functools.cache
def ray_train() -> dict[str, Any]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray Train isn't installed, and it is what the page is held against")
    done = subprocess.run([sys.executable, str(SURFACE)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def real_items() -> Iterator[Item]:
    """Everything that Ray Train has; what belongs to a name that we refuse is refused with it."""
    refused_names = {item.name for item in TABLE if is_refused(item) and not (item.member or item.parameter)}
    for module, names in ray_train().items():
        for name, facts in names.items():
            yield Item(module, name)
            if name in refused_names:
                continue
            for parameter in facts["parameters"]:
                yield Item(module, name, "", parameter)
            for member, its in facts["members"].items():
                if its["from"] in refused_names:
                    continue
                yield Item(module, name, member)
                for parameter in its["parameters"]:
                    yield Item(module, name, member, parameter)


def real_parameters(item: Item) -> dict[str, Any]:
    facts = ray_train()[item.module][item.name]
    return facts["members"][item.member]["parameters"] if item.member else facts["parameters"]


def here(item: Item) -> Any:
    """Our object of that name, or the member of it."""
    home = HOMES[item.module]
    if home in NEEDS:
        pytest.importorskip(NEEDS[home])
    value = getattr(importlib.import_module(home), item.name)
    if not item.member:
        return value
    return inspect.getattr_static(value, item.member)


def our_parameters(item: Item) -> dict[str, inspect.Parameter]:
    value = here(item)
    return dict(inspect.signature(getattr(value, "__func__", value)).parameters)


def items_that_are(*statuses: str) -> list[Item]:
    return [item for item, row in TABLE.items() if row.status in statuses]


def test_the_page_has_all_of_ray_train_and_nothing_else():
    real, listed = set(real_items()), set(TABLE)
    assert not sorted(map(str, real - listed)), "in Ray Train, but not in docs/from-ray-train.md"
    assert not sorted(map(str, listed - real)), "in docs/from-ray-train.md, but not in Ray Train"


def packages_of_ray_train() -> dict[str, set[str]]:
    """The public names of every package below ``ray.train``. Read, not imported: most need more than Ray."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        pytest.skip("Ray Train isn't installed, and it is what the page is held against")
    root = Path(spec.origin).parent
    found = {}
    for path in sorted((root / "train").rglob("__init__.py")):
        module = ".".join(("ray", *path.parent.relative_to(root).parts))
        names = _public_names(path)
        if names and module != "ray.train" and module not in HOMES and "_internal" not in module:
            found[module] = names
    return found


def _public_names(path: Path) -> set[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def test_every_name_of_the_other_packages_has_a_line_that_says_what_it_costs_to_move():
    listed: dict[str, set[str]] = {}
    row = re.compile(r"^\| `(ray\.train\.[\w.]+)` \| (`.*`) \| \S.* \|$", re.MULTILINE)
    for package, names in row.findall(PAGE.read_text()):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in listed.setdefault(package, set()), f"{package}.{name} is listed twice"
            listed[package].add(name)
    assert listed == packages_of_ray_train()


def test_a_trial_of_ray_tune_takes_five_lines():
    """They are run with the code of all pages, and by Tune itself in the soak of the parity tests."""
    section = PAGE.read_text().partition("\n### Ray Tune\n")[2]
    code = re.search(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert code, "the page shows no trial that runs a trainer"
    trial = ast.parse(code[1]).body[0]
    assert len(ast.unparse(trial).splitlines()) <= 5
    assert "tune.report(trainer.fit().metrics)" in ast.unparse(trial)


def test_every_line_has_a_status_and_every_difference_is_explained():
    for item, row in TABLE.items():
        assert row.status in ("same", "different", "refused"), str(item)
        assert row.status == "same" or row.explanation, (
            f"{item} is {row.status}, but the page doesn't say how"
        )


@pytest.mark.parametrize("item", items_that_are("same", "different"), ids=str)
def test_what_is_the_same_or_different_is_here(item):
    if not item.parameter:
        here(item)  # raises if it isn't
        return
    owner = Item(item.module, item.name, item.member)
    if item.parameter in our_parameters(owner):
        return
    # What is an argument of a constructor there may be made when it is asked for here.
    assert TABLE[item].status == "different", f"{item} is said to be the same, but is no argument here"
    assert hasattr(here(owner), item.parameter)


@pytest.mark.parametrize("item", [item for item in items_that_are("same") if item.parameter], ids=str)
def test_what_is_the_same_has_the_same_default(item):
    default = real_parameters(item)[item.parameter]
    if default == "…":
        return
    ours = our_parameters(Item(item.module, item.name, item.member))[item.parameter]
    assert ours.default == default


@pytest.mark.parametrize(
    "item", [item for item in items_that_are("same", "different") if not item.parameter], ids=str
)
def test_functions_take_their_arguments_in_the_same_order(item):
    value = here(item)
    if inspect.isclass(value) or not callable(getattr(value, "__func__", value)):
        return
    refused = {
        name for name in real_parameters(item) if is_refused(Item(item.module, item.name, item.member, name))
    }
    expected = [name for name in real_parameters(item) if name not in refused and name != "cls"]
    ours = [
        name
        for name, parameter in our_parameters(item).items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in ("self", "cls")
    ]
    assert ours[: len(expected)] == expected


def train() -> None:
    """A training function."""


REQUIRED_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "Checkpoint": ("/a/checkpoint",),
    "Result": (None, None, None, "/a/run"),
    "TorchTrainer": (train,),
    "JaxTrainer": (train,),
    "report": ({},),
    "Result.from_path": ("/a/run",),
}
VALUES: dict[str, object] = {  # where not just any object gets as far as the refusal
    "relax_collectives_on_preemption": True,
    "preemption_grace_s": 30.0,
}
ALONGSIDE: dict[str, dict[str, object]] = {}


def use(item: Item) -> Callable[[], object]:
    """A way to use a refused name, member or argument, as a script that comes from Ray Train would."""
    owner = Item(item.module, item.name)
    if item.parameter:
        path = f"{item.name}.{item.member}" if item.member else item.name
        function = getattr(here(owner), item.member) if item.member else here(owner)
        given = {item.parameter: VALUES.get(item.parameter, object()), **ALONGSIDE.get(item.parameter, {})}
        return lambda: function(*REQUIRED_ARGUMENTS.get(path, ()), **given)
    if not item.member:
        return lambda: here(owner)(object())
    cls = here(owner)
    if isinstance(here(item), classmethod):
        return lambda: getattr(cls, item.member)(object())
    instance = object.__new__(cls) if inspect.isabstract(cls) or item.name == "TrainContext" else None
    instance = cls(*REQUIRED_ARGUMENTS.get(item.name, ())) if instance is None else instance
    if isinstance(here(item), property):
        return lambda: getattr(instance, item.member)
    return lambda: getattr(instance, item.member)()


@pytest.mark.parametrize("item", items_that_are("refused"), ids=str)
def test_what_is_refused_raises_an_error_with_a_remedy(item):
    with pytest.raises(EverstepError) as caught:
        use(item)()
    assert caught.value.remedy, f"{caught.value} has no remedy"
    # What was refused is named: the argument, or one that it only comes with; else the name itself.
    names = [item.parameter, *ALONGSIDE.get(item.parameter, {})] if item.parameter else []
    assert any(name in str(caught.value) for name in [*names, item.member or item.name])


def test_a_trainer_without_a_framework_takes_what_the_others_take():
    from everstep import Trainer

    for name in (
        "train_loop_per_worker",
        "train_loop_config",
        "scaling_config",
        "run_config",
        "backend_config",
    ):
        assert name in inspect.signature(Trainer).parameters
