"""From ``fit()`` to the first step of all ranks, each time in a fresh driver process.

Ray's cluster is up before the clock starts. For scale: what a plain Python process pays for torch alone, with
and without an optimizer. The first one imports about as much again, whoever runs the script.
"""

from __future__ import annotations

from bench.figures import Outcome, Row, Sample
from bench.fresh import seconds_to_run
from bench.options import Options
from bench.sides import Drive, Side
from bench.steps import all_first_steps, attempts_since

TITLE = "fit() to the first step of all ranks"
ROUNDS, PEER_ROUNDS = 5, 3

_OPTIMIZER = "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1e-3)"


def measure(options: Options) -> Outcome:
    ours: list[float] = []
    theirs: list[float] = []
    torch: list[float] = []
    optimizer: list[float] = []
    for at in range(max(options.rounds, options.peer_rounds)):
        if at < options.rounds:
            torch.append(seconds_to_run("import torch"))
            optimizer.append(seconds_to_run(_OPTIMIZER))
            ours.append(_start("everstep", options))
            options.say(
                f"start: everstep: {at + 1} of {options.rounds}: {ours[-1]:.2f} s (torch {torch[-1]:.2f} s)"
            )
        if at < options.peer_rounds:
            theirs.append(_start("ray", options))
            options.say(f"start: ray: {at + 1} of {options.peer_rounds}: {theirs[-1]:.2f} s")
    first = Row(
        f"fit() to first step of {options.workers} ranks",
        "s",
        Sample(tuple(ours)),
        Sample(tuple(theirs)) if theirs else None,
    )
    scale = (
        Row("for scale: import torch", "s", Sample(tuple(torch)), side="Python"),
        Row("for scale: import torch, make an optimizer", "s", Sample(tuple(optimizer)), side="Python"),
    )
    beyond = [first.everstep.median - row.everstep.median for row in scale if first.everstep and row.everstep]
    note = f"Everstep: {beyond[0]:.2f} s beyond one import of torch; {beyond[1]:.2f} s with an optimizer's"
    return Outcome("start", TITLE, (first, *scale), (note,))


def _start(side: Side, options: Options) -> float:
    with Drive(side, "loops:train_one_step", {}, options.workers) as drive:
        called: float = drive.outcome()["called"]
        firsts = all_first_steps(attempts_since(drive.folder, called), options.workers)
        assert firsts is not None, "fit() has returned, so every rank has made its step"
        return max(when for when, _ in firsts.values()) - called
