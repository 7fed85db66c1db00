"""Errors say the first cause first, and survive a pickle."""

from __future__ import annotations

import pickle

import pytest

import everstep
from everstep import (
    ConfigError,
    ControllerError,
    EverstepError,
    NCCLHangError,
    PreemptionError,
    PreemptionInfo,
    TrainingFailedError,
    WorkerError,
    WorkerGroupError,
)
from everstep.errors import ConflictingFilesError, ConflictingPlacesError, DamagedCheckpointError

ECHO = WorkerError(0, "host-0", "raised RuntimeError: connection closed by peer", exit_code=1)
CAUSE = WorkerError(
    2,
    "host-1",
    "raised ValueError: bad batch",
    exit_code=1,
    traceback='Traceback (most recent call last):\n  File "train.py", line 3\nValueError: bad batch\n',
    log_tail=("step 41", "step 42"),
    log_path="/run/logs/rank-2.log",
)
PREEMPTED = PreemptionInfo(deadline_ms=5, preempted_node_to_ranks={"b": [3, 2], "a": [2]})


def test_the_first_line_is_the_first_cause_and_echoes_come_last():
    error = WorkerGroupError("no restart allowed (max_failures=0).", {0: ECHO, 2: CAUSE}, first_rank=2)
    lines = str(error).splitlines()
    assert lines[0] == "Training failed: rank 2 on host-1 raised ValueError: bad batch"
    assert lines[1] == "no restart allowed (max_failures=0)."
    assert str(error).index('File "train.py"') < str(error).index("step 42") < str(error).index("by peer")
    assert "/run/logs/rank-2.log" in str(error)
    assert error.first_cause is CAUSE
    assert error.worker_failures[0] is ECHO


def test_failures_may_be_any_exceptions_as_in_ray_train():
    cause, echo = ValueError("bad batch"), ConnectionError()
    error = WorkerGroupError("No retry is left.", {2: cause, 0: echo})
    assert str(error).splitlines()[0] == "Training failed: rank 2 raised ValueError: bad batch"
    assert "rank 0 raised ConnectionError" in str(error)
    assert error.worker_failures == {2: cause, 0: echo}
    assert error.first_cause is not None
    assert error.first_cause.rank == 2
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), [*again.worker_failures]) == (str(error), [2, 0])
    assert str(NCCLHangError("hung", {1: TimeoutError("600 s")})).startswith("Training failed: rank 1 raised")


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"signal": 9}, "rank 1 was killed by SIGKILL"),
        ({"signal": 40}, "rank 1 was killed by signal 40"),
        ({"exit_code": 3}, "rank 1 exited with code 3"),
        ({"host": "h", "reason": "was lost with its host"}, "rank 1 on h was lost with its host"),
        ({}, "rank 1 failed"),
    ],
)
def test_how_a_worker_ended_is_told_by_name(facts, told):
    error = WorkerError(1, **facts)
    assert str(error) == told
    assert str(WorkerGroupError("", {1: error})).splitlines()[0] == f"Training failed: {told}"


def test_the_relations_are_those_of_ray_train():
    for kind in (WorkerGroupError, ControllerError, PreemptionError):
        assert issubclass(kind, TrainingFailedError)
    assert issubclass(NCCLHangError, WorkerGroupError)
    assert issubclass(TrainingFailedError, EverstepError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    "error",
    [
        CAUSE,
        WorkerGroupError("spent.", {0: ECHO, 2: CAUSE}, 2),
        NCCLHangError("spent.", {2: CAUSE}),
        ControllerError(OSError("no route")),
        PreemptionError(PREEMPTED, drain_timed_out=True),
        ConfigError("is wrong.", "Do right.", "field"),
        ConflictingFilesError("model.pt", (0, 1)),
        ConflictingPlacesError(0, "s3://a", 1, "s3://b"),
        DamagedCheckpointError("/run/checkpoint_1", "model.pt", "is missing"),
        everstep.ReturnValueError("it can't be loaded", "the rest"),
        everstep.TooLargeError("of 300 MiB.", "Save it.", "metrics"),
        *(
            getattr(everstep, name)("what.", "Do.")
            for name in (
                "EverstepError",
                "TrainingFailedError",
                "FunctionLoadError",
                "InfeasibleResourcesError",
                "RefusedError",
                "StorageError",
                "StorageAccessError",
            )
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_a_pickle_with_all_they_carry(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.remedy == error.remedy
    assert set(vars(copy)) == set(vars(error))


def test_a_preemption_names_its_ranks_and_the_budget():
    assert PREEMPTED.preempted_ranks == [2, 3]
    assert PREEMPTED.preempted_node_ids == ["a", "b"]
    assert "ranks 2, 3" in str(PreemptionError(PREEMPTED))
    assert "max_preemption_failures" in str(PreemptionError(PREEMPTED))


def test_an_error_of_the_controller_shows_what_it_was():
    assert "OSError: no route" in str(ControllerError(OSError("no route")))
