"""Which checkpoints are kept, and how often a reported state is saved."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from everstep.config.values import bad, is_int, is_number, require_choice, require_seconds, require_text
from everstep.refusals import answers_unknown_arguments


@answers_unknown_arguments
@dataclass(frozen=True)
class MemoryConfig:
    """Snapshots in the hosts' memory, of a state that is reported (``report(…, state=…)``)."""

    _: KW_ONLY
    every_s: float | None = None
    """Seconds between snapshots; 0: one with every report. ``None``: as often as keeps the time that training
    waits for them under 2% of all.
    """
    host_fraction: float = 0.5
    """At most this part of a host's memory, or of its container's limit, for the snapshots of all its
    workers.
    """

    copies: int = 1
    """On how many other hosts each snapshot is kept as well, of other slices where there are any. 0: a lost
    host takes its snapshots along.
    """
    copy_rate: float = float(1 << 30)
    """Bytes a second that a host takes in for them, at most, while training goes on."""

    def __post_init__(self) -> None:
        if self.every_s is not None:
            require_seconds("MemoryConfig.every_s", self.every_s)
        if not is_int(self.copies) or self.copies < 0:
            raise bad(
                "MemoryConfig.copies",
                self.copies,
                "an int of at least 0",
                "Use 1 for a copy of every snapshot on another host, or 0 for none",
            )
        if not is_number(self.copy_rate) or not self.copy_rate > 0:
            raise bad(
                "MemoryConfig.copy_rate",
                self.copy_rate,
                "bytes a second, more than 0",
                "Use 1e9 for a gigabyte a second",
            )
        if not is_number(self.host_fraction) or not 0 < self.host_fraction <= 1:
            raise bad(
                "MemoryConfig.host_fraction",
                self.host_fraction,
                "a number above 0, up to 1",
                "Use 0.5 for half of each host's memory, or CheckpointConfig(memory=None) for no snapshots",
            )


@answers_unknown_arguments
@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are kept. The newest always is."""

    num_to_keep: int | None = None
    """How many to keep, the best or the newest; ``None`` keeps all. The newest is kept beside the best."""
    checkpoint_score_attribute: str | None = None
    """The metric to keep the best by, in nested metrics ``"eval/loss"``; ``None`` keeps the newest. NaN
    scores worst.
    """
    checkpoint_score_order: Literal["max", "min"] = "max"
    """Whether a high score is good, or a low one."""
    delete_external: bool = False
    """Whether retention also removes the files of checkpoints that Everstep did not upload (``NO_UPLOAD``,
    ``checkpoint_upload_fn``). Otherwise it only stops listing them.
    """
    storage_every_s: float = 600.0
    """How often a state that is reported (``report(…, state=…)``) is written to storage, in seconds. It is
    also written when the training function returns, before workers are moved or stopped, and when a machine
    is about to be taken away.
    """
    memory: MemoryConfig | None = field(default_factory=MemoryConfig)
    """Snapshots of such a state in the hosts' memory, from which workers restart without reading storage.
    ``None``: storage alone.
    """

    def __post_init__(self) -> None:
        if self.memory is not None and not isinstance(self.memory, MemoryConfig):
            raise bad(
                "CheckpointConfig.memory",
                self.memory,
                "None or an everstep MemoryConfig",
                "Make it with everstep.MemoryConfig(…)",
            )
        if not isinstance(self.delete_external, bool):
            raise bad("CheckpointConfig.delete_external", self.delete_external, "True or False", "Use a bool")
        if self.num_to_keep is not None and (not is_int(self.num_to_keep) or self.num_to_keep < 1):
            raise bad(
                "CheckpointConfig.num_to_keep",
                self.num_to_keep,
                "None or an int of at least 1",
                "Use None to keep all",
            )
        if not is_number(self.storage_every_s) or not self.storage_every_s > 0:
            raise bad(
                "CheckpointConfig.storage_every_s",
                self.storage_every_s,
                "seconds, more than 0",
                "Use 600 for every ten minutes",
            )
        require_text("CheckpointConfig.checkpoint_score_attribute", self.checkpoint_score_attribute)
        require_choice("CheckpointConfig.checkpoint_score_order", self.checkpoint_score_order, ("max", "min"))
