"""Plots as SVG text: stacked bars, ranked bars and predicted-against-published points. No library, no network."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#bab0ac")

_WIDTH = 860
_LEFT = 310
_RIGHT = 170
_BAR = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A segment of a stacked bar."""

    name: str
    value: float
    label: str
    """What is shown beside the name, e.g. "12.3 GiB"."""


def stacked_bar(parts: Sequence[Part], limit: float | None = None, limit_label: str = "") -> str:
    """One horizontal bar of parts, with a legend, and a line at ``limit``."""
    parts = [part for part in parts if part.value > 0]
    total = sum(part.value for part in parts)
    scale = (_WIDTH - 20) / (max(total, limit or 0.0) or 1.0)
    shapes, x = [], 10.0
    for part, colour in zip(parts, _colours(len(parts)), strict=True):
        width = part.value * scale
        title = html.escape(f"{part.name}: {part.label}")
        shapes.append(
            f'<rect x="{x:.1f}" y="8" width="{width:.1f}" height="40" fill="{colour}"><title>{title}</title></rect>'
        )
        x += width
    if limit is not None:
        at = 10 + limit * scale
        shapes.append(f'<line x1="{at:.1f}" y1="2" x2="{at:.1f}" y2="56" stroke="#000" stroke-width="2"/>')
        anchor = "end" if at > _WIDTH / 2 else "start"
        shapes.append(f'<text x="{at:.1f}" y="70" text-anchor="{anchor}">{html.escape(limit_label)}</text>')
    top = 92
    for index, (part, colour) in enumerate(zip(parts, _colours(len(parts)), strict=True)):
        column, row = index % 3, index // 3
        left, baseline = 10 + 250 * column, top + 22 * row
        shapes.append(f'<rect x="{left}" y="{baseline - 11}" width="12" height="12" fill="{colour}"/>')
        label = html.escape(f"{part.name} {part.label}")
        shapes.append(f'<text x="{left + 18}" y="{baseline}">{label}</text>')
    return _svg(top + 22 * -(-len(parts) // 3), shapes)


def ranked_bars(rows: Sequence[tuple[str, float, str, bool]]) -> str:
    """Horizontal bars of (name, value, label, good); those that are not good are grey."""
    longest = max((value for _, value, _, _ in rows), default=1.0) or 1.0
    shapes = []
    for index, (name, value, label, good) in enumerate(rows):
        y = 6 + index * (_BAR + 6)
        width = (_WIDTH - _LEFT - _RIGHT) * value / longest
        colour = COLOURS[0] if good else "#bbb"
        shapes.append(f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>')
        shapes.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>')
        shapes.append(f'<text x="{_LEFT + width + 6:.1f}" y="{y + 17}">{html.escape(label)}</text>')
    return _svg(12 + len(rows) * (_BAR + 6), shapes)


def log_scatter(
    groups: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_title: str, y_title: str, band: float
) -> str:
    """Points of named groups on equal logarithmic axes, the diagonal, and a band of +-``band`` around it."""
    points = [value for _, group in groups for point in group for value in point]
    low, high = math.log10(min(points)) - 0.05, math.log10(max(points)) + 0.05
    size, left, top = 480, 70, 10

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * size

    def point(x: float, y: float) -> str:
        return f"{left + at(x):.1f},{top + size - at(y):.1f}"

    ends = (10**low, 10**high)
    shapes = [f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="#fafafa" stroke="#999"/>']
    for factor, style in ((1.0, ""), (1 + band, ' stroke-dasharray="4"'), (1 / (1 + band), ' stroke-dasharray="4"')):
        inside = [max(end, ends[0] / factor) if factor < 1 else min(end, ends[1] / factor) for end in ends]
        line = " ".join(point(x, x * factor) for x in inside)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="#555"{style}/>')
    for power in range(math.floor(low), math.floor(high) + 1):
        for step in (1, 2, 5):
            value = step * 10.0**power
            if ends[0] <= value <= ends[1]:
                x, y = left + at(value), top + size - at(value)
                shapes.append(f'<text x="{x:.1f}" y="{top + size + 16}" text-anchor="middle">{value:g}</text>')
                shapes.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for index, ((name, group), colour) in enumerate(zip(groups, _colours(len(groups)), strict=True)):
        for x, y in group:
            cx, cy = point(x, y).split(",")
            shapes.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}" fill-opacity="0.7"/>')
        y = top + 20 + 20 * index
        shapes.append(f'<circle cx="{left + size + 20}" cy="{y - 4}" r="5" fill="{colour}"/>')
        shapes.append(f'<text x="{left + size + 32}" y="{y}">{html.escape(name)}</text>')
    middle = top + size / 2
    turned = f'text-anchor="middle" transform="rotate(-90 14 {middle})"'
    shapes.append(
        f'<text x="{left + size / 2}" y="{top + size + 36}" text-anchor="middle">{html.escape(x_title)}</text>'
    )
    shapes.append(f'<text x="14" y="{middle}" {turned}>{html.escape(y_title)}</text>')
    return _svg(top + size + 46, shapes)


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _svg(height: float, shapes: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12">' + "".join(shapes) + "</svg>"
    )
