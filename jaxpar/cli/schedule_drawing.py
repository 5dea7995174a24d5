"""Drawings of a pipeline schedule: text for a terminal, PNG through matplotlib."""

from __future__ import annotations

import colorsys
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.color import Color
from rich.style import Style
from rich.text import Text

from jaxpar.config import ConfigError, Problem
from jaxpar.schedule import NOTHING, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_IDLE = "."
_LANES = ("forward", "backward")
_MAX_INCHES = 200
"""Of a picture's side; at 100 dots per inch this is well inside what matplotlib and viewers take."""
_MAX_LABELS = 4000
"""Units that are labelled in a picture; with more, the labels take long and nobody can read them."""


def draw(schedule: Schedule, width: int) -> Text:
    """Two lines per stage, F for its forward and B for its backward lane, and a column per tick.

    A cell has the microbatch, and with several chunks a letter for the chunk. What does not fit into ``width`` columns
    goes on below, with the ticks numbered on.
    """
    cells = {lane: _labels(schedule, lane) for lane in _LANES}
    last_tick = str(schedule.num_ticks - 1)
    cell_width = 1 + max(len(last_tick), *(len(label) for rows in cells.values() for row in rows for label in row))
    margin = len(f"stage {schedule.num_stages - 1} F")
    ticks_per_block = max(1, (width - margin) // cell_width)
    text = Text()
    letters = ", letters chunks" if schedule.num_chunks > 1 else ""
    text.append(f"F forward, B backward; numbers are microbatches{letters}; {_IDLE} is idle\n")
    for start in range(0, schedule.num_ticks, ticks_per_block):
        ticks = range(start, min(start + ticks_per_block, schedule.num_ticks))
        text.append("tick".ljust(margin), "dim")
        text.append("".join(f"{tick:>{cell_width}}" for tick in ticks) + "\n", "dim")
        for stage in range(schedule.num_stages):
            for lane in _LANES:
                name = f"stage {stage}" if lane == "forward" else ""
                text.append(f"{name:<{margin - 1}}{lane[0].upper()}")
                microbatches = getattr(schedule, f"{lane}_microbatch")
                for tick in ticks:
                    text.append(" ")
                    label = cells[lane][tick][stage].rjust(cell_width - 1)
                    text.append(label, _style(int(microbatches[tick, stage]), schedule.num_microbatches, lane))
                text.append("\n")
        text.append("\n")
    text.right_crop(1)
    return text


def save_png(schedule: Schedule, path: Path) -> None:
    """Draws the schedule into a PNG file.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            [
                Problem(
                    key="--png",
                    value=str(path),
                    message="the package matplotlib is not installed",
                    remedy="pip install 'jaxpar[plots]', or leave --png out",
                )
            ]
        ) from error
    size = (min(2 + 0.3 * schedule.num_ticks, _MAX_INCHES), min(1 + 0.6 * schedule.num_stages, _MAX_INCHES))
    figure = Figure(figsize=size, layout="constrained")
    _paint(schedule, figure.add_subplot())
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        problem = Problem(
            key="--png", value=str(path), message=f"cannot be written: {error.strerror}", remedy="name another file"
        )
        raise ConfigError([problem]) from error


def _paint(schedule: Schedule, axes: Axes) -> None:
    """A box per unit: forward in the upper half of the stage's row, backward, hatched, in the lower half."""
    colours = [_colour(microbatch, schedule.num_microbatches) for microbatch in range(schedule.num_microbatches)]
    units = [(lane, *unit) for lane in _LANES for unit in _units(schedule, lane)]
    for lane, top, hatch in zip(_LANES, (0.0, 0.5), (None, "///"), strict=True):
        for stage in range(schedule.num_stages):
            row = [(tick, microbatch) for of, tick, at, microbatch in units if (of, at) == (lane, stage)]
            axes.broken_barh(
                [(tick, 1) for tick, _ in row],
                (stage + top, 0.5),
                facecolors=[colours[microbatch] for _, microbatch in row],
                edgecolor="white",
                hatch=hatch,
            )
    if len(units) <= _MAX_LABELS:
        labels = {lane: _labels(schedule, lane) for lane in _LANES}
        for lane, tick, stage, _ in units:
            middle = stage + (0.25 if lane == "forward" else 0.75)
            axes.text(tick + 0.5, middle, labels[lane][tick][stage], ha="center", va="center", fontsize=7)
    axes.set_xlim(0, schedule.num_ticks)
    axes.set_ylim(schedule.num_stages, 0)
    axes.set_yticks([stage + 0.5 for stage in range(schedule.num_stages)], range(schedule.num_stages))
    axes.set_xlabel("tick")
    axes.set_ylabel("stage")
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    axes.set_title(
        f"{schedule.kind}: {schedule.num_stages} stages{chunks}, {schedule.num_microbatches} microbatches, "
        f"{float(schedule.idle_share()):.1%} idle; backward hatched"
    )


def _units(schedule: Schedule, lane: str) -> Iterator[tuple[int, int, int]]:
    """(tick, stage, microbatch) of everything that a lane runs."""
    for tick, row in enumerate(getattr(schedule, f"{lane}_microbatch").tolist()):
        yield from ((tick, stage, microbatch) for stage, microbatch in enumerate(row) if microbatch != NOTHING)


def _labels(schedule: Schedule, lane: str) -> list[list[str]]:
    """What each cell of a lane shows, [ticks][stages]."""
    chunks = getattr(schedule, f"{lane}_chunk").tolist()
    labels = [[_IDLE] * schedule.num_stages for _ in chunks]
    for tick, stage, microbatch in _units(schedule, lane):
        labels[tick][stage] = f"{microbatch}{_chunk_label(chunks[tick][stage], schedule.num_chunks)}"
    return labels


def _chunk_label(chunk: int, num_chunks: int) -> str:
    if num_chunks == 1:
        return ""
    return string.ascii_lowercase[chunk] if num_chunks <= len(string.ascii_lowercase) else f".{chunk}"


def _style(microbatch: int, num_microbatches: int, lane: str) -> Style:
    """A colour per microbatch: as background going forward, as letters going backward."""
    if microbatch == NOTHING:
        return Style(dim=True)
    red, green, blue = (round(255 * part) for part in _colour(microbatch, num_microbatches))
    colour = Color.from_rgb(red, green, blue)
    return Style(color="black", bgcolor=colour) if lane == "forward" else Style(color=colour, bold=True)


def _colour(microbatch: int, num_microbatches: int) -> tuple[float, float, float]:
    """Red, green and blue, 0 to 1: light hues, evenly spaced around the colour circle."""
    return colorsys.hsv_to_rgb(microbatch / num_microbatches, 0.45, 0.95)
