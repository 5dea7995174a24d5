"""Curves of runs as a picture, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.config import ConfigError, Problem
from jaxpar.events.history import History
from jaxpar.events.stopwatch import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")

_MAX_POINTS = 4000


def check_out(out: Path) -> None:
    """Raises ConfigError if a picture cannot be drawn to ``out``, before anything is read."""
    message = remedy = None
    if out.suffix.lower() not in FORMATS:
        message, remedy = "is no kind of picture that can be written", f"end its name in {', '.join(FORMATS)}"
    elif not out.parent.is_dir():
        message, remedy = f"the directory {out.parent} does not exist", "make it, or name another"
    elif importlib.util.find_spec("matplotlib") is None:
        message, remedy = "the package matplotlib is not installed", "pip install 'jaxpar[plots]', or leave --out out"
    if message:
        raise ConfigError([Problem(key="--out", value=str(out), message=message, remedy=remedy)])


def save(out: Path, histories: Sequence[History], panels: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Draws panels of (title, keys) one above the other, the runs overlaid in each.

    The first key of a panel is a line, the others are points: validation losses lie among training losses. Below is
    where the time of each run went, as far as that was recorded.
    """
    from matplotlib.figure import Figure

    timed = [history for history in histories if history.seconds]
    heights = [*(2.6 for _ in panels), *([0.5 + 0.4 * len(timed)] if timed else [])]
    figure = Figure(figsize=(9, sum(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for (title, keys), axis in zip(panels, axes, strict=False):
        for run, history in enumerate(histories):
            for number, key in enumerate(keys):
                if key not in history.series:
                    continue
                series = history.series[key].thinned(_MAX_POINTS)
                style = {"linewidth": 1.2} if number == 0 else {"linestyle": "", "marker": "o", "markersize": 4}
                label = history.name if number == 0 else f"{history.name}: {key}"
                axis.plot(series.steps, series.values, color=f"C{run % 10}", label=label, **style)
        axis.set_title(title, fontsize=10, loc="left")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        axis.set_xlabel("step")
    if timed:
        _time_bars(axes[-1], timed)
    figure.savefig(out, dpi=150)


def _time_bars(axis: Axes, histories: Sequence[History]) -> None:
    """A bar per run: shares of its time by part."""
    left = [0.0] * len(histories)
    for key, name in PARTS.items():
        shares = [100 * history.seconds.get(key, 0.0) / sum(history.seconds.values()) for history in histories]
        axis.barh(range(len(histories)), shares, left=left, label=name)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.set_yticks(range(len(histories)), [history.name for history in histories])
    axis.invert_yaxis()
    axis.set_title("time of the steps, %", fontsize=10, loc="left")
    axis.legend(fontsize=8, ncols=len(PARTS))
