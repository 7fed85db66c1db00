"""The page that a hang leaves in the run's folder: where every rank was, equal ones together, the odd ones
first.
"""

from __future__ import annotations

from everstep.control.commands import KeepStacks
from everstep.health.hangs import grouped
from everstep.health.vitals import Finding
from everstep.wording import named


def stacks_page(found: KeepStacks) -> str:
    blamed = [group for group in grouped(found.found) if _is_blamed(group, found.culprits)]
    others = [group for group in grouped(found.found) if not _is_blamed(group, found.culprits)]
    return "\n".join(_section(group, found.culprits) for group in [*blamed, *others])


def _is_blamed(group: list[Finding], culprits: tuple[int, ...]) -> bool:
    return any(one.vitals.rank in culprits for one in group)


def _section(group: list[Finding], culprits: tuple[int, ...]) -> str:
    first = group[0]
    ranks = [one.vitals.rank for one in group]
    blame = " (the others wait for this)" if _is_blamed(group, culprits) else ""
    lines = [f"=== {named('rank', ranks)}{blame}"]
    for one in group:
        vitals = one.vitals
        lines.append(
            f"rank {vitals.rank}: {vitals.label or vitals.stage.value}, process {vitals.state.value}, "
            f"no progress for {vitals.quiet_s:.1f} s, still for {vitals.still_s:.1f} s; "
            f"{vitals.reports} reports, {vitals.collectives} collectives"
        )
    stack = first.stack or "no Python stack could be taken"
    lines += ["", stack, "", f"--- all threads of rank {first.vitals.rank}", "", first.threads, ""]
    return "\n".join(lines)
