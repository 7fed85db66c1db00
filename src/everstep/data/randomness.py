"""Random numbers while samples are loaded: the generators that data sets use, seeded for one micro-batch.

torch's generator is seeded if torch has been imported. NumPy is imported where it is installed: if a data set
were the first to import it, its numbers would differ from run to run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from everstep.data.order import numpy_here


def seed_generators(seed: int) -> None:
    """Seed ``random``, NumPy's global generator and torch's, on the CPU."""
    random.seed(seed)
    if (numpy := numpy_here()) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        # Not torch.manual_seed: it turns to every accelerator as well, which a loader's process hasn't.
        torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed them inside the context, and put their states back after it."""
    numpy, torch = numpy_here(), sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.default_generator.get_state() if torch is not None else None
    seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.default_generator.set_state(torch_state)
