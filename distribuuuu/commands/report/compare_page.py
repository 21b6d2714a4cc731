"""The page that compares runs, or groups of runs with several seeds."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from distribuuuu.commands.html.history import MAX_TEXT, draw_curves
from distribuuuu.commands.html.page import Card, Column, PageSection, build_page, html
from distribuuuu.commands.report.comparison import (
    ALPHA,
    Pair,
    compare_all,
    compare_groups,
    describe_pair,
)
from distribuuuu.commands.report.pictures import Pictures, make_pictures
from distribuuuu.commands.report.run_report import RunFiles, read_run
from distribuuuu.commands.stats.significance import mean_interval, wilson_interval
from distribuuuu.config import ConfigError, yaml_file
from distribuuuu.config.errors import counted
from distribuuuu.config.json_file import replace_nonfinite
from distribuuuu.config.options import OPTIONS
from distribuuuu.files.untrusted import read_regular

# Cards of each gallery, and rows of the table of classes.
_MAX_CARDS, _MAX_CLASSES = 24, 1000


def list_changes(runs: Mapping[str, RunFiles]) -> dict[str, list[Any]] | None:
    """Return the options that differ: option -> its value in each run; None if a config.yaml cannot be read.

    Options that are missing in the config of an older version have their defaults.
    """
    try:
        contents = [yaml_file.load(read_regular(run.out_dir / "config.yaml", MAX_TEXT).decode("utf-8"))
                    for run in runs.values()]  # fmt: skip
        configs = [dict(_flatten(content)) for content in contents]
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
        return None
    given = {key: option.default for key, option in OPTIONS.items()}
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}  # as in YAML
    keys = dict.fromkeys(key for config in configs for key in config if key not in OPTIONS or OPTIONS[key].compared)
    rows = {key: [config.get(key, defaults.get(key)) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass
class Comparison:
    """Everything that the page shows.

    Attributes:
        sides: the runs of each side, by its name.
        pairs: the comparison of the first run of every two sides on the same images.
        groups: the comparison of every two sides by their runs, see `compare_groups`; empty if each has one run.
        changes: options that differ between the sides; None: a config cannot be read.
    """

    sides: dict[str, list[RunFiles]]
    pairs: dict[tuple[str, str], Pair]
    groups: list[dict[str, Any]]
    changes: dict[str, list[Any]] | None

    def sentences(self) -> list[str]:
        """Return the results in words: of the groups, if there are any, else of the pairs."""
        pairs = [describe_pair(names, pair) for names, pair in self.pairs.items()]
        return [group["sentence"] for group in self.groups] or pairs


def compare_runs(sides: Mapping[str, Sequence[Path]]) -> Comparison:
    """Return the comparison of two or more sides, each of one run or of several seeds.

    Raises:
        ConfigError: a run cannot be read, or the runs were evaluated on different images.
    """
    runs = {name: [read_run(str(folder)) for folder in folders] for name, folders in sides.items()}
    firsts = {name: members[0].content for name, members in runs.items()}
    if others := [name for name, content in firsts.items() if content.multilabel or not content.classifies]:
        raise ConfigError(f"RUN: {others[0]} does not predict one class per image; fix: compare the metrics by `table`")
    pairs = compare_all(firsts)
    found = Comparison(runs, pairs, [], list_changes({name: members[0] for name, members in runs.items()}))
    if any(len(members) > 1 for members in runs.values()):
        found.groups = compare_groups({name: _values(members) for name, members in runs.items()})
    return found


def _values(runs: Sequence[RunFiles]) -> list[float]:
    """Return the accuracy of each run of a side in percent."""
    return [100 * float(run.content.correct.mean()) for run in runs]


# ------------------------------------------------------------------------------------------ output


def list_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return the figures of a comparison as plain values, for JSON."""
    pairs = [
        {
            "a": names[0],
            "b": names[1],
            "only_a": len(pair.only_a),
            "only_b": len(pair.only_b),
            **{name: getattr(pair, name) for name in ("values", "difference", "interval", "p", "adjusted_p")},
            "significant": pair.is_significant,
            "sentence": describe_pair(names, pair),
        }
        for names, pair in comparison.pairs.items()
    ]
    runs = {name: [str(run.out_dir) for run in members] for name, members in comparison.sides.items()}
    return replace_nonfinite({"runs": runs, "pairs": pairs, "groups": comparison.groups, "config": comparison.changes})


def build_compare_page(comparison: Comparison) -> str:
    """Return the page as HTML; of a side with several runs, it shows the curves and images of the first one."""
    histories = {name: members[0].history for name, members in comparison.sides.items()}
    sections = [
        _summary(comparison),
        _config_section(comparison),
        PageSection("Curves", [curves] if (curves := draw_curves(histories)) else []),
        _classes(comparison),
        _changed_images(comparison),
    ]
    names = " and ".join(comparison.sides) if len(comparison.sides) == 2 else ", ".join(comparison.sides)
    num = len(next(iter(comparison.sides.values()))[0].content)
    subtitle = f"{counted(num, 'image')}, the same for every run"
    return build_page(f"Comparison of {names}", subtitle, [section for section in sections if section.parts])


def _summary(comparison: Comparison) -> PageSection:
    parts = [html.paragraph(sentence.replace(" -", " \N{MINUS SIGN}"), "lead") for sentence in comparison.sentences()]
    parts.append(html.tiles([_tile(name, members) for name, members in comparison.sides.items()]))
    if comparison.groups:
        note = "The tests of single runs on the same images do not include the differences between seeds."
        parts += [html.heading("The first run of each side"), html.paragraph(note, "note")]
        parts += [html.paragraph(describe_pair(names, pair)) for names, pair in comparison.pairs.items()]
    adjusted = ", adjusted by Holm's method" if len(comparison.pairs) > 1 else ""
    note = f"p: McNemar's exact test{adjusted}; significant below {ALPHA}. Interval: Newcombe's, by Wilson limits."
    parts.append(html.paragraph(note, "note"))
    return PageSection("Summary", parts)


def _tile(name: str, runs: Sequence[RunFiles]) -> tuple[str, str, str]:
    values, content = _values(runs), runs[0].content
    if len(values) > 1:
        low, high = mean_interval(values)
        detail = f"± {statistics.stdev(values):.2f} over {len(values)} runs, 95 % interval of the mean"
        return name, f"{statistics.fmean(values):.2f} %", f"{detail} {low:.2f} to {high:.2f}"
    low, high = (100 * end for end in wilson_interval(int(content.correct.sum()), len(content)))
    detail = f"top-1, {content.meta.get('weights', 'raw')} weights, 95 % interval {low:.2f} to {high:.2f}"
    return name, f"{values[0]:.2f} %", detail


def _config_section(comparison: Comparison) -> PageSection:
    changes = comparison.changes
    if changes is None:
        part = html.paragraph("A run has no readable config.yaml, so the configs are not compared.", "note")
    elif not changes:
        part = html.paragraph("The configs do not differ.")
    else:
        columns = [Column("option"), *(Column(name) for name in comparison.sides)]
        rows = [[key, *("–" if value is None else str(value) for value in values)] for key, values in changes.items()]
        part = html.table(columns, rows, sortable=False)
    return PageSection("Config", [part])


def _classes(comparison: Comparison) -> PageSection:
    parts: list[str] = []
    classes = next(iter(comparison.sides.values()))[0].content.classes
    for names, pair in comparison.pairs.items():
        if len(comparison.pairs) > 1:
            parts.append(html.heading(f"{names[0]} and {names[1]}"))
        images, first, second = pair.by_class
        counts = (Column(name, ".0f") for name in ("images", *(f"only {name} right" for name in names)))
        columns = [Column("class"), *counts, Column("difference in points", "+.2f", signed=True)]
        change = 100 * (second - first) / np.maximum(1, images)
        order = np.argsort(-np.abs(change), kind="stable")[:_MAX_CLASSES]
        figures = (values.tolist() for values in (images, first, second, change))
        rows = list(zip(classes, *figures, strict=True))
        parts.append(html.table(columns, [rows[number] for number in order]))
    return PageSection("Classes", parts)


def _changed_images(comparison: Comparison) -> PageSection:
    """Return the section of the images that only one of two runs got right, the most confident mistakes first."""
    parts: list[str] = []
    for names, pair in comparison.pairs.items():
        runs = [comparison.sides[name][0] for name in names]
        places = np.stack([np.arange(len(pair.order)), pair.order])
        chosen = []
        for loser, indices in ((1, pair.only_a), (0, pair.only_b)):
            confidence = runs[loser].content.confidence[places[loser][indices]]
            chosen.append(indices[np.argsort(-confidence, kind="stable")[:_MAX_CARDS]])
        pictures = make_pictures(runs[0].out_dir, runs[0].content, np.concatenate(chosen).tolist())
        for name, indices, shown in zip(names, (pair.only_a, pair.only_b), chosen, strict=True):
            if len(indices):
                title = f"Only {name} is right: {counted(len(indices), 'image')}"
                cards = html.gallery([_card(runs, names, places[:, index], pictures) for index in shown], "small")
                parts.append(html.details(title, cards) if len(comparison.pairs) > 1 else html.heading(title) + cards)
        parts += [html.paragraph(note, "note") for note in pictures.notes]
    return PageSection("Changed answers", parts)


def _card(runs: Sequence[RunFiles], names: Sequence[str], places: np.ndarray, pictures: Pictures) -> Card:
    """Return the card of an image; `places` are its indices in the two runs."""
    lines = []
    for name, run, place in zip(names, runs, places, strict=True):
        content = run.content
        lines.append(f"{name}: {content.classes[content.predicted[place]]} ({content.confidence[place]:.0%})")
    index, first = int(places[0]), runs[0].content
    title, uri = f"label: {first.classes[first.label[index]]}", pictures.uris.get(index)
    return Card(title, lines, str(first.path[index]), uri, pictures.is_tiny)
