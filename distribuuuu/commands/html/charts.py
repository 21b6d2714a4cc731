"""Line charts as SVG. Colors are those of the style sheet."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distribuuuu.commands.html.page import html

# Size of a chart in its own units, and the edges of its area between the numbers on the axes.
_AREA = {"width": 350, "height": 215, "left": 48, "right": 340, "top": 10, "bottom": 181}
# Points of a curve at most; more would have less than a pixel each.
_MAX_POINTS = 400
# Number of series colors in the style sheet.
_NUM_COLORS = 8

Range = tuple[float, float]


class Series(NamedTuple):
    """A curve of a chart: its entry in the legend, and its points, with NaN as a gap, drawn as dots too or not."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    has_dots: bool = False


class Mark(NamedTuple):
    """A vertical line at `x`, with a text that appears under the pointer."""

    x: float
    text: str


def find_ticks(low: float, high: float, num: int = 5) -> list[float]:
    """Return about `num` round numbers from `low` to `high`, at distances of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 1e-200:  # the power of ten below would be 0
        return [low]
    power = 10.0 ** math.floor(math.log10(span / num))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= num)
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [round(step * number, 12) for number in numbers]


def line_chart(title: str, series: Sequence[Series], x_label: str, marks: Sequence[Mark] = ()) -> str:
    """Return a chart of curves with a title, a legend and vertical lines; an empty text if no curve has a point."""
    points = [(x, y) for curve in series for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    if not points:
        return ""
    columns, values = zip(*points, strict=True)
    low, high = min(columns), max(columns)
    has_zero = 0 <= low <= high / 2 or low == high > 0
    x_range, y_range = _widen(0.0 if has_zero else low, high, 0), _widen(min(values), max(values), 0.05)
    return html.chart(
        title,
        x_label,
        _AREA,
        [(_place(tick, x_range, "left", "right"), f"{tick:.6g}") for tick in find_ticks(*x_range, num=6)],
        [(_place(tick, y_range, "bottom", "top"), f"{tick:.6g}") for tick in find_ticks(*y_range)],
        [(_place(mark.x, x_range, "left", "right"), mark.text) for mark in marks],
        [(curve.name, number % _NUM_COLORS + 1, *_trace(curve, x_range, y_range))
         for number, curve in enumerate(series)],
    )  # fmt: skip


def _widen(low: float, high: float, margin: float) -> Range:
    """Return a range with a margin; it never crosses zero, and is never empty."""
    if high <= low:
        return low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
    space = margin * (high - low)
    return max(0.0, low - space) if low >= 0 else low - space, high + space


def _place(value: float, limits: Range, *edges: str) -> str:
    """Return the position of a value between two edges of the area."""
    return f"{np.interp(value, limits, [_AREA[edge] for edge in edges]):.1f}"


def _trace(curve: Series, x_range: Range, y_range: Range) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the path of a curve, and the position and text of each dot."""
    path, is_gap, dots = "", True, list[tuple[str, str, str]]()
    step = 1 if curve.has_dots else -(-len(curve.x) // _MAX_POINTS) or 1
    for x, y in list(zip(curve.x, curve.y, strict=True))[::-step][::-1]:
        if not math.isfinite(y):
            is_gap = True
            continue
        place = _place(x, x_range, "left", "right"), _place(y, y_range, "bottom", "top")
        dots.append((*place, f"{x:.4g}: {y:.4g}"))
        path, is_gap = f"{path}{'M' if is_gap else 'L'}{dots[-1][0]} {dots[-1][1]}", False
    return path, dots if curve.has_dots or len(curve.x) == 1 else []
