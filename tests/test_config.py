"""Configs: what is accepted, what is refused, and that each error names the field and the remedy."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from everstep import (
    CheckpointConfig,
    ConfigError,
    Deadlines,
    FailureConfig,
    LoggingConfig,
    MemoryConfig,
    RefusedError,
    RunConfig,
    ScalingConfig,
    UserCallback,
)
from everstep.config import override_from_environment
from everstep.jax import JaxTrainer
from everstep.torch import TorchftConfig, TorchTrainer

TPU = {"use_tpu": True, "topology": "4x4", "accelerator_type": "TPU-V6E", "num_workers": 4}

BAD = [
    (ScalingConfig, {"num_workers": -1}, "num_workers", "-1"),
    (ScalingConfig, {"num_workers": 1.5}, "num_workers", "1.5"),
    (ScalingConfig, {"num_workers": True}, "num_workers", "True"),
    (ScalingConfig, {"num_workers": "4"}, "num_workers", "'4'"),
    (ScalingConfig, {"num_workers": [2, 4]}, "num_workers", "tuple"),
    (ScalingConfig, {"num_workers": (4, 2)}, "num_workers", "(2, 4)"),
    (ScalingConfig, {"num_workers": (0, 2)}, "num_workers", "(1, 2)"),
    (ScalingConfig, {"num_workers": (-3, -1)}, "num_workers", "at least 1"),
    (ScalingConfig, {"num_workers": (1, 2, 3)}, "num_workers", "(min, max)"),
    (ScalingConfig, {"use_gpu": "yes"}, "use_gpu", "'yes'"),
    (ScalingConfig, {"resources_per_worker": ["CPU"]}, "resources_per_worker", "dict"),
    (ScalingConfig, {"resources_per_worker": {"cpu": 1}}, "resources_per_worker['cpu']", "'CPU'"),
    (ScalingConfig, {"resources_per_worker": {"CPU": -1}}, "resources_per_worker['CPU']", "-1"),
    (ScalingConfig, {"resources_per_worker": {"CPU": float("nan")}}, "resources_per_worker['CPU']", "nan"),
    (ScalingConfig, {"resources_per_worker": {"GPU": 1}}, "resources_per_worker['GPU']", "use_gpu=True"),
    (ScalingConfig, {"resources_per_worker": {"TPU": 4}}, "resources_per_worker['TPU']", "use_tpu=True"),
    (
        ScalingConfig,
        {"use_gpu": True, "resources_per_worker": {"GPU": 0}},
        "resources_per_worker['GPU']",
        "use_gpu=False",
    ),
    (ScalingConfig, {"placement_strategy": "PAK"}, "placement_strategy", "'PACK'"),
    (ScalingConfig, {"elastic_resize_monitor_interval_s": -1}, "elastic_resize_monitor_interval_s", "-1"),
    (ScalingConfig, {"label_selector": {"zone": 1}}, "label_selector", "strings"),
    (ScalingConfig, {"label_selector": [{"a": "b"}], "num_workers": 2}, "label_selector", "2 workers"),
    (ScalingConfig, {"topology": "4x4"}, "topology", "use_tpu=True"),
    (ScalingConfig, {**TPU, "topology": "4by4"}, "topology", "'4x4'"),
    (ScalingConfig, {**TPU, "topology": "4x0"}, "topology", "'4x4'"),
    (ScalingConfig, {**TPU, "topology": None}, "topology", "more than one worker"),
    (ScalingConfig, {**TPU, "accelerator_type": None}, "accelerator_type", "more than one worker"),
    (ScalingConfig, {**TPU, "label_selector": {"a": "b"}}, "label_selector", "Leave it out"),
    (ScalingConfig, {**TPU, "use_gpu": True}, "use_tpu", "one of"),
    (ScalingConfig, {**TPU, "topology": "4x5"}, "topology", "Did you mean"),
    (ScalingConfig, {**TPU, "accelerator_type": "TPU-V9"}, "accelerator_type", "TPU-V7X"),
    (ScalingConfig, {**TPU, "num_workers": 6}, "num_workers", "num_workers=4 or num_workers=8"),
    (ScalingConfig, {**TPU, "num_workers": (2, 8)}, "num_workers", "num_workers=(4, 8)"),
    (
        ScalingConfig,
        {**TPU, "num_workers": (4, 9)},
        "num_workers",
        "num_workers=(4, 8) or num_workers=(4, 12)",
    ),
    (
        ScalingConfig,
        {**TPU, "resources_per_worker": {"TPU": 8}},
        "resources_per_worker['TPU']",
        "1 or 2 or 4",
    ),
    (ScalingConfig, {**TPU, "slice_label": "rack"}, "slice_label", "Leave it out"),
    (ScalingConfig, {"hosts_per_slice": 2}, "hosts_per_slice", "slice_label"),
    (ScalingConfig, {"slice_label": "rack", "hosts_per_slice": 0}, "hosts_per_slice", "at least 1"),
    (ScalingConfig, {"replica_group_size": 0}, "replica_group_size", "at least 1"),
    (ScalingConfig, {"replica_group_size": 2, "num_workers": 3}, "replica_group_size", "multiple"),
    (FailureConfig, {"max_failures": -2}, "max_failures", "-1 for no limit"),
    (FailureConfig, {"max_failures": 1.0}, "max_failures", "1.0"),
    (FailureConfig, {"controller_failure_limit": -2}, "controller_failure_limit", "-2"),
    (FailureConfig, {"max_preemption_failures": None}, "max_preemption_failures", "None"),
    (CheckpointConfig, {"num_to_keep": 0}, "num_to_keep", "None to keep all"),
    (CheckpointConfig, {"memory": 0.5}, "memory", "MemoryConfig"),
    (MemoryConfig, {"every_s": -1}, "every_s", "-1"),
    (MemoryConfig, {"host_fraction": 0}, "host_fraction", "memory=None"),
    (MemoryConfig, {"host_fraction": 1.5}, "host_fraction", "0.5 for half"),
    (MemoryConfig, {"copies": -1}, "copies", "or 0 for none"),
    (MemoryConfig, {"copies": 1.5}, "copies", "Use 1 for a copy"),
    (MemoryConfig, {"copy_rate": 0}, "copy_rate", "1e9 for a gigabyte"),
    (CheckpointConfig, {"checkpoint_score_attribute": ""}, "checkpoint_score_attribute", "''"),
    (CheckpointConfig, {"checkpoint_score_order": "maximum"}, "checkpoint_score_order", "'max'"),
    (LoggingConfig, {"log_level": "LOUD"}, "log_level", "'LOUD'"),
    (LoggingConfig, {"log_level": 10}, "log_level", "10"),
    (RunConfig, {"name": "a/b"}, "name", "storage_path"),
    (RunConfig, {"name": "a\\b"}, "name", "slashes"),
    (RunConfig, {"name": ""}, "name", "''"),
    (RunConfig, {"name": ".."}, "name", "'..'"),
    (RunConfig, {"name": " a"}, "name", "spaces"),
    (RunConfig, {"name": "a\nb"}, "name", "printable"),
    (RunConfig, {"name": "x" * 201}, "name", "200 bytes"),
    (RunConfig, {"name": 7}, "name", "7"),
    (RunConfig, {"storage_path": 7}, "storage_path", "7"),
    (RunConfig, {"storage_path": ""}, "storage_path", "folder"),
    (RunConfig, {"storage_path": "hdfs://a/b"}, "storage_path", "hdfs"),
    (RunConfig, {"storage_path": "file://host/b"}, "storage_path", "file:///"),
    (RunConfig, {"failure_config": {"max_failures": 3}}, "failure_config", "FailureConfig"),
    (RunConfig, {"deadlines": 3}, "deadlines", "Deadlines"),
    (RunConfig, {"callbacks": [print]}, "callbacks", "UserCallback"),
    (RunConfig, {"callbacks": 3}, "callbacks", "list"),
    (RunConfig, {"worker_runtime_env": "x"}, "worker_runtime_env", "dict"),
    (RunConfig, {"worker_runtime_env": {"env_vars": {"A": 1}}}, "worker_runtime_env", "'1'"),
    (RunConfig, {"worker_runtime_env": {"env_vars": {"A=B": "1"}}}, "worker_runtime_env", "A=B"),
    (RunConfig, {"worker_runtime_env": {"env_vars": ["A"]}}, "worker_runtime_env", "dict of strings"),
    (RunConfig, {"worker_runtime_env": {"working_dir": "/no/such/folder"}}, "working_dir", "exists"),
    (RunConfig, {"log_ranks": "0"}, "log_ranks", "tuple"),
    (RunConfig, {"log_ranks": (-1,)}, "log_ranks", "-1"),
    (RunConfig, {"if_finished": "again"}, "if_finished", "'return'"),
    (RunConfig, {"lease_ttl_s": 0}, "lease_ttl_s", "above 0"),
    (RunConfig, {"lease_ttl_s": float("inf")}, "lease_ttl_s", "inf"),
    (RunConfig, {"metrics_port": 65536}, "metrics_port", "0 to 65535"),
    (RunConfig, {"metrics_port": -1}, "metrics_port", "0 to 65535"),
    (RunConfig, {"metrics_port": "9400"}, "metrics_port", "0 to 65535"),
    (RunConfig, {"metrics_port": True}, "metrics_port", "0 to 65535"),
    (RunConfig, {"metrics_host": ""}, "metrics_host", "127.0.0.1"),
    (RunConfig, {"metrics_host": None}, "metrics_host", "127.0.0.1"),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "field", "hint"), BAD, ids=[f"{k.__name__}-{a}" for k, a, _, _ in BAD]
)
def test_a_bad_value_is_answered_with_its_field_and_a_remedy(kind, arguments, field, hint):
    with pytest.raises(ConfigError) as caught:
        kind(**arguments)
    error = caught.value
    assert field in error.field
    assert field in str(error)
    assert hint in str(error)
    assert error.remedy
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [("STRICT_PACK", "Use 'PACK', and a label"), ("STRICT_SPREAD", "Use 'SPREAD', and resources")],
)
def test_what_comes_with_a_later_release_is_refused_and_says_what_to_use_until_then(strategy, instead):
    with pytest.raises(RefusedError, match="comes with a later release") as refused:
        ScalingConfig(placement_strategy=strategy)
    assert refused.value.field == "ScalingConfig.placement_strategy"
    assert f"placement_strategy='{strategy}'" in str(refused.value)
    assert instead in str(refused.value)


def test_a_tpu_slice_has_one_worker_for_each_host_unless_told_otherwise():
    assert ScalingConfig(**TPU).worker_resources == {"TPU": 4}
    assert ScalingConfig(**TPU).workers_per_slice == 4
    finer = ScalingConfig(**{**TPU, "num_workers": (16, 32)}, resources_per_worker={"TPU": 1})
    assert finer.workers_per_slice == 16
    assert ScalingConfig(use_tpu=True).worker_resources == {"TPU": 1}


def test_label_selectors_that_differ_between_workers_are_refused():
    with pytest.raises(RefusedError, match="one dict"):
        ScalingConfig(num_workers=2, label_selector=[{"a": "b"}, {"a": "c"}])
    ScalingConfig(num_workers=2, label_selector=[{"a": "b"}, {"a": "b"}])


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (
            "endpoint_override=http://localhost:9000",
            {"aws_endpoint": "http://localhost:9000", "allow_http": "true"},
        ),
        (
            "endpoint_override=localhost:9&scheme=http",
            {"aws_endpoint": "http://localhost:9", "allow_http": "true"},
        ),
        ("endpoint_override=minio.here&region=r", {"aws_endpoint": "https://minio.here", "aws_region": "r"}),
        ("region=eu-west-1", {"aws_region": "eu-west-1"}),
    ],
)
def test_ray_trains_arguments_in_an_s3_address_are_storage_options(arguments, options):
    run = RunConfig(storage_path=f"s3://bucket/runs/?{arguments}")
    assert (run.storage_path, run.storage_options) == ("s3://bucket/runs", options)
    given = RunConfig(storage_path=f"s3://bucket/runs?{arguments}", storage_options={"aws_region": "mine"})
    assert given.storage_options == {**options, "aws_region": "mine"}


@pytest.mark.parametrize(
    "path", ["s3://b/runs?allow_bucket_creation=true", "gs://b/runs?endpoint_override=x", "az://b?region=x"]
)
def test_any_other_argument_in_an_address_is_refused_with_the_options_to_write(path):
    with pytest.raises(ConfigError, match=r"storage_options=.*aws_endpoint") as raised:
        RunConfig(storage_path=path)
    assert raised.value.field == "RunConfig.storage_path"


def test_credentials_in_an_address_are_refused_and_not_shown():
    with pytest.raises(ConfigError, match="aws_access_key_id") as raised:
        RunConfig(storage_path="s3://key:hush@bucket/runs")
    assert "hush" not in str(raised.value)


def test_a_question_mark_may_be_part_of_a_key():
    assert RunConfig(storage_path="s3://bucket/what?").storage_path == "s3://bucket/what?"
    assert RunConfig(storage_path="/data/a?b=c").storage_path == "/data/a?b=c"


@pytest.mark.parametrize("path", ["s3://bucket/runs", "gs://bucket/runs", "az://container/runs"])
def test_a_remote_storage_path_is_kept_as_it_is(path):
    assert RunConfig(storage_path=path + "/").storage_path == path


def test_storage_options_are_strings_and_not_shown():
    run = RunConfig(
        storage_path="s3://b", storage_options={"aws_secret_access_key": "hush", "allow_http": True}
    )
    assert run.storage_options == {"aws_secret_access_key": "hush", "allow_http": "true"}
    assert "hush" not in repr(run)
    with pytest.raises(ConfigError, match=r"storage_options\['a'\].*'int'"):
        RunConfig(storage_options={"a": 1})
    with pytest.raises(ConfigError, match="bucket after the slashes"):
        RunConfig(storage_path="s3:///runs")


def test_parts_of_a_runtime_environment_that_only_ray_serves_are_kept_for_it():
    assert RunConfig(worker_runtime_env={"pip": ["requests"]}).worker_runtime_env == {"pip": ["requests"]}


@pytest.mark.parametrize(
    "kind", [ScalingConfig, RunConfig, FailureConfig, CheckpointConfig, MemoryConfig, LoggingConfig]
)
def test_an_unknown_argument_is_a_config_error_that_lists_the_known_ones(kind):
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no argument 'zzz'.*It takes: "):
        kind(zzz=1)


def test_an_argument_that_is_nearly_right_is_answered_with_the_right_one():
    with pytest.raises(ConfigError, match="Did you mean num_workers?"):
        ScalingConfig(num_worker=2)


def test_arguments_without_a_name_where_names_are_needed_are_a_config_error():
    with pytest.raises(ConfigError, match="by name only"):
        ScalingConfig(4)
    with pytest.raises(ConfigError, match="num_to_keep twice"):
        CheckpointConfig(3, num_to_keep=4)
    assert FailureConfig(3).max_failures == 3
    assert CheckpointConfig(2, "loss", "min").checkpoint_score_order == "min"


def test_an_argument_of_ray_trains_that_asks_for_nothing_is_let_by():
    assert ScalingConfig(trainer_resources=None) == ScalingConfig()
    assert FailureConfig(relax_collectives_on_preemption=False, preemption_grace_s=0.0) == FailureConfig()
    assert RunConfig(storage_filesystem=None) == RunConfig()


def test_workers_may_be_a_number_a_range_or_none():
    fixed, elastic, in_process = (
        ScalingConfig(num_workers=4),
        ScalingConfig(num_workers=(2, 6)),
        ScalingConfig(num_workers=0),
    )
    assert (fixed.min_workers, fixed.max_workers, fixed.elasticity_enabled) == (4, 4, False)
    assert (elastic.min_workers, elastic.max_workers, elastic.elasticity_enabled) == (2, 6, True)
    assert (in_process.min_workers, in_process.max_workers) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "one_worker"),
    [
        ({}, {"CPU": 1}),
        ({"use_gpu": True}, {"GPU": 1}),
        ({"use_gpu": True, "resources_per_worker": {"CPU": 4}}, {"CPU": 4, "GPU": 1}),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 2}}, {"GPU": 2}),
        ({"resources_per_worker": {"CPU": 0, "memory": 1e9}}, {"memory": 1e9}),
    ],
)
def test_resources_of_a_worker_are_those_of_ray_train(arguments, one_worker):
    scaling = ScalingConfig(num_workers=(1, 3), **arguments)
    assert scaling.worker_resources == one_worker
    assert scaling.total_resources == {name: 3 * amount for name, amount in one_worker.items()}
    assert scaling.num_cpus_per_worker == one_worker.get("CPU", 0)
    assert scaling.num_gpus_per_worker == one_worker.get("GPU", 0)
    assert scaling.num_tpus_per_worker == 0
    assert scaling.additional_resources_per_worker == {
        name: amount for name, amount in one_worker.items() if name == "memory"
    }


def test_configs_are_frozen_comparable_and_picklable():
    for config in (
        ScalingConfig(num_workers=2),
        RunConfig(name="a"),
        FailureConfig(1),
        CheckpointConfig(1),
        MemoryConfig(every_s=1),
        LoggingConfig(),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.name = "x"
        assert pickle.loads(pickle.dumps(config)) == config
        assert copy.deepcopy(config) == config
    assert dataclasses.replace(RunConfig(name="a"), name="b").name == "b"


def test_a_dict_given_to_a_config_can_change_later_without_the_config():
    asked = {"CPU": 1}
    scaling = ScalingConfig(resources_per_worker=asked)
    asked["CPU"] = 9
    assert scaling.worker_resources == {"CPU": 1}


def test_none_stands_for_every_default_of_a_run():
    run = RunConfig(
        storage_path=None,
        failure_config=None,
        checkpoint_config=None,
        logging_config=None,
        callbacks=None,
        worker_runtime_env=None,
    )
    assert run == RunConfig()
    assert run.storage_path == str(Path("~/everstep_results").expanduser())
    assert run.name is None


@pytest.mark.parametrize(
    ("given_path", "kept"),
    [
        ("~/x", str(Path("~/x").expanduser())),
        ("x/../y", str(Path.cwd() / "y")),
        (Path("/a/b"), "/a/b"),
        ("file:///a/b%20c/", "/a/b c"),
    ],
)
def test_a_storage_path_is_kept_as_an_absolute_folder(given_path, kept):
    assert RunConfig(storage_path=given_path).storage_path == kept


def test_callbacks_are_taken_from_any_iterable_and_kept_as_a_tuple():
    callback = UserCallback()
    assert RunConfig(callbacks=[callback]).callbacks == (callback,)
    assert RunConfig(log_ranks=[0, 2]).log_ranks == (0, 2)


def test_a_runtime_environment_keeps_variables_and_an_absolute_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunConfig(worker_runtime_env={"env_vars": {"A": "1"}, "working_dir": ".", "pip": None})
    assert run.worker_runtime_env == {"env_vars": {"A": "1"}, "working_dir": str(tmp_path)}


def test_log_levels_are_taken_in_any_case():
    assert LoggingConfig("debug").log_level == "DEBUG"
    assert LoggingConfig("debug").level == logging.DEBUG


def test_an_environment_variable_overrides_its_deadline(monkeypatch):
    monkeypatch.setenv("EVERSTEP_START_S", "7.5")
    monkeypatch.setenv("EVERSTEP_SET_ASIDE_AFTER", "5")
    run = RunConfig(deadlines=Deadlines(start_s=1, kill_s=2))
    assert (run.deadlines.start_s, run.deadlines.set_aside_after, run.deadlines.kill_s) == (7.5, 5, 2)


def test_an_environment_variable_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="EVERSTEP_START_S is 'soon'"):
        override_from_environment(Deadlines(), {"EVERSTEP_START_S": "soon"})


def test_environment_variables_that_contradict_each_other_are_named():
    with pytest.raises(ConfigError, match="heartbeat_timeout_s.*EVERSTEP_HEARTBEAT_TIMEOUT_S"):
        override_from_environment(Deadlines(), {"EVERSTEP_HEARTBEAT_TIMEOUT_S": "0.1"})


@given(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.tuples(st.integers(), st.integers()),
    )
)
def test_any_number_of_workers_is_either_right_or_a_config_error(num_workers):
    try:
        scaling = ScalingConfig(num_workers=num_workers)
    except ConfigError as error:
        assert error.field == "ScalingConfig.num_workers"
    else:
        assert 0 <= scaling.min_workers <= scaling.max_workers


@given(st.text())
def test_any_name_that_is_accepted_is_one_part_of_a_path(name):
    try:
        RunConfig(name=name)
    except ConfigError as error:
        assert error.field == "RunConfig.name"
    else:
        assert Path("/runs", name).parent == Path("/runs")


def test_torchft_config_takes_what_ray_trains_takes_and_answers_what_it_cannot_serve():
    config = TorchftConfig({"min_replicas": 2}, backend="gloo")
    assert (config.lighthouse_kwargs, config.backend, config.replica_group_size) == (
        {"min_replicas": 2},
        "gloo",
        1,
    )
    for wrong, hint in (
        ({"lighthouse_kwargs": {"bind": "[::]:1"}}, "elsewhere"),
        ({"lighthouse_kwargs": {"min_replica": 1}}, "min_replicas"),
        ({"lighthouse_kwargs": {"min_replicas": 0}}, "at least 1"),
        ({"replica_group_size": 0}, "at least 1"),
        ({"max_replica_failures": -2}, "at least -1"),
    ):
        with pytest.raises(ConfigError, match=hint):
            TorchftConfig(**wrong)


def test_what_torchft_config_says_of_groups_and_what_scaling_config_says_fit_together():
    def scaling(num_workers, config, **more):
        given = ScalingConfig(num_workers=num_workers, **more)
        return TorchTrainer(lambda: None, scaling_config=given, torch_config=config).scaling_config

    assert scaling(4, TorchftConfig(replica_group_size=2)).replica_group_size == 2
    assert scaling(4, TorchftConfig(min_replica_groups=3)).num_workers == (3, 4)
    with pytest.raises(ConfigError, match="Give it once"):
        scaling(4, TorchftConfig(replica_group_size=2), replica_group_size=4)
    with pytest.raises(ConfigError, match="fewest workers once"):
        scaling((2, 4), TorchftConfig(min_replica_groups=3))
    with pytest.raises(ConfigError, match="multiple"):
        scaling(3, TorchftConfig(replica_group_size=2))
    with pytest.raises(RefusedError, match="JaxTrainer"):
        JaxTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=2, replica_group_size=1))
