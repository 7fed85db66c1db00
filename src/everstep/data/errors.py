"""What can go wrong with data. Each error names the sample, field or process, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.errors import ConfigError, EverstepError


class DataError(EverstepError):
    """The root of the errors below."""


class ResumeRefusedError(ConfigError):
    """The stream isn't the one that the cursor was saved from. ``field`` names the first difference."""


class SampleError(DataError):
    """A sample could not be loaded. The place in the stream hasn't moved."""

    def __init__(self, samples: Sequence[int], what: str, remedy: str = "", traceback: str = "") -> None:
        self.samples = tuple(samples)
        self.what = what
        self.traceback = traceback
        named = _named(self.samples)
        super().__init__(
            f"{named} can't be loaded: {what}"
            + (f"\n\nTraceback of the data set:\n{traceback.rstrip()}\n" if traceback else ""),
            remedy
            or "Mend the sample or the data set and run again to resume: the step is done again from its "
            "first sample. A sample that is to be left out needs a substitute, so that the order stays",
        )
        self.args = (self.samples, what, remedy, traceback)


class ShortSourceError(SampleError):
    """A source that has fewer samples than it promised."""


class LoaderDiedError(DataError):
    """A process of the loader died. The place in the stream hasn't moved."""


def _named(samples: Sequence[int]) -> str:
    if len(samples) == 1:
        return f"Sample {samples[0]}"
    shown = ", ".join(map(str, samples[:8]))
    return f"The micro-batch of samples {shown}{', …' if len(samples) > 8 else ''}"
