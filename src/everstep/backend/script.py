"""For scripts that torchrun could have started: they find its variables, and make their process group
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from everstep.backend.base import Member
from everstep.backend.torch import TorchBackend, TorchConfig
from everstep.backend.visibility import visible_devices


class ScriptBackend(TorchBackend):
    """The rendezvous of ``TorchBackend``. The script makes the process group itself."""

    def __init__(self, max_restarts: int) -> None:
        super().__init__(TorchConfig())
        self._max_restarts = max_restarts

    def __reduce__(self) -> Any:
        return type(self), (self._max_restarts,)

    def environment(self, member: Member) -> Mapping[str, str | None]:
        variables = dict(super().environment(member))
        variables["TORCHELASTIC_MAX_RESTARTS"] = str(self._max_restarts)
        # As under torchrun, a script sees all devices of its host, and takes the one of its LOCAL_RANK.
        for name in visible_devices(member):
            variables.pop(name)
        return variables

    def _meet(self, member: Member, timeout: timedelta) -> None:
        pass
