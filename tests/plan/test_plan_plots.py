"""Plots: well-formed SVG whose shapes have the right sizes."""

import xml.etree.ElementTree as ET

import pytest

from jaxpar.plan.plots import Part, log_scatter, ranked_bars, stacked_bar


def shapes(svg, tag):
    return [element for element in ET.fromstring(svg).iter() if element.tag.endswith(tag)]


def test_parts_of_a_bar_are_as_wide_as_their_values():
    parts = [
        Part(name="a & b", value=3, label="3"),
        Part(name="none", value=0, label="0"),
        Part(name="c", value=1, label="1"),
    ]
    bars = [
        bar for bar in shapes(stacked_bar(parts, limit=8, limit_label="limit"), "rect") if bar.get("height") == "40"
    ]
    widths = [float(bar.get("width")) for bar in bars]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.5)
    (line,) = shapes(stacked_bar(parts, limit=8, limit_label="limit"), "line")
    assert float(line.get("x1")) - 10 == pytest.approx(8 * widths[1], abs=1)


def test_ranked_bars_are_grey_where_they_are_not_good():
    svg = ranked_bars([("fits", 10.0, "10", True), ("does not", 5.0, "5", False)])
    good, bad = shapes(svg, "rect")
    assert float(good.get("width")) == pytest.approx(2 * float(bad.get("width")))
    assert good.get("fill") != bad.get("fill") == "#bbb"


def test_points_on_the_diagonal_lie_on_the_line():
    svg = log_scatter([("exact", [(10.0, 10.0), (1000.0, 1000.0)]), ("high", [(100.0, 200.0)])], "x", "y", 0.2)
    diagonal = shapes(svg, "polyline")[0].get("points").split()
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in diagonal)
    for circle in [c for c in shapes(svg, "circle") if c.get("r") == "3"]:
        x, y = float(circle.get("cx")), float(circle.get("cy"))
        above = (y1 + (x - x1) * (y2 - y1) / (x2 - x1)) - y
        assert above == pytest.approx(0, abs=0.2) or above > 20
