"""Which errors are echoes of a peer's death, by the messages of frameworks."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Gloo's messages when the other end went away, or never answered. Its other errors are the user's: ranks that
# call different collectives, or with different shapes.
_GLOO = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|connection refused|socket closed|timed out waiting"
    r"|connect timeout|wait timeout|connectFullMesh failed|context initialization failed)",
    re.IGNORECASE | re.DOTALL,
)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised ``from``: an echo may be wrapped."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def is_gloo_echo(error: BaseException) -> bool:
    """Whether gloo lost a peer. Torch raises it as a ``RuntimeError``, JAX as a ``ValueError`` too."""
    return isinstance(error, (RuntimeError, ValueError)) and bool(_GLOO.search(str(error)))
