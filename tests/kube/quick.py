"""``everstep operator`` in processes of its own, forked from one that has imported all of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from processes import LIMIT_S

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["everstep.cli.operator", "everstep.kube.webhook", "everstep.kube.other_operators"]
)


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """The process that the others are forked from. It is there when this has returned."""
    first = _CONTEXT.Process(target=os.getpid)
    first.start()
    first.join()
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def start(arguments: Sequence[str], out: Path, errors: Path) -> ForkServerProcess:
    process = _CONTEXT.Process(target=_everstep, args=(list(arguments), str(out), str(errors)), daemon=True)
    process.start()
    return process


def everstep(*arguments: str, kubeconfig: Path | str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``everstep operator …``, to its end. What it said is in the folder, too."""
    out, errors = (Path(tempfile.mkdtemp(dir=folder), name) for name in ("out", "errors"))
    words = [*arguments, "--kubeconfig", str(kubeconfig)]
    process = start(words, out, errors)
    process.join(LIMIT_S)
    assert process.exitcode is not None, errors.read_text()
    return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), errors.read_text())


def _everstep(arguments: list[str], out: str, errors: str) -> None:
    from everstep.cli.operator import operator

    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    operator(arguments)
