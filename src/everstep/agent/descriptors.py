"""File descriptors: an agent needs some for each of its workers, and says so before it runs out of them."""

from __future__ import annotations

import errno
import os
import resource

from everstep.protocol import wire

_PER_WORKER = 13
"""Its two sockets, its output, its log, and three snapshots of up to three files each."""
_PER_TEE = 2
"""A pipe of its own, and the file."""
_RESERVE = 24
"""For drivers that connect, for uploads, and for looking at /proc."""


def raise_limit() -> None:
    """As high as an ordinary user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EPERM:
                raise


def most_workers() -> tuple[int, int] | None:
    """(workers that one agent can ever have here, the descriptors it may have), None: there is no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else (max(0, hard - _RESERVE) // _PER_WORKER, hard)


def shortage(workers: list[wire.WorkerSpec]) -> str:
    """Why these can't be started here, besides those that are; empty: they can."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    teed = sum(file is not None and file.tee for spec in workers for file in (spec.stdout, spec.stderr))
    wanted = used + len(workers) * _PER_WORKER + teed * _PER_TEE + _RESERVE
    if limit == resource.RLIM_INFINITY or wanted <= limit:
        return ""
    return (
        f"{len(workers)} workers on one host need {wanted} file descriptors in their agent, and its limit is "
        f"{limit}: raise the hard limit (ulimit -Hn, LimitNOFILE= of a systemd unit, --ulimit nofile= of a "
        "container), or run fewer workers on a host"
    )
