"""The logging that workers take over from the user's script."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.protocol.script import LogHandler, Script, set_up_logging, this_script

NAME = "everstep-test-script"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(NAME)
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def taken_over(logger: logging.Logger) -> list[logging.Handler]:
    """Its handlers, in a process that has taken over what this one says of itself."""
    script = msgspec.msgpack.decode(msgspec.msgpack.encode(this_script()), type=Script)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    set_up_logging(script)
    return logger.handlers


def test_a_handler_keeps_its_level_and_format_and_writes_to_the_workers_own_output(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.ERROR)
    handler.setFormatter(logging.Formatter("$levelname: $message", style="$"))
    logger.addHandler(handler)
    logger.propagate = False
    assert len(taken_over(logger)) == 1
    logger.warning("below its level")
    logger.error("lost")
    assert capsys.readouterr().out == "ERROR: lost\n"


def test_a_file_of_the_scripts_is_not_written_to(logger: logging.Logger, tmp_path: Path) -> None:
    logger.addHandler(logging.FileHandler(tmp_path / "script.log"))
    assert taken_over(logger) == []


def test_a_format_that_needs_more_than_records_have_is_replaced_by_the_usual_one(
    logger: logging.Logger,
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(request_id)s %(message)s"))
    logger.addHandler(handler)
    (described,) = [setup.handlers for setup in this_script().loggers if setup.name == NAME]
    assert described == [LogHandler("stderr", 0, logging.BASIC_FORMAT, None, "%")]


def test_a_logger_that_a_module_has_set_up_here_is_left_as_it_is(logger: logging.Logger) -> None:
    logger.addHandler(logging.StreamHandler(sys.stderr))
    script = this_script()
    own = logging.NullHandler()
    logger.handlers[:] = [own]
    set_up_logging(script)
    assert logger.handlers == [own]


def test_arguments_are_the_scripts_byte_for_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["train.py", "--data", os.fsdecode(b"\xff.csv"), "ü"]
    monkeypatch.setattr(sys, "argv", given)
    script = msgspec.msgpack.decode(msgspec.msgpack.encode(this_script()), type=Script)
    assert script.arguments() == given
