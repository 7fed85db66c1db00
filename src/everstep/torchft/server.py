"""torchft's lighthouse as a process: ``python -m everstep.torchft.server ADDRESS PORT OPTIONS PARENT``.

It prints its port on standard output, and lives until its parent, an agent, dies. torchft's extension
is loaded by itself, without torchft and torch around it: so a lighthouse that was killed is back in a tenth
of a second instead of in four.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from importlib import machinery, util
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from everstep.backend.network import join_address
from everstep.process import kernel

_EXTENSION = "torchft._torchft"

OPTIONS: Mapping[str, int] = {
    "min_replicas": 1,
    "join_timeout_ms": 60_000,
    "quorum_tick_ms": 100,
    "heartbeat_timeout_ms": 500,
}
"""What ``LighthouseServer`` takes besides its address, with the defaults of torchft's own command; but for
the last one, which is 5000 there. The others wait for a group that was killed until its last heartbeat is as
old as that. A group sends ten a second; one that lives and is late with five misses a step, and heals.

The time to join runs from the request that waits longest: that of a group which missed the last step. Where
it is shorter than a step (100 in torchft's Python class), it is over before all others have asked, so the
last one is left out; and the groups take turns at missing steps, for good.
"""


@runtime_checkable
class NeedsLighthouse(Protocol):
    """A backend whose workers meet at a lighthouse."""

    def lighthouse(self) -> Mapping[str, int]:
        """What it is started with, out of ``OPTIONS``."""
        ...


def load_extension() -> Any:
    """torchft's own part in Rust, which needs nothing of Python's torch."""
    package = util.find_spec("torchft")
    if package is None or package.submodule_search_locations is None:
        raise ModuleNotFoundError("torchft is not installed here: pip install 'everstep[torchft]'")
    for folder in package.submodule_search_locations:
        for suffix in machinery.EXTENSION_SUFFIXES:
            path = Path(folder) / f"_torchft{suffix}"
            if path.exists():
                spec = util.spec_from_file_location(_EXTENSION, path)
                assert spec is not None, "it ends like an extension"
                assert spec.loader is not None
                module = util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    raise ModuleNotFoundError(f"torchft in {package.submodule_search_locations} has no _torchft extension")


def _main(address: str, port: str, options: str, parent: str) -> None:
    kernel.die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = load_extension().LighthouseServer(
        bind=join_address(address, int(port)), **{**OPTIONS, **json.loads(options)}
    )
    # Its address has the machine's name, which need not resolve: only the port is needed. In one write, since
    # the reader reads once.
    os.write(1, str(urlsplit(server.address()).port).encode())
    signal.pause()


if __name__ == "__main__":
    _main(*sys.argv[1:])
