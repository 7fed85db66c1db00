"""A forecast as a picture: where the time went, over time and in all, for each policy.

Only drawing: every figure comes from ``answer``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.forecast.answer import ForecastAnswer
from everstep.forecast.question import ForecastQuestion
from everstep.goodput import Category

_COLOURS = {
    Category.STEP: "#2a9d5c",
    Category.CHECKPOINT: "#a8d8b9",
    Category.REDO: "#e4572e",
    Category.DETECT: "#8d5a97",
    Category.RESTART: "#f4a259",
    Category.RESTORE: "#f7d08a",
    Category.WAITING: "#d3d7dd",
}
_NAMES = {
    Category.STEP: "steps that count",
    Category.CHECKPOINT: "checkpoint stall",
    Category.REDO: "steps lost, done again",
    Category.DETECT: "failure not noticed yet",
    Category.RESTART: "restarting",
    Category.RESTORE: "restoring",
    Category.WAITING: "no host available",
}
_HOW = {
    "everstep": "given notice, saves and moves; otherwise restarts warm, in place or on the remaining hosts",
    "full-restart": "ignores preemption notices; restarts all workers from the last checkpoint",
}


class PlotUnavailable(RuntimeError):
    """Matplotlib isn't installed."""


def plot(question: ForecastQuestion, answers: list[ForecastAnswer], path: Path, title: str) -> None:
    """One row for each policy: over time on the left, in all on the right."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotUnavailable(
            "drawing needs Matplotlib, which isn't installed: pip install 'everstep[plot]'"
        ) from None
    figure: Any = Figure(figsize=(12, 1.6 + 2.9 * len(answers)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    grid = figure.subplots(len(answers), 2, width_ratios=(3.2, 1), squeeze=False)
    for (over_time, in_all), answer in zip(grid, answers, strict=True):
        _over_time(over_time, question, answer)
        _in_all(in_all, answer)
    grid[-1][0].set_xlabel("hours" if question.days <= 3 else "days")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_COLOURS), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _over_time(axes: Any, question: ForecastQuestion, answer: ForecastAnswer) -> None:
    pieces = answer.pieces
    length = question.days * 24 if question.days <= 3 else question.days
    hosts = question.hosts
    at = [length * i / len(pieces) for i in range(len(pieces) + 1)]
    stacked = [[hosts * piece[c.value] for piece in pieces] for c in _COLOURS]
    # Steps need one more value than there are pieces, for the right edge.
    axes.stackplot(
        at,
        *[[*row, row[-1]] for row in stacked],
        colors=list(_COLOURS.values()),
        labels=[_NAMES[c] for c in _COLOURS],
        step="post",
        linewidth=0,
    )
    axes.set_xlim(0, length)
    axes.set_ylim(0, hosts)
    axes.set_ylabel("hosts")
    restarts = sum(n for rung, n in answer.restarts.items() if rung != "first start")
    axes.set_title(
        f"{answer.policy}: goodput {100 * answer.goodput:.1f} %, {restarts} restarts, "
        f"{answer.steps_lost:,.0f} steps lost\n{_HOW.get(answer.policy, '')}",
        loc="left",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _in_all(axes: Any, answer: ForecastAnswer) -> None:
    shown = list(_COLOURS)
    shares = [100 * answer.shares[c.value] for c in shown]
    axes.barh(range(len(shown)), shares, color=list(_COLOURS.values()))
    axes.set_yticks(range(len(shown)), [_NAMES[c] for c in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.set_xticks([])
    for i, share in enumerate(shares):
        axes.text(share + 1.5, i, f"{share:.2f} %", va="center", fontsize=8)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title("of all host-time", loc="left", fontsize=9)
