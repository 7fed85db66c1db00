"""What an import costs a script, in fresh processes. The two sides take turns."""

from __future__ import annotations

from bench.figures import Outcome, Row, Sample
from bench.fresh import seconds_to_run
from bench.options import Options

TITLE = "imports, in fresh processes"
ROUNDS, PEER_ROUNDS = 10, 5

_SCRIPT = "from {0}.torch import TorchTrainer; from {0} import Checkpoint, RunConfig, ScalingConfig, report"


def measure(options: Options) -> Outcome:
    return Outcome(
        "imports",
        TITLE,
        (
            _both("the package", "import everstep", "import ray.train", options),
            _both(
                "what a torch script uses of it",
                _SCRIPT.format("everstep"),
                _SCRIPT.format("ray.train"),
                options,
            ),
        ),
        (
            "Everstep loads its names when they are first used, and torch in the workers only; "
            "Ray Train's torch module imports torch",
        ),
    )


def _both(what: str, ours: str, theirs: str, options: Options) -> Row:
    seconds_to_run(ours)  # reads the files into the system's cache
    if options.peer_rounds:
        seconds_to_run(theirs, RAY_TRAIN_V2_ENABLED="1")
    found: tuple[list[float], list[float]] = ([], [])
    for at in range(max(options.rounds, options.peer_rounds)):
        if at < options.rounds:
            found[0].append(seconds_to_run(ours))
        if at < options.peer_rounds:
            found[1].append(seconds_to_run(theirs, RAY_TRAIN_V2_ENABLED="1"))
    options.say(f"imports: {what}: done")
    return Row(what, "ms", Sample(tuple(found[0])), Sample(tuple(found[1])) if found[1] else None)
