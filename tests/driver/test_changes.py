"""What has changed since a run was last started: all of it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep import ScalingConfig
from everstep.driver import payload
from everstep.driver.changes import changes
from everstep.journal.records import Opened, Owner

FUNCTION, SCALING = "the training function", "ScalingConfig"
CODE = {FUNCTION: "f", SCALING: "s", "/user/train.py": "t", "/user/model.py": "m"}


def opened(code: dict[str, str]) -> Opened:
    owner = Owner("host", "boot", 1, 1)
    return Opened(3, 1, owner, 0.0, 0.0, "0", "run", 2, 4, "fingerprint", "config", "nonce", code=code)


@pytest.mark.parametrize(
    ("config", "workers", "code", "says"),
    [
        ("other", (2, 4), {}, "train_loop_config"),
        ("other", (2, 4), {FUNCTION: "g"}, "train_loop_config; the training function"),
        (
            "other",
            (2, 2),
            {FUNCTION: "g", SCALING: "r", "/user/model.py": "n"},
            "train_loop_config; ScalingConfig.num_workers, which was 2 to 4; the training function; model.py",
        ),
        ("config", (2, 4), {SCALING: "r"}, "ScalingConfig"),
        (
            "config",
            (2, 4),
            {f"/user/{name}.py": "new" for name in "abcde"},
            "a.py; b.py; c.py; 2 more files",
        ),
    ],
)
def test_all_that_has_changed_is_named(
    config: str,
    workers: tuple[int, int],
    code: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.getcwd", lambda: "/user")
    assert changes(opened(CODE), config, workers, {**CODE, **code}) == says


def test_of_a_run_that_an_earlier_version_opened_less_is_known() -> None:
    assert changes(opened({}), "other", (2, 4), CODE) == "train_loop_config"
    assert "the training function, a module" in changes(opened({}), "config", (2, 4), CODE)


def test_a_function_and_the_workers_have_digests_of_their_own() -> None:
    def one() -> int:
        return 1

    def two() -> int:
        return 2

    first = payload.code_digests(one, ScalingConfig(num_workers=1))
    assert payload.code_digests(one, ScalingConfig(num_workers=1)) == first
    second = payload.code_digests(two, ScalingConfig(num_workers=2))
    assert {name for name in first if first[name] != second[name]} == {FUNCTION, SCALING}
    assert str(Path(__file__)) in first
