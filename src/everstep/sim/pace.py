"""Nothing is tried again without a pause, and no recovery step that fails is tried forever."""

from __future__ import annotations

from collections import Counter, deque

from everstep.control import commands as c
from everstep.failures import Kind
from everstep.sim.scenario import Scenario
from everstep.sim.time import require

_WINDOW_S = 60.0


class RetryPace:
    """Of one controller."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._starts: deque[float] = deque()
        self._reserves: deque[float] = deque()
        self._news: deque[float] = deque()
        self._reasons: deque[float] = deque()
        """What a start need not wait after: a new checkpoint, a slice that is taken away."""
        self._decided_at: float | None = None
        """The last recovery from something that failed, if nothing was learnt since."""
        self._failed_starts: Counter[int] = Counter()
        """Of a replica group's replacement, in a row."""

    def news(self, now: float) -> None:
        self._news.append(now)

    def learnt(self, now: float) -> None:
        self._reasons.append(now)
        self._decided_at = None

    def start(self, now: float) -> None:
        self._starts.append(now)
        self._check(now)

    def reserve(self, now: float) -> None:
        self._reserves.append(now)
        self._check(now)

    def _check(self, now: float) -> None:
        for seen in (self._starts, self._reserves, self._news, self._reasons):
            while seen and seen[0] < now - _WINDOW_S:
                seen.popleft()
        resizes = _WINDOW_S / self._scenario.settings.resize_interval_s + 1
        calm = _WINDOW_S / self._scenario.deadlines.healthy_s + 1
        allowed = 8 * calm + resizes + 2 * len(self._reasons)
        require(len(self._starts) <= allowed, f"{len(self._starts)} starts within a minute")
        require(
            len(self._reserves) <= 2 * allowed + len(self._news),
            f"{len(self._reserves)} reservations within a minute",
        )

    def decided(self, command: c.RecoveryDecided, now: float) -> None:
        self._check_pause(command, now)
        failed_again = command.cause.kind in (Kind.START, Kind.RESERVATION)
        if not command.groups:  # everything restarts instead, as it should: groups without a place begin anew
            self._failed_starts.clear()
        for group in command.groups:
            self._failed_starts[group] = self._failed_starts[group] + 1 if failed_again else 0
            require(
                self._failed_starts[group] < self._scenario.settings.group_attempts,
                f"group {group} is replaced again and again, and that fails",
            )

    def _check_pause(self, command: c.RecoveryDecided, now: float) -> None:
        """A slice that is taken away says nothing about the next one."""
        if command.cause.kind is Kind.PREEMPTED:
            self._reasons.append(now)
            return
        last, self._decided_at = self._decided_at, now
        again = last is not None and now - last < self._scenario.deadlines.healthy_s
        require(not again or command.pause_s > 0, "a recovery follows another without a pause")

    def started(self, command: c.GroupStarted) -> None:
        for group, _ in command.generations:
            self._failed_starts.pop(group, None)
