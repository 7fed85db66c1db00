"""A trainer finds out what can't be right before anything starts."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys

import pytest

from everstep import ConfigError, RefusedError, RunConfig, ScalingConfig, Trainer
from everstep.backend.base import NoBackend


def takes_nothing():
    pass


def takes_config(config):
    pass


class Callable:
    def __call__(self, config):
        pass

    def method(self, config):
        pass


async def is_async(config):
    pass


def yields(config):
    yield


@pytest.mark.parametrize(
    "function",
    [
        takes_config,
        Callable(),
        Callable().method,
        functools.partial(lambda lr, config: None, 1),
        lambda c, lr=1: None,
    ],
)
def test_a_function_that_needs_one_argument_gets_the_config_or_an_empty_one(function):
    assert Trainer(function).train_loop_config == {}
    assert Trainer(function, train_loop_config={"lr": 1}).train_loop_config == {"lr": 1}


@pytest.mark.parametrize("function", [lambda config=None: None, lambda *args: None])
def test_a_function_whose_argument_is_optional_gets_the_config_if_there_is_one(function):
    assert Trainer(function).train_loop_config is None
    assert Trainer(function, train_loop_config={}).train_loop_config == {}


@pytest.mark.parametrize(
    "function", [takes_nothing, functools.partial(takes_config, {}), lambda **options: None]
)
def test_a_function_that_takes_nothing_is_called_with_nothing(function, caplog):
    assert Trainer(function).train_loop_config is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "everstep"):
        assert Trainer(function, train_loop_config={"lr": 1}).train_loop_config is None
    assert "takes no argument" in caplog.text


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (lambda model, config: None, r"\(model, config\).*functools.partial"),
        (lambda *, lr: None, r"\(lr\)"),
        (is_async, "asyncio.run"),
        (yields, "yield"),
        ("train", "expected a function"),
        (None, "expected a function"),
    ],
)
def test_a_function_that_could_not_be_called_is_refused_with_a_remedy(function, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        Trainer(function)
    assert caught.value.field == "Trainer.train_loop_per_worker"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"train_loop_config": [1]}, "train_loop_config is a list"),
        ({"scaling_config": {"num_workers": 2}}, "scaling_config is a builtins.dict.*everstep.ScalingConfig"),
        ({"run_config": "name"}, "run_config is a builtins.str.*everstep.RunConfig"),
        ({"engine": "lokal"}, "Did you mean 'local'"),
        ({"engine": None}, "engine is None"),
        ({"engine": dict}, "an instance"),
        ({"backend_config": "gloo"}, "backend_config is 'gloo'.*torch_config"),
        ({"backend_config": NoBackend}, "backend_config is"),
        ({"scaling_configs": None}, "Did you mean scaling_config"),
        ({"nonsense": 1}, "Trainer has no argument 'nonsense'"),
    ],
)
def test_a_bad_argument_is_answered_with_its_name_and_a_remedy(arguments, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        Trainer(takes_nothing, **arguments)
    assert next(iter(arguments)) in caught.value.field
    assert caught.value.remedy


@pytest.mark.parametrize(
    "argument",
    [
        "dataset_config",
        "metadata",
        "resume_from_checkpoint",
        "restore_from_checkpoint",
    ],
)
def test_an_argument_of_ray_trains_that_is_out_is_refused_with_a_remedy(argument):
    with pytest.raises(RefusedError, match=argument) as caught:
        Trainer(takes_nothing, **{argument: {"train": object()}})
    assert caught.value.remedy
    Trainer(takes_nothing, **{argument: None})


def test_what_a_refused_argument_holds_is_not_in_the_message():
    class DataSet:
        def __repr__(self):
            return "a thousand rows"

    with pytest.raises(RefusedError, match=r"Trainer\(metadata=…\) is refused") as caught:
        Trainer(takes_nothing, metadata={"train": DataSet()})
    assert "a thousand rows" not in str(caught.value)


def test_a_subclass_answers_with_its_own_name_and_arguments():
    class MyTrainer(Trainer):
        def __init__(self, train_loop_per_worker, *, my_config=None, **rest):
            super().__init__(train_loop_per_worker, **rest)

    with pytest.raises(ConfigError, match="MyTrainer has no argument 'my_confg'. Did you mean my_config?"):
        MyTrainer(takes_nothing, my_confg=1)
    with pytest.raises(RefusedError, match="MyTrainer.metadata="):
        MyTrainer(takes_nothing, metadata={"train": 1})
    MyTrainer(takes_nothing, my_config=1, run_config=RunConfig())


def test_restoring_is_refused_since_the_same_name_resumes():
    for call in (Trainer.restore, Trainer.can_restore):
        with pytest.raises(RefusedError, match="storage_path=…, name=…"):
            call("/some/path")


def test_defaults_are_one_worker_and_no_backend():
    trainer = Trainer(takes_nothing)
    assert trainer.scaling_config == ScalingConfig(num_workers=1)
    assert isinstance(trainer.backend(), NoBackend)
    assert trainer.engine == "auto"


def test_an_engine_or_a_backend_of_ones_own_is_taken_as_it_is():
    engine, backend = object(), NoBackend()
    trainer = Trainer(takes_nothing, engine=engine, backend_config=backend)
    assert trainer.engine is engine
    assert trainer.backend() is backend


def test_the_config_that_was_given_can_change_later_without_the_trainer():
    config = {"lr": 1}
    trainer = Trainer(takes_config, train_loop_config=config)
    config["lr"] = 2
    assert trainer.train_loop_config == {"lr": 1}


def test_making_a_trainer_imports_no_framework_and_no_driver():
    script = (
        "import sys, everstep\n"
        "everstep.Trainer(lambda: None)\n"
        "found = {'torch', 'jax', 'ray', 'numpy', 'pandas', 'everstep.driver.run'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
