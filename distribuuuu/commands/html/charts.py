"""Line charts as SVG. Colors are those of the style sheet."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup, escape

from distribuuuu.commands.html.page import html
from distribuuuu.files.untrusted import printable

# Size of a chart in its own units, and the margins for the numbers on its axes.
_WIDTH, _HEIGHT = 350, 215
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 34
# Points of a curve at most; more would have less than a pixel each.
_MAX_POINTS = 400
# Number of series colors in the style sheet.
_NUM_COLORS = 8


@dataclass(frozen=True)
class Series:
    """A curve of a chart.

    Attributes:
        name: its entry in the legend.
        x, y: its points; a NaN in y is a gap.
        has_dots: whether the points are drawn too.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    has_dots: bool = False


@dataclass(frozen=True)
class Mark:
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
    return [
        round(step * number, 12) for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def format_tick(value: float) -> str:
    """Return a short text of a number on an axis, e.g. '0.05', '12k' or '2e-5'."""
    if abs(value) >= 10_000:
        return f"{value / 1000:,.6g}k"
    if 0 < abs(value) < 1e-3:
        return re.sub(r"\.?0*e-0?", "e-", f"{value:.2e}")
    return f"{value:.4g}"


def _escape(text: str) -> Markup:
    """Return a text for an SVG."""
    return escape(printable(text))


class _Axes:
    """The map from values to positions, with the axes and grid of a chart."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]):
        self.x_range, self.y_range = x_range, y_range

    def x(self, value: float) -> float:
        """Return the horizontal position of a value, or that of the nearest end."""
        low, high = self.x_range
        return _LEFT + (min(max(value, low), high) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Return the vertical position of a value, or that of the nearest end."""
        low, high = self.y_range
        return _HEIGHT - _BOTTOM - (min(max(value, low), high) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def to_svg(self, x_label: str) -> str:
        """Return the axes, their numbers, the label of the first one, and the grid."""
        bottom, parts = _HEIGHT - _BOTTOM, []
        for tick in find_ticks(*self.y_range):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>')
        for tick in find_ticks(*self.x_range, num=6):
            text = format_tick(tick)
            parts.append(f'<text x="{self.x(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{_escape(x_label)}</text>')
        return "".join(parts)


def line_chart(title: str, series: Sequence[Series], x_label: str, marks: Sequence[Mark] = ()) -> str:
    """Return a chart of curves with a legend; an empty text if no curve has a point.

    Args:
        title: the title, shown above the chart.
        series: the curves.
        x_label: the text on the horizontal axis.
        marks: vertical lines.
    """
    series = [_shorten(curve) for curve in series]
    points = [(x, y) for curve in series for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    if not points:
        return ""
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    has_zero = 0 <= low <= high / 2 or low == high > 0
    x_range = _widen(0.0 if has_zero else low, high, 0)
    axes = _Axes(x_range, _widen(*_spread([y for _, y in points])))
    parts = [axes.to_svg(x_label)]
    for mark in marks:
        x = axes.x(mark.x)
        line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        parts.append(f"<g><title>{_escape(mark.text)}</title>{line}</g>")
    colors = [f"var(--c{number % _NUM_COLORS + 1})" for number in range(len(series))]
    parts += [_draw(curve, axes, color) for curve, color in zip(series, colors, strict=True)]
    legend = [(curve.name, color) for curve, color in zip(series, colors, strict=True) if len(series) > 1]
    return html.figure(title, Markup("".join(parts)), _WIDTH, _HEIGHT, legend)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of values without the few that would hide the others, e.g. the loss of a failed step."""
    low, high = min(values), max(values)
    usual = float(np.quantile(values, 0.98))
    return low, usual if len(values) >= 50 and high - low > 5 * (usual - low) > 0 else high


def _widen(low: float, high: float, margin: float = 0.05) -> tuple[float, float]:
    """Return a range with a margin; it never crosses zero, and is never empty."""
    if high <= low:
        return low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
    space = margin * (high - low)
    return max(0.0, low - space) if low >= 0 else low - space, high + space


def _shorten(curve: Series) -> Series:
    """Return a curve without dots as at most `_MAX_POINTS` points."""
    step = 1 if curve.has_dots else -(-len(curve.x) // _MAX_POINTS) or 1
    return replace(curve, x=curve.x[::-step][::-1], y=curve.y[::-step][::-1])


def _draw(curve: Series, axes: _Axes, color: str) -> str:
    path, is_gap, dots = "", True, ""
    for x, y in zip(curve.x, curve.y, strict=True):
        if not math.isfinite(y):
            is_gap = True
            continue
        cx, cy = f"{axes.x(x):.1f}", f"{axes.y(y):.1f}"
        path, is_gap = f"{path}{'M' if is_gap else 'L'}{cx} {cy}", False
        if curve.has_dots or len(curve.x) == 1:
            title = f"<title>{x:.4g}: {y:.4g}</title>"
            dots += f'<circle cx="{cx}" cy="{cy}" r="2.5" fill="{color}">{title}</circle>'
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.7" stroke-linejoin="round"/>{dots}'
