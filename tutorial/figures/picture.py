"""Figure in pixel coordinates, origin at the top left: boxes, text, arrows, and one color per rank."""

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# Text is stored as text, in any available sans-serif font (DejaVu is the widest); ids are deterministic.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "distribuuuu"})
matplotlib.rcParams.update({"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"]})

INK, GREY, PALE, WHITE = "#24292f", "#8c959f", "#eaeef2", "#ffffff"
RANKS = ("#8ecae6", "#ffb703", "#90be6d", "#cdb4db")  # fills for dark text
DARK = ("#1d6f94", "#a86f00", "#4a7a2a", "#7d5a94")  # the same hues for lines and text on white
BAD = "#d1495b"


class Picture:
    """A white figure with round corners, readable on light and dark pages."""

    def __init__(self, height, width=900):
        self.figure = Figure(figsize=(width / 96, height / 96), dpi=96)
        self.figure.patch.set_alpha(0)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")
        self.box(2, 2, width - 4, height - 4, fill=WHITE, edge="#d0d7de", round=14, zorder=0)

    def box(self, x, y, width, height, words="", fill=PALE, edge=None, size=10, color=INK, round=5, bold=False, **more):
        """Draw a box with rounded corners and centered text."""
        line = {"edgecolor": edge or "none", "linewidth": 1.2 if edge else 0, "clip_on": False}
        shape = f"round,pad=0,rounding_size={min(round, width / 2, height / 2)}" if round else "square,pad=0"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, shape, facecolor=fill, **line, **more))
        if words:
            self.text(x + width / 2, y + height / 2, words, size, color, bold=bold)

    def text(self, x, y, text, size=10, color=INK, at="center", bold=False):
        """Write text centered at a point, or with its left or right end there."""
        weight = "bold" if bold else "normal"
        text = text.replace("  ", "\N{NO-BREAK SPACE}" * 2)  # SVG collapses spaces
        self.axes.text(x, y, text, size=size, color=color, ha=at, va="center", weight=weight, linespacing=1.35)

    def line(self, x, y, color=INK, width=1.4, style="-"):
        """Draw a line through points, given as lists of x and y."""
        self.axes.plot(
            x, y, color=color, linewidth=width, linestyle=style, solid_capstyle="round", clip_on=False, zorder=0.9
        )

    def arrow(self, start, end, words="", color=INK, bend=0.0, size=9, width=1.6, shift=(0, -9), head="-|>", style="-"):
        """Draw an arrow between two points, with text beside its middle; bend > 0 curves it."""
        curve = f"arc3,rad={bend}"
        look = {
            "color": color,
            "linewidth": width,
            "mutation_scale": 12,
            "shrinkA": 0,
            "shrinkB": 0,
            "linestyle": style,
        }
        look["clip_on"] = False
        self.axes.add_patch(FancyArrowPatch(start, end, arrowstyle=head, connectionstyle=curve, **look))
        if words:
            middle = [(a + b) / 2 + c for a, b, c in zip(start, end, shift, strict=True)]
            self.text(*middle, words, size, color)

    def plot(self, left, top, width, height, title="", x_label="", y_label=""):
        """Return axes for a plot in a part of the figure."""
        total_width, total_height = self.axes.get_xlim()[1], self.axes.get_ylim()[0]
        place = (left / total_width, 1 - (top + height) / total_height, width / total_width, height / total_height)
        axes = self.figure.add_axes(place, facecolor="none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=INK)
        axes.set_title(title, size=10, color=INK)
        axes.set_xlabel(x_label, size=9, color=INK)
        axes.set_ylabel(y_label, size=9, color=INK)
        return axes

    def save(self, name):
        """Write the figure beside this file, without redundant group names, digits and fonts."""
        sheet = io.StringIO()
        self.figure.savefig(sheet, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", sheet.getvalue())
        for pattern, short in (
            (r' id="(patch|text|line2d|axes|figure|legend|matplotlib\.axis|xtick|ytick)_\d+"', ""),
            (r"font-family: 'DejaVu Sans'[^;]*; ", ""),
            (r' transform="rotate\(-0 [^"]*\)"', ""),
            (r"\*{", "text{font-family: 'DejaVu Sans', Verdana, Arial, sans-serif} *{"),
            (r"\s*\n\s*", "\n"),
        ):
            text = re.sub(pattern, short, text)
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")
