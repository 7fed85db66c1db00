"""When to save, the same at all ranks: every so many steps, or as many as fit into some seconds."""

from __future__ import annotations

import time

from everstep.collective import broadcast_from_rank_zero
from everstep.errors import ConfigError


class SaveCadence:
    """Asked after every step, on every rank.

    Clocks of ranks differ, and all must save at the same step. So rank 0 says now and then how many steps
    still fit; in between nobody is asked.
    """

    def __init__(self, every_steps: int | None, every_s: float | None) -> None:
        if (every_steps is None) == (every_s is None):
            raise ConfigError(
                f"every_steps={every_steps!r} and every_s={every_s!r}, expected one of the two.",
                "Give every_steps=500, or every_s=60.",
                "every_steps",
            )
        for field, value in (("every_steps", every_steps), ("every_s", every_s)):
            if value is not None and not value > 0:
                raise ConfigError(f"{field} is {value!r}, expected more than 0.", f"Give {field}=60.", field)
        self._every_steps = every_steps
        self._every_s = every_s
        self._saved: int | None = None
        """The step of the last save, or that at which training began here."""
        self._since = 0.0
        self._look_at = 0

    def is_due(self, step: int) -> bool:
        """Whether to save now that this many steps are done."""
        if self._saved is None:
            self._began(step - 1)
        assert self._saved is not None
        if self._every_steps is not None:
            due = step - self._saved >= self._every_steps
        else:
            due = step >= self._look_at and self._is_time(step, self._saved)
        if due:
            self._began(step)
        return due

    def _began(self, step: int) -> None:
        self._saved, self._since, self._look_at = step, time.monotonic(), step + 1

    def _is_time(self, step: int, saved: int) -> bool:
        assert self._every_s is not None
        done, took = step - saved, time.monotonic() - self._since
        still = broadcast_from_rank_zero(int((self._every_s - took) * done / max(took, 1e-6)))
        # What a few steps took says little of the next thousand: never more than twice as far ahead.
        self._look_at = step + min(still, 2 * done)
        return still < 1
