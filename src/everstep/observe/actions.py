"""What can be done to a run from outside: stop it, or kill a part of it. Each action returns a line that says
what was done.
"""

from __future__ import annotations

import signal

from everstep.engine.local.cluster import HostFile
from everstep.errors import EverstepError
from everstep.journal.lease import stop_request
from everstep.observe.reading import Facts
from everstep.observe.registry import LiveRun, hosts_of, live_runs
from everstep.process import kernel

_DONE = {"KILL": "killed", "TERM": "sent SIGTERM to", "STOP": "froze", "CONT": "thawed"}


class ActionError(EverstepError):
    """This can't be done to the run."""


def request_stop(facts: Facts) -> str:
    """Leave the request for its driver. Asking twice changes nothing: the bytes are the same."""
    history, name = facts.history, facts.opened[-1].name
    if history.outcome:
        raise ActionError(f"{name} has ended already: {history.outcome}")
    if facts.is_interrupted:
        raise ActionError(
            f"nobody drives {name}: {history.owner} is gone.",
            "Running the script again resumes it; workers that it left behind end by themselves after their "
            "orphan time-out",
        )
    facts.store.create(stop_request(history.lease), b"stop\n")
    return f"asked {history.owner} to stop {name}"


def live_run(name: str) -> LiveRun:
    found = live_runs()
    if not found:
        raise ActionError(
            f"no run is live on this machine: {name!r} has ended, or runs elsewhere or as another user"
        )
    if name not in found:
        raise ActionError(f"no live run is called {name!r}; there is {', '.join(found)}")
    return found[name]


def signal_rank(run: LiveRun, rank: int, name: str) -> str:
    worker = next((worker for worker in run.workers if worker.rank == rank), None)
    if worker is None:
        ranks = ", ".join(str(worker.rank) for worker in run.workers)
        raise ActionError(f"{run.name} has no rank {rank}; its ranks are {ranks}")
    if not worker.alive or not kernel.send_signal(worker.pid, _number(name)):
        raise ActionError(
            f"rank {rank} of {run.name} (pid {worker.pid}) is gone and being replaced: try again in a moment"
        )
    return f"{_DONE[name]} rank {rank} of {run.name}: pid {worker.pid} on {worker.host}"


def signal_host(run: LiveRun, host: str, name: str) -> str:
    hosts = _hosts(run)
    if host not in hosts:
        raise ActionError(f"{run.name} has no live host {host!r}; there is {', '.join(sorted(hosts))}")
    return _signal(run, hosts[host], name)


def signal_slice(run: LiveRun, slice_name: str, name: str) -> list[str]:
    """All of its hosts, a line for each."""
    hosts = _hosts(run)
    found = sorted((host for host in hosts.values() if host.slice == slice_name), key=lambda h: h.index)
    if not found:
        slices = ", ".join(sorted({host.slice for host in hosts.values()}))
        raise ActionError(f"{run.name} has no live slice {slice_name!r}; there is {slices}")
    return [_signal(run, host, name) for host in found]


def _hosts(run: LiveRun) -> dict[str, HostFile]:
    hosts = hosts_of(run)
    if not hosts:
        raise ActionError(f"the hosts of {run.name} can't be found on this machine: name a rank instead")
    return hosts


def _signal(run: LiveRun, host: HostFile, name: str) -> str:
    # An agent with a preemption notice (SIGTERM) stops its workers in time itself. Any other signal goes to
    # all processes of the host, the agent first, so that it can't report the deaths of its workers.
    below = [] if name == "TERM" else kernel.descendants(host.pid)
    ranks = [worker for worker in run.workers if worker.host == host.id]
    for pid in (host.pid, *below):
        kernel.send_signal(pid, _number(name))
    whose = ", ".join(f"rank {w.rank} pid {w.pid}" for w in ranks) or "no rank of the run"
    processes = f"agent pid {host.pid}" + (f" and {len(below)} processes below it" if below else "")
    return f"{_DONE[name]} host {host.id} ({host.slice}) of {run.name}: {processes}; {whose}"


def _number(name: str) -> int:
    return getattr(signal, f"SIG{name}").value  # type: ignore[no-any-return]
