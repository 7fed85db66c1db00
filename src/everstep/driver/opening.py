"""The beginning of a driver: storage put in order, and what an earlier driver left taken over."""

from __future__ import annotations

from everstep.control import events as e
from everstep.driver.deletions import Deletions
from everstep.driver.driven import DrivenRun
from everstep.driver.incoming import Incoming
from everstep.driver.repair import Repair
from everstep.driver.take_over import TakeOver, ask_agents
from everstep.driver.workers import Workers
from everstep.journal import records
from everstep.torchft.placement import LighthousePlacement


async def open_run(
    run: DrivenRun,
    workers: Workers,
    incoming: Incoming,
    deletions: Deletions,
    lighthouse: LighthousePlacement | None,
) -> TakeOver | None:
    """The controller knows how the run stands. Returns what was taken over of an earlier driver's workers,
    if some go on.
    """
    history = run.history
    run.observer.opened(history.ledger)
    await run.lease.mend(run.observer.say)
    repair = Repair(run.store, history, deletions, run.write, run.observer.say, run.clock)
    await repair.adopt_manifests()
    left, remains = await _take_over(run, workers, incoming, lighthouse)
    if left is None:
        await repair.put_in_order(journal_is_whole=not run.lease.damage)
    run.emit(
        e.RunOpened(
            at=run.clock.now(),
            last_epoch=history.last_epoch,
            checkpoints=tuple(k.ref for k in history.checkpoints.values()),
            let_go=tuple(history.let_go.values()),
            spent=tuple(history.spent.items()) if left is not None else (),
            notices=history.notices_by(run.clock.wall() - run.clock.now()),
            adopted=left.adopted() if left is not None else None,
            remains=remains,
        )
    )
    return left


async def _take_over(
    run: DrivenRun, workers: Workers, incoming: Incoming, lighthouse: LighthousePlacement | None
) -> tuple[TakeOver | None, e.Remains | None]:
    """Keep what can go on of the workers that an earlier driver left behind, or, if none can, what their
    hosts have in memory.
    """
    history = run.history
    hosts = run.engine.held()
    if not hosts:
        return None, None
    incoming.left = left = TakeOver(hosts, history.last_epoch, history.begun)
    await ask_agents(run.engine, left, run.precedence, lambda: incoming.slices, run.limits, run.observer.say)
    incoming.left = None
    incoming.given_back(left.given_up)
    history.last_epoch = max(history.last_epoch, left.highest_epoch)
    kept = left.chosen.kept_hosts
    if not kept:
        return None, left.remains(incoming.slices)
    workers.adopt(left.streams(), left.pids(), left.chosen.epoch)
    left.outdated = left.fingerprints() != {run.job.fingerprint}
    if lighthouse is not None and left.lighthouse is not None:
        lighthouse.found(*left.lighthouse)
    run.write(records.TakenOver(run.clock.now(), left.chosen.epoch))
    # Workers whose record of placement is damaged now are recorded again.
    streams = workers.streams.values()
    workers.write_places([stream.assignment for stream in streams], others_stay=False)
    run.observer.say(f"took over {len(streams)} workers, which never stopped")
    if left.outdated:
        run.observer.say(
            "the training function or its config changed: they go on with the previous version of your "
            "code until their next checkpoint, and are restarted with the new one then "
            f"(after {run.limits.boundary_s:g} s in any case: Deadlines.boundary_s)"
        )
    return left, None
