"""What must always hold of a controller in its driver, checked after every event, and at the end. What must
hold of storage is in ``rules``. The numbers in messages are these:

1. No slice is ever partly used: placement takes whole slices.
2. Workers of two attempts, or of two generations of one replica group, never train at the same time on the
   same host.
3. Every reservation, agent and worker belongs to a live run, or is gone within its deadline.
4. A committed checkpoint is never lost, except by the user's retention, which never removes the newest.
5. What a worker is given to restore is committed, whole, and the newest that is.
6. Each budget is spent by its own causes only, and a run with budget left never ends while progress is
   possible.
7. From any state with enough capacity, a run trains again within a bounded number of events.
8. One owner: a driver that was replaced changes nothing.
9. A manifest that was written is there until retention, which is in the journal, removes it. What isn't known
   isn't garbage.
10. What is restored is one step's state, the same step at all ranks, never older than the newest that was
    whole.
11. At the start of an attempt ranks are 0..N-1, dense, in topology order, and so are slices. With replica
    groups, ids stay, and holes are allowed until the next attempt.
"""

from __future__ import annotations

from collections import Counter

from everstep.control import commands as c, events as e
from everstep.control.commands import Rung
from everstep.control.controller import Controller, beliefs_of
from everstep.control.table import TRANSITIONS, Phase
from everstep.sim.agents import SimAgent
from everstep.sim.cluster import Cluster
from everstep.sim.known import KnownCluster
from everstep.sim.pace import RetryPace
from everstep.sim.scenario import Scenario
from everstep.sim.spending import Spending
from everstep.sim.starts import Starts
from everstep.sim.time import require
from everstep.topology.placement import Assignment
from everstep.topology.slices import SliceName


class RunFacts:
    """What is known of a run over all of its drivers."""

    def __init__(self) -> None:
        self.begun_anew = 0
        """The last attempt that did not begin with a snapshot: those before it have led nowhere."""
        self.starts = 0
        self.places: dict[int, Assignment] = {}
        """Where the workers are, by rank."""
        self.discarded: set[str] = set()
        """Folders that a controller has given up. Another may not know that yet, and its commit fails."""
        self.rungs: Counter[Rung] = Counter()
        self.transitions: Counter[tuple[Phase, Phase]] = Counter()


class ControllerRules:
    """Of one controller."""

    def __init__(self, scenario: Scenario, cluster: Cluster, facts: RunFacts, controller: Controller) -> None:
        self._cluster = cluster
        self._facts = facts
        self.controller = controller
        self._phase = Phase.NEW
        self._known = KnownCluster(scenario)
        self._pace = RetryPace(scenario)
        self._spending = Spending(scenario, cluster, controller)
        self._starts = Starts(scenario, cluster, facts, controller, self._known)
        self._fenced = False

    # ------------------------------------------------------------------ after every event

    def after(self, event: e.Event, commands: list[c.AnyCommand], now: float) -> None:
        """``commands`` are what the controller has answered, and have not been carried out yet."""
        if isinstance(event, e.LeaseLost):
            # The event may come twice, and the controller is wrong about much else by then.
            if not self._fenced:
                self._fenced = True
                self._check_fenced(event, commands)
            return
        self._known.add(event)
        match event:
            case e.RunOpened():
                self._spending.spent = Counter(dict(event.spent))
                self._starts.opened(event)
            case e.CapacityChanged():
                self._pace.news(now)
                self._known.check_waiting(self.controller)
            case _:
                pass
        for command in commands:
            self._check(command, now)
            if isinstance(event, e.TimerFired) and isinstance(command, c.PreemptionSeen):
                self._check_lapsed(command.slice, now)
        self._check_snapshot()

    def _check(self, command: c.AnyCommand, now: float) -> None:
        self._known.check(command)
        match command:
            case c.StartWorkers():
                self._pace.start(now)
                self._starts.check(command)
            case c.Reserve():
                self._pace.reserve(now)
            case c.CommitCheckpoint():
                self._check_commit(command)
            case c.DiscardCheckpoint():
                lost = command.folder in self._known.committed
                require(not lost, f"4: {command.folder} is committed, and discarded")
                self._facts.discarded.add(command.folder)
            case c.PhaseChanged():
                self._check_phase(Phase(command.phase))
            case c.KeepSnapshot() if command.upto in command.kept[-1:]:  # something was learnt, and kept
                self._pace.learnt(now)
            case c.CheckpointKept():
                self._pace.learnt(now)
            case c.HangSeen():
                self._check_hang(command)
            case c.RecoveryDecided():
                self._spending.check(command)
                self._pace.decided(command, now)
            case c.GroupStarted():
                self._facts.rungs[command.rung] += 1
                self._pace.started(command)
            case c.Waiting():
                self._facts.rungs[Rung.WAIT] += 1
            case c.Recovered():
                _check_recovered(command)
            case c.EndRun():
                if command.outcome is c.Outcome.FAILED:
                    self._facts.rungs[Rung.FAIL] += 1
                self._spending.check_end(command)
            case _:
                pass

    def _check_fenced(self, event: e.LeaseLost, commands: list[c.AnyCommand]) -> None:
        """8: what comes after it has lost the run is nothing to it."""
        late: list[e.Event] = [
            e.CapacityChanged(at=event.at, hosts=()),
            e.TimerFired(at=event.at, timer=e.TimerName.BACKOFF, key=2),
            e.StopRequested(at=event.at, kind=e.StopKind.USER),
        ]
        said = [*commands]
        for word in late:
            said += Controller.handle(self.controller, word)
        fenced = [isinstance(word, c.EndRun) and word.outcome is c.Outcome.FENCED for word in said]
        require(all(fenced), f"8: a fenced driver acts: {said}")

    def _check_phase(self, phase: Phase) -> None:
        require((self._phase, phase) in TRANSITIONS, f"{self._phase} → {phase} is not in the table")
        self._facts.transitions[self._phase, phase] += 1
        self._phase = phase
        if phase in (Phase.PLACING, Phase.WAITING):
            self._known.check_size(self.controller)

    def _check_commit(self, command: c.CommitCheckpoint) -> None:
        """4, 5: what is committed is whole, and once."""
        ready = command.checkpoint
        brought = {rank for rank, _ in ready.parts}
        whole = brought == self._cluster.saves.shards[ready.folder]
        require(
            whole or ready.folder in self._facts.discarded,
            f"5: {ready.folder} is committed before its shards",
        )
        require(ready.folder not in self._known.committed, f"{ready.folder} is committed twice")

    def _check_lapsed(self, name: SliceName, now: float) -> None:
        """A notice was a false alarm if the machines live; if they don't, the controller got the event."""
        fleet = beliefs_of(self.controller).fleet
        heard_by = now - fleet.settings.deadlines.heartbeat_timeout_s - 1.0
        gone = [h for h in fleet.machines(name) if fleet.alive(h) and self._cluster.hosts[h].died < heard_by]
        require(not gone, f"6: the notice of {name} is taken for void, and {gone} were taken away")

    def _check_hang(self, command: c.HangSeen) -> None:
        """The worker that is named hangs: it doesn't wait for another one, and isn't at work."""
        named = {(command.epoch, rank) for rank in command.ranks}
        require(named <= self._cluster.hung, f"ranks {command.ranks} are named, and don't hang")

    def _check_snapshot(self) -> None:
        """10: what the controller counts on is in memory at every rank, also while others are written."""
        snapshots = beliefs_of(self.controller).saved.snapshots
        for at in snapshots.kept_all:
            for rank, host in snapshots.places(at):
                there = self._cluster.hosts[host]
                require(
                    not there.alive or not there.claim.run or there.memory.find(rank, at) is not None,
                    f"10: {at} is kept, and rank {rank} on {host} has written over it",
                )

    # ------------------------------------------------------------------ once faults are over

    def check_calm(self) -> None:
        """7, and 3: every process belongs to the present incarnation of its group, and what is held for the
        run, the controller has asked for.
        """
        controller = self.controller
        require(
            controller.phase in (Phase.RUNNING, Phase.ENDING, Phase.ENDED),
            f"7: still {controller.phase}, long after the last fault",
        )
        groups = {(controller.epoch, g.number, g.generation) for g in controller.groups.values()}
        for worker in self._cluster.workers():
            key = (worker.spec.epoch, worker.spec.assignment.group_id, worker.spec.generation)
            require(
                not worker.running or key in groups,
                f"3: rank {worker.rank} of an old attempt is left on {worker.agent.host}",
            )
        held = {agent.slice.name for agent in self._cluster.hosts.values() if agent.alive and agent.claim.run}
        leaked = sorted(held - self._known.taken.keys())
        require(not leaked, f"3: {', '.join(leaked)} held, and nobody knows")


def check_host(agent: SimAgent) -> None:
    """2, whenever a process begins."""
    running = [w for w in agent.workers.values() if w.running]
    require(len({w.spec.epoch for w in running}) <= 1, f"2: two epochs on {agent.host}")
    require(len({w.rank for w in running}) == len(running), f"2: two generations on {agent.host}")
    require(len(running) <= agent.cluster.scenario.slots, f"{agent.host} is overbooked")


def check_rest(cluster: Cluster) -> None:
    """3, once the run has ended and everything had time to go."""
    for agent in cluster.hosts.values():
        if agent.alive:
            require(not agent.claim.run, f"3: {agent.host} is left reserved")
            running = any(w.running for w in agent.workers.values())
            require(not running, f"3: workers are left on {agent.host}")


def _check_recovered(command: c.Recovered) -> None:
    seconds = [
        command.detect_s,
        command.stop_s,
        command.wait_s,
        command.place_s,
        command.start_s,
        command.rendezvous_s,
        command.restore_s,
        command.first_step_s,
    ]
    require(all(s >= -1e-6 for s in seconds), f"no phase takes negative time: {command}")
    require(command.steps_lost >= 0, "steps lost are not negative")
