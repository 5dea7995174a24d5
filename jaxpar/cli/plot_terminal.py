"""Curves as text: two by four dots in every character (Braille), one colour or one letter per run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from rich.text import Text

from jaxpar.events.history import Series

COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
POINT = "○"
"""What points are drawn with."""

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot at [row][column] of a Braille character (Unicode chapter 21.1)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One run's line in a chart."""

    run: int
    """Index of the run: its colour or letter."""
    series: Series
    joined: bool = True
    """A line; otherwise points."""


def chart(title: str, curves: Sequence[Curve], *, width: int, height: int, in_colour: bool) -> Text:
    """A chart with its range beside it and the steps below.

    Args:
        title: first line.
        curves: at least one point among them.
        width: characters of a line.
        height: lines of the drawing area.
        in_colour: runs differ by colour; otherwise, if there are several, by letter.
    """
    steps = [step for curve in curves for step in curve.series.steps]
    values = [value for curve in curves for value in curve.series.values]
    bottom, top = min(values), max(values)
    labels = {0: short(top), height - 1: short(bottom)} if top > bottom else {height - 1: short(bottom)}
    margin = max(map(len, labels.values())) + 1
    area = _Area(width - margin - 2, height, (min(steps), max(steps)), (bottom, top))
    letters = not in_colour and len({curve.run for curve in curves}) > 1
    for curve in curves:
        letter = LETTERS[curve.run % len(LETTERS)] if letters else None
        area.draw(curve, letter if curve.joined else letter.upper() if letter else POINT)
    text = Text(f"{' ' * margin} {title}\n", style="bold" if in_colour else "")
    for row in range(height):
        text.append(f"{labels.get(row, ''):>{margin}} │", style="not bold")
        for character, run in area.line(row):
            colour = COLOURS[run % len(COLOURS)] if in_colour and run is not None else ""
            text.append(character, style=f"not bold {colour}".strip())
        text.append("\n")
    first, last = str(min(steps)), str(max(steps))
    gap = width - margin - 2 - len(first) - len(last)
    text.append(f"{' ' * margin} └{first}{' step ' if gap > 8 else ' ':─^{max(1, gap)}}{last}\n", style="not bold")
    return text


def short(value: float) -> str:
    """A number in a few characters: 1.234, 12.3k, 3.00e-04."""
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e15):
        return f"{value:.2e}"
    for bound, factor, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= bound:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.4g}"


class _Area:
    """The dots of a chart."""

    def __init__(self, width: int, height: int, steps: tuple[int, int], values: tuple[float, float]):
        self._width, self._height = max(1, width), height
        self._steps, self._values = steps, values
        self._cells: dict[tuple[int, int], tuple[int | str, int]] = {}

    def draw(self, curve: Curve, letter: str | None) -> None:
        """Points, joined by lines or not; a letter stands for all dots of its character."""
        series = curve.series.thinned(2 * self._width)
        points = [self._place(*point) for point in zip(series.steps, series.values, strict=True)]
        for start, end in zip(points, points[1:] if curve.joined and len(points) > 1 else points, strict=False):
            for x, y in _between(start, end):
                self._dot(x, y, curve.run, letter)

    def line(self, row: int) -> list[tuple[str, int | None]]:
        """Characters of a line, each with the run that drew it last."""
        found = [self._cells.get((column, row)) for column in range(self._width)]
        return [
            (" ", None) if cell is None else (cell[0] if isinstance(cell[0], str) else chr(_BRAILLE + cell[0]), cell[1])
            for cell in found
        ]

    def _place(self, step: int, value: float) -> tuple[int, int]:
        (first, last), (bottom, top) = self._steps, self._values
        x = (step - first) / (last - first) if last > first else 0.5
        y = (top - value) / (top - bottom) if top > bottom else 0.5
        return round(x * (2 * self._width - 1)), round(y * (4 * self._height - 1))

    def _dot(self, x: int, y: int, run: int, letter: str | None) -> None:
        cell = (x // 2, y // 4)
        if letter is not None:
            self._cells[cell] = (letter, run)
            return
        before = self._cells.get(cell, (0, run))[0]
        self._cells[cell] = (before | _DOTS[y % 4][x % 2], run)


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of a straight line."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        tuple(math.floor(a + (b - a) * i / length + 0.5) for a, b in zip(start, end, strict=True))
        for i in range(length + 1)
    ]
