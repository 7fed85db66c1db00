"""What every test stands on."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_HERE = Path(__file__).parent
_SOURCES = str(_HERE.parent / "src")

# Processes that tests start find the same sources as the tests do, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_SOURCES, str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)
sys.path.insert(0, str(_HERE))

# How long an example takes says more about the machine than about the code.
settings.register_profile("everstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everstep")

# By this, a pytest process knows what it has started, and all that that starts. Others have their own.
os.environ["EVERSTEP_TEST_SESSION"] = uuid.uuid4().hex

# The hundreds of processes that tests start import the same modules: they are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What a test starts heeds Ctrl+C, also where a shell ignores it for what it has in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from parallel import (  # noqa: E402
    pytest_collection as pytest_collection,
    pytest_collection_modifyitems as pytest_collection_modifyitems,
    pytest_xdist_auto_num_workers as pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler as pytest_xdist_make_scheduler,
)
from processes import kill, ours, wait_for  # noqa: E402

# Ray stays on loopback; neither it nor the trackers of experiments tell anybody.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

# Ray runs its workers at nice 15. Here the others are tests, and whoever waits for a worker starves.
os.environ.setdefault("RAY_worker_niceness", "0")

# A folder for sockets of the tests' own: what the user runs beside them is not theirs to see or break.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="ev")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def a_cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What hosts keep between runs goes with the tests, and isn't the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_over() -> Iterator[None]:
    """Invariant 3: every process of ours belongs to a live run, or is gone."""
    before = set(ours())
    yield
    try:
        wait_for(
            lambda: set(ours()) <= before,
            f"the end of {[v for k, v in ours().items() if k not in before]}",
        )
    finally:
        # What a test that failed left over is its own failure, not the next test's, and not the machine's.
        for pid in set(ours()) - before:
            kill(pid)


@pytest.fixture
def rng() -> random.Random:
    """For instants and victims. A test that fails prints the seed with which to run it again."""
    seed = int(os.environ.get("EVERSTEP_HUNT_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"EVERSTEP_HUNT_SEED={seed}")
    return random.Random(seed)
