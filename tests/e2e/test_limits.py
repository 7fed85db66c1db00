"""What is too large, or can't be loaded, is named with its limit and a remedy, and nothing is tried again."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import (
    FailureConfig,
    FunctionLoadError,
    Result,
    ReturnValueError,
    RunConfig,
    ScalingConfig,
    Trainer,
    WorkerGroupError,
)
from everstep.journal import journal, records
from processes import LIMIT_S

from .scripts import start

TOO_MUCH = 300 << 20


def fit(tmp_path: Path, function: Any, workers: int = 1, **kwargs: Any) -> Result:
    return Trainer(
        function,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="large", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=-1)
        ),
        **kwargs,
    ).fit()


def starts(tmp_path: Path) -> int:
    """How often the training function was started."""
    return len(list((tmp_path / "large" / "logs").glob("*")))


def test_a_function_that_is_too_large_is_refused_and_the_variable_named(tmp_path: Path) -> None:
    weights = b"x" * TOO_MUCH

    def function() -> int:
        return len(weights)

    with pytest.raises(FunctionLoadError, match=r"300 MiB pickled, most of it 'weights' .* 256 MiB"):
        fit(tmp_path, function)
    assert starts(tmp_path) == 0


def test_a_config_that_is_too_large_is_refused_and_the_key_named(tmp_path: Path) -> None:
    with pytest.raises(FunctionLoadError, match=r"train_loop_config is too large .*\['data'\] \(300 MiB\)"):
        fit(tmp_path, lambda config: None, train_loop_config={"lr": 1.0, "data": b"x" * TOO_MUCH})
    assert starts(tmp_path) == 0


def test_metrics_that_are_too_large_are_named_and_never_tried_again(tmp_path: Path) -> None:
    def function() -> None:
        everstep.report({"loss": 1.0, "blob": "x" * TOO_MUCH})

    with pytest.raises(WorkerGroupError, match=r"report\(metrics\) of 300 MiB, of which 'blob' has 300 MiB"):
        fit(tmp_path, function)
    assert starts(tmp_path) == 1


def test_a_broadcast_that_is_too_large_is_named_and_never_tried_again(tmp_path: Path) -> None:
    def function() -> None:
        everstep.collective.broadcast_from_rank_zero(b"x" * TOO_MUCH)

    with pytest.raises(WorkerGroupError, match=r"broadcast_from_rank_zero\(\) of a bytes of 300 MiB"):
        fit(tmp_path, function, workers=2)
    assert starts(tmp_path) == 1


def test_an_exception_with_an_endless_message_is_one_like_any_other(tmp_path: Path) -> None:
    def function() -> None:
        raise ValueError("x" * TOO_MUCH)

    with pytest.raises(WorkerGroupError, match="raised ValueError: xxx"):
        Trainer(function, run_config=RunConfig(storage_path=str(tmp_path))).fit()


def saves_and_returns(value: Any) -> Any:
    import tempfile

    place = Path(tempfile.mkdtemp())
    (place / "model").write_text("trained")
    everstep.report({"loss": 0.5}, everstep.Checkpoint(str(place)))
    return value


class OnlyThere:
    """Like a CUDA tensor where there is no GPU: it can't come back in the driver's process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (load_on_workers_only, ())


def load_on_workers_only() -> None:
    raise RuntimeError("Attempting to deserialize object on a CUDA device but torch.cuda is not available")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OnlyThere(), "can't be loaded in this process: RuntimeError: Attempting to deserialize"),
        (lambda: b"x" * TOO_MUCH, "it has 300 MiB, and at most 256 MiB can be sent"),
        (lambda: (n for n in range(3)), "it can't be pickled: TypeError"),
    ],
    ids=["not loadable", "too large", "not picklable"],
)
def test_a_return_value_that_can_not_be_had_is_an_error_of_its_own_and_nothing_is_trained_again(
    tmp_path: Path, make: Any, says: str
) -> None:
    with pytest.raises(ReturnValueError, match=says) as caught:
        fit(tmp_path, lambda: saves_and_returns(make()))
    assert starts(tmp_path) == 1
    result = caught.value.result
    assert isinstance(result, Result)
    assert result.metrics == {"loss": 0.5}
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "model").read_text() == "trained"
    (end,) = [r for r in journal.read(tmp_path / "large") if isinstance(r, records.Closed)]
    assert end.outcome == "finished"
    assert fit(tmp_path, lambda: saves_and_returns(make())).checkpoint == result.checkpoint


def test_too_few_file_descriptors_are_named_and_nothing_is_tried_again(tmp_path: Path) -> None:
    process: subprocess.Popen[str] = start(
        tmp_path,
        """
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        Trainer(
            lambda: None,
            scaling_config=ScalingConfig(num_workers=3),
            run_config=RunConfig(storage_path=str(HERE / "runs")),
        ).fit()
        """,
    )
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert "3 workers on one host need" in last
    assert "its limit is 64" in last
    assert "ulimit -Hn" in last
    assert errors.count("attempt 1") <= 1
    assert "attempt 2" not in errors
