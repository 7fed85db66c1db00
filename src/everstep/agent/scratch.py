"""A temporary folder for each attempt of a worker, which goes with it.

A worker that is killed while it saves leaves what it had written so far; with a real model that may be the
whole model, every time. So ``TMPDIR`` is a folder of the worker's own. The host's folder has a link to it,
made before the folder itself: whoever comes after an agent that was killed finds and removes what it left.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from everstep.agent.guard import SCRATCH
from everstep.storage.private import SHARED_TEMPORARY

_TRIES = 100
_PAUSE_S = 0.05


def make(folder: Path, attempt: str, environment: Mapping[str, str]) -> Path:
    """A folder for ``attempt``, where its environment wants temporary files to be."""
    base = environment.get("TMPDIR") or tempfile.gettempdir()
    # Short: sockets are made in there, and their paths have 100 characters or so.
    place = Path(base) / f"everstep-{secrets.token_hex(6)}"
    links = folder / SCRATCH
    links.mkdir(mode=0o700, exist_ok=True)
    link = links / f"{attempt}.{place.name}"
    link.symlink_to(place)
    try:
        place.mkdir(mode=0o700)
    except OSError:
        link.unlink()
        raise
    return place


def remove(folder: Path, place: Path) -> None:
    """Remove it. What its worker started is being killed, and may still write to it for a moment."""
    for _ in range(_TRIES):
        shutil.rmtree(place, ignore_errors=True)
        if not place.exists():
            for link in (folder / SCRATCH).glob(f"*.{place.name}"):
                link.unlink(missing_ok=True)
            return
        time.sleep(_PAUSE_S)


def use(place: str) -> None:
    """Make it this process's temporary folder."""
    remembered, tempfile.tempdir = tempfile.tempdir, None
    shared = tempfile.gettempdir()
    os.environ[SHARED_TEMPORARY] = shared
    os.environ["TMPDIR"] = place
    # What was imported before may have asked for it, and the answer is remembered. Any other is the user's.
    tempfile.tempdir = None if remembered in (None, shared) else remembered
