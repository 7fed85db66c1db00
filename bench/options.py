"""What every benchmark is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    rounds: int
    peer_rounds: int
    """0: Everstep alone."""
    say: Callable[[str], None]
    workers: int = 4
    reports: int = 100_000
    """Reports of each worker in a round of the reports benchmark."""
    peer_reports: int = 6
    steps: int = 1_000
    """Of each side in a round of the overhead benchmark."""
    incidents: int = 10_000
    """Of the run in the benchmark of the page."""
    seed: int = 0
    """Which ranks are killed, and when."""
