"""What happens to workers is the same whether all of them restart, or some replica groups beside others."""

from __future__ import annotations

import pytest
from hands import Hands, Run, views

from everstep.control.controller import Settings
from everstep.deadlines import Deadlines


@pytest.fixture(params=["full restart", "partial restart"])
def either(request: pytest.FixtureRequest) -> Run:
    """Ranks 0 and 1 on ``a`` and ``b``, and a spare: all there is, or a replica group beside another."""
    whole = request.param == "full restart"

    def begin(*spares: str, **more: object) -> Hands:
        shape = {"workers_min": 2, "workers_max": 2} if whole else {"workers_min": 4, "workers_max": 4}
        if not whole:
            shape |= {"group_size": 2}
            more = {"deadlines": Deadlines(together_s=0.0), **more}
        settings = Settings(**{"max_failures": -1, **shape, **more})  # type: ignore[arg-type]
        return Hands(settings, views("a", "b", *(() if whole else ("b2", "b3")), *(spares or ("c",))))

    return begin
