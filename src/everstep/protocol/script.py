"""What workers have of the user's script besides its function: its arguments and its logging."""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO

import msgspec

_OUTPUTS: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
_USUAL = logging.BASIC_FORMAT


class LogHandler(msgspec.Struct, frozen=True):
    """One that writes to the script's own output. Files stay the script's: processes can't share one."""

    stream: Literal["stdout", "stderr"]
    level: int
    format: str
    date_format: str | None
    style: Literal["%", "{", "$"]


class LoggerSetUp(msgspec.Struct, frozen=True):
    name: str
    """Empty for the root."""
    level: int
    propagate: bool
    handlers: list[LogHandler]


class Script(msgspec.Struct, frozen=True):
    argv: list[bytes] = []
    """As the system gave them: names of files need not be text."""
    loggers: list[LoggerSetUp] = []

    def arguments(self) -> list[str]:
        """As ``sys.argv`` has them."""
        return [os.fsdecode(argument) for argument in self.argv]


def this_script() -> Script:
    """Of this process, as it is now."""
    names = [name for name, logger in logging.root.manager.loggerDict.items() if _is_set_up(logger)]
    loggers = [logging.root, *map(logging.getLogger, sorted(names))]
    return Script(
        [os.fsencode(str(argument)) for argument in sys.argv], [_set_up_of(logger) for logger in loggers]
    )


def call(code: bytes, script: Script) -> bytes:
    """Do work of the script's in a process of its own: ``code`` is a pickled object with a method ``run``."""
    import cloudpickle

    sys.argv = script.arguments()
    set_up_logging(script)
    return bytes(cloudpickle.loads(code).run())


def set_up_logging(script: Script) -> None:
    """As in the script, except where a module that was imported here has set its logger up by itself."""
    for given in script.loggers:
        logger = logging.getLogger(given.name or None)
        if logger.handlers:
            continue
        logger.setLevel(given.level)
        logger.propagate = given.propagate
        for handler in given.handlers:
            logger.addHandler(_made(handler))


class _OutputHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stdout`` or ``sys.stderr`` is then: workers get their own after the fork."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        logging.Handler.__init__(self)
        self._output = name

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        found: TextIO = getattr(sys, self._output)
        return found


def _is_set_up(logger: logging.Logger | logging.PlaceHolder) -> bool:
    return isinstance(logger, logging.Logger) and bool(
        logger.level or logger.handlers or not logger.propagate
    )


def _set_up_of(logger: logging.Logger) -> LoggerSetUp:
    found = [_described(handler, logger) for handler in logger.handlers]
    name = "" if logger is logging.root else logger.name
    return LoggerSetUp(name, logger.level, logger.propagate, [handler for handler in found if handler])


def _described(handler: logging.Handler, logger: logging.Logger) -> LogHandler | None:
    """None where it isn't for the script's own output, or isn't the script's: libraries bring their own."""
    formatter = handler.formatter or logging.Formatter()
    plain = type(handler) is logging.StreamHandler and type(formatter) is logging.Formatter
    if not isinstance(handler, logging.StreamHandler) or not (plain or logger is logging.root):
        return None
    for name in _OUTPUTS:
        if handler.stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            made = LogHandler(name, handler.level, *_format_of(formatter))
            return made if _formats(made) else msgspec.structs.replace(made, format=_USUAL, style="%")
    return None


def _format_of(formatter: logging.Formatter) -> tuple[str, str | None, Literal["%", "{", "$"]]:
    """A class of the script's own stays there, and the usual format is taken."""
    styles: dict[type, Literal["%", "{", "$"]] = {
        logging.StrFormatStyle: "{",
        logging.StringTemplateStyle: "$",
    }
    if type(formatter) is not logging.Formatter or formatter._fmt is None:
        return _USUAL, formatter.datefmt, "%"
    return formatter._fmt, formatter.datefmt, styles.get(type(formatter._style), "%")


def _formats(given: LogHandler) -> bool:
    """Whether it needs no more than every record has; a filter of the script's may add to that."""
    try:
        _made(given).format(logging.makeLogRecord({}))
    except (KeyError, ValueError):
        return False
    return True


def _made(given: LogHandler) -> logging.Handler:
    handler = _OutputHandler(given.stream)
    handler.setLevel(given.level)
    handler.setFormatter(logging.Formatter(given.format, given.date_format, given.style))
    return handler
