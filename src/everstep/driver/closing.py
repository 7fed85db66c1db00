"""The end of a driver: the run's last record, and nothing left running."""

from __future__ import annotations

import asyncio

from everstep.control import commands as c
from everstep.driver.announcing import Announcements
from everstep.driver.commits import Commits
from everstep.driver.driven import DrivenRun
from everstep.driver.workers import Workers
from everstep.errors import FencedError, StorageError
from everstep.journal import records
from everstep.journal.history import plain_value


async def close_run(run: DrivenRun, workers: Workers, commits: Commits, announcements: Announcements) -> None:
    """A driver that was replaced changes nothing on its way out: hosts, journal and registry are another's
    now.
    """
    try:
        if not run.outcome.is_fenced:
            workers.metrics.flush()
            workers.pace.stalls.flush(run.clock.now(), all_=True)
            run.write(_last_record(run, workers))
            await _record_the_end(run, commits)
    finally:  # whatever goes wrong before: nothing is left running
        fenced = run.outcome.is_fenced
        run.cancel_tasks()
        if not fenced:
            announcements.forget()
        await run.engine.close(keep_hosts=fenced)


async def _record_the_end(run: DrivenRun, commits: Commits) -> None:
    limit_s = run.limits.closing_s
    try:
        async with asyncio.timeout(limit_s):
            await run.lease.journal.flush()
    except TimeoutError:
        run.outcome.unrecorded = StorageError(f"no answer within {limit_s:g} s (Deadlines.closing_s)")
    except (StorageError, FencedError) as error:
        run.outcome.unrecorded = error
    else:
        await commits.finish_deletions(limit_s)


def _last_record(run: DrivenRun, workers: Workers) -> records.Closed:
    now = run.clock.now()
    end, message = run.outcome.end, run.outcome.message()
    if end is None:
        return records.Closed(now, c.Outcome.FAILED.value, message, None)
    return records.Closed(now, end.outcome.value, message, plain_value(workers.results.value))
