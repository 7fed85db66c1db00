"""The named parts that a training state is made of, in any framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.data.stream import Stream
from everstep.errors import ConfigError
from everstep.snapshots.layout import Index


class Parts:
    """What both kinds of ``State`` have in common: they add which parts they take, and how these are captured
    and loaded.
    """

    _parts: dict[str, Any]

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(f"State({name}=…): the name is taken", "use another one", f"State.{name}")
            if "/" in name:
                raise ConfigError(
                    f"State(**{{{name!r}: …}}): the name has a slash", "use another one", f"State.{name}"
                )
            self._check(name, part)
        object.__setattr__(self, "_parts", dict(parts))

    def _check(self, name: str, part: Any) -> None:
        """Whether it can be a part."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_parts"][name]
        except KeyError:
            raise AttributeError(f"the state has no {name!r}: give it to State(…)") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._parts:
            raise AttributeError(f"the state has no {name!r}: give it to State(…)")
        self._check(name, value)
        self._parts[name] = value

    def steps_done(self) -> int | None:
        """As its stream counts them, for a session. None: it has no stream, or several."""
        streams = [part for part in self._parts.values() if isinstance(part, Stream)]
        return streams[0].step if len(streams) == 1 else None

    def _check_same(self, saved: Index) -> None:
        """Whether what was saved has the same parts."""
        if set(saved.tree) != set(self._parts):
            raise ConfigError(
                f"State.restore(): the state of step {saved.step} has {_names(saved.tree)}, and this one has "
                f"{_names(self._parts)}",
                "make the State of the same parts as before, or start a run with another name",
                "State",
            )


def is_stateful(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _names(parts: Mapping[str, Any]) -> str:
    return ", ".join(sorted(parts)) or "no parts"
