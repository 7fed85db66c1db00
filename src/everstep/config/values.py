"""What a config may be given, and the errors of what it may not: field, what was seen, what to write."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection

from everstep.errors import ConfigError


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise bad(name, value, "True or False", "Write it without quotes")


def require_text(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise bad(name, value, "None or some text", "Leave it out for none")


def require_seconds(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise bad(name, value, "a number of seconds, at least 0", "Leave it out for the default")


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    if isinstance(value, str) and value in choices:
        return
    close = difflib.get_close_matches(str(value).upper(), [choice.upper() for choice in choices], n=1)
    meant = next((choice for choice in choices if close and choice.upper() == close[0]), None)
    listed = ", ".join(map(repr, choices))
    raise bad(name, value, f"one of {listed}", f"Did you mean {meant!r}" if meant else "Pick one of these")


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def put(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)  # frozen for everyone else; here it is still being made


def bad(name: str, seen: object, expected: str, remedy: str) -> ConfigError:
    text = repr(seen)
    text = text if len(text) <= 120 else f"{text[:119]}…"
    ending = "?" if remedy.startswith("Did you mean") else "."
    return ConfigError(f"{name} is {text}, expected {expected}.", f"{remedy}{ending}", name)
