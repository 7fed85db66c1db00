"""Which rank of how many this process is."""

from __future__ import annotations

import logging
import os

from everstep.data.arguments import whole_number
from everstep.data.plan import Rank
from everstep.errors import ConfigError
from everstep.process.current import context_here

logger = logging.getLogger("everstep")


def rank_here() -> Rank:
    """From the run that this process is in; without one, the only rank."""
    found = _rank_in_run()
    if found is not None:
        return found
    started = os.environ.get("WORLD_SIZE", "1")
    if started != "1":
        raise ConfigError(
            f"This process is one of WORLD_SIZE={started}, and not started by Everstep.",
            "Give rank=… and world_size=…, as torch.distributed knows them.",
            "Stream.rank",
        )
    return Rank(0, 1)


def given_rank(rank: int | None, world_size: int | None) -> Rank | None:
    """From the arguments of a stream; None: they aren't given."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        given = "rank" if world_size is None else "world_size"
        raise ConfigError(
            f"Stream has {given}=…, and not the other one of rank and world_size.",
            "Give both, or none to take them from the run.",
            f"Stream.{given}",
        )
    here = Rank(whole_number("Stream.rank", rank, 0), whole_number("Stream.world_size", world_size))
    if here.rank >= here.world_size:
        raise ConfigError(
            f"Stream.rank is {rank} of world_size={world_size}, expected 0 to {here.world_size - 1}.",
            "Give the data-parallel rank and the number of such ranks.",
            "Stream.rank",
        )
    return here


def warn_of_idle_ranks(here: Rank, micro_batches: int) -> None:
    if here.rank == 0 and here.world_size > micro_batches:
        logger.warning(
            "A step has %d micro-batches for %d ranks: %d ranks compute padding of weight 0. A smaller "
            "micro_batch gives them work.",
            micro_batches,
            here.world_size,
            here.world_size - micro_batches,
        )


def _rank_in_run() -> Rank | None:
    context = context_here()
    if context is None:
        return None
    if context.get_num_replica_groups() > 1:
        raise ConfigError(
            f"The run has {context.get_num_replica_groups()} replica groups. The others keep training while "
            "one is replaced, so the samples dealt to that one would be lost.",
            "Train without replica groups; or give rank=… and world_size=… yourself, without the promise "
            "that each sample is seen exactly once.",
            "Stream.rank",
        )
    return Rank(context.get_world_rank(), context.get_world_size())
