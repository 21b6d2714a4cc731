"""Comparison of runs on the same images, or of groups of runs with several seeds, and its page."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from distribuuuu.commands.html.history import MAX_TEXT, draw_curves
from distribuuuu.commands.html.page import Card, Column, PageSection, build_page, html
from distribuuuu.commands.report.pictures import Pictures, make_pictures
from distribuuuu.commands.report.run_report import RunFiles, read_run
from distribuuuu.commands.stats.significance import (
    Interval,
    holm_adjusted,
    mcnemar_p,
    mean_interval,
    paired_interval,
    permutation_test,
    smallest_permutation_p,
    wilson_interval,
)
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.config import ConfigError, yaml_file
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.json_file import replace_nonfinite
from distribuuuu.config.options import OPTIONS
from distribuuuu.files.untrusted import read_regular

# A difference is called significant if its p-value is below this.
ALPHA = 0.05
# Cards of each gallery, and rows of the table of classes.
_MAX_CARDS, _MAX_CLASSES = 24, 1000


@dataclass
class Pair:
    """Two runs on the same images.

    Attributes:
        order: the index in B of each image of A.
        values: the accuracy of both, in percent.
        interval: 95 % interval of the difference, B - A, in points.
        only_a, only_b: indices in A of the images that only A, or only B, got right.
        p: McNemar's exact p-value.
        adjusted_p: `p` adjusted for the number of pairs.
        by_class: for each class, its images, and how many of them only A and only B got right, int64 (3, classes).
    """

    order: np.ndarray = field(repr=False)
    values: tuple[float, float]
    interval: Interval
    only_a: np.ndarray = field(repr=False)
    only_b: np.ndarray = field(repr=False)
    p: float
    by_class: np.ndarray = field(repr=False)
    adjusted_p: float = math.nan

    @property
    def difference(self) -> float:
        """B - A in points."""
        return self.values[1] - self.values[0]

    @property
    def is_significant(self) -> bool:
        """Whether the adjusted p-value is below `ALPHA`."""
        return self.adjusted_p < ALPHA


def match_images(first: Predictions, other: Predictions, names: tuple[str, str]) -> np.ndarray:
    """Return the index in `other` of each image of `first`.

    Args:
        first, other: the predictions of two runs.
        names: the names of the runs, for messages.

    Raises:
        ConfigError: the runs have other classes, images or labels; the message names the difference.
    """
    where = f"{names[0]} and {names[1]}"
    if first.classes != other.classes:
        difference = _describe_sets(first.classes, other.classes, names) or "the same ones in another order"
        raise ConfigError(f"{where}: have other classes: {difference}")
    own, others = first.path.tolist(), other.path.tolist()
    if sorted(own) != sorted(others):
        numbers = f"{counted(len(first), 'image')} and {counted(len(other), 'image')}"
        difference = _describe_sets(own, others, names)
        raise ConfigError(f"{where}: were evaluated on other images, {numbers}: {difference}")
    places = {path: place for place, path in enumerate(others)}
    order = np.arange(len(own)) if own == others else np.array([places[path] for path in own])
    labels = other.label[order]
    if first.label.shape != labels.shape or not np.array_equal(first.label, labels):
        raise ConfigError(f"{where}: have other labels for the same images")
    return order


def _describe_sets(first: Sequence[str], other: Sequence[str], names: tuple[str, str]) -> str:
    """Return which names only one of two runs has; empty if both have the same names."""
    own, others = set(first), set(other)
    parts = ((names[0], own - others), (names[1], others - own))
    return "; ".join(f"only {name} has {first_few(sorted(missing), num=3)}" for name, missing in parts if missing)


# ------------------------------------------------------------------------------------- two runs


def compare_pair(a: Predictions, b: Predictions, names: tuple[str, str]) -> Pair:
    """Return the comparison of two runs; errors as in `match_images`."""
    order = match_images(a, b, names)
    right_a, right_b, num_classes = a.correct, b.correct[order], len(a.classes)
    only_a, only_b = np.flatnonzero(right_a & ~right_b), np.flatnonzero(right_b & ~right_a)
    counts = [np.bincount(labels, minlength=num_classes) for labels in (a.label, a.label[only_a], a.label[only_b])]
    interval = paired_interval(len(only_a), len(only_b), len(a))
    return Pair(
        order=order,
        values=(100 * float(right_a.mean()), 100 * float(right_b.mean())),
        interval=Interval(100 * interval.low, 100 * interval.high),
        only_a=only_a,
        only_b=only_b,
        p=mcnemar_p(len(only_a), len(only_b)),
        by_class=np.stack(counts),
    )


def compare_all(runs: Mapping[str, Predictions]) -> dict[tuple[str, str], Pair]:
    """Return the comparison of every two runs, with p-values adjusted for the number of pairs."""
    pairs = {(a, b): compare_pair(runs[a], runs[b], (a, b)) for a, b in itertools.combinations(runs, 2)}
    for pair, adjusted in zip(pairs.values(), holm_adjusted([pair.p for pair in pairs.values()]), strict=True):
        pair.adjusted_p = adjusted
    return pairs


def describe_pair(names: tuple[str, str], pair: Pair) -> str:
    """Return the result of a comparison as a sentence."""
    better, worse = names if pair.difference < 0 else names[::-1]
    low, high = (-pair.interval.high, -pair.interval.low) if pair.difference < 0 else pair.interval
    p = f"p = {format_p(pair.adjusted_p)}"
    if pair.is_significant:
        points = f"{abs(pair.difference):.2f} points of top-1 (95 % interval {low:.2f} to {high:.2f}, {p})"
        return f"{better} is better than {worse} by {points}."
    interval = f"95 % interval {pair.interval.low:+.2f} to {pair.interval.high:+.2f}"
    gap = f"{names[1]} - {names[0]} = {pair.difference:+.2f} points of top-1"
    return f"No significant difference between {names[0]} and {names[1]}: {gap} ({interval}, {p})."


def format_p(p: float) -> str:
    """Return a p-value as text, e.g. '0.031' or '3e-12'."""
    return f"{p:.1g}" if p < 0.001 else f"{p:.3f}"


# -------------------------------------------------------------------------------- several seeds


def compare_groups(values: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return the comparison of every two groups of runs by a permutation test of their means, as values for JSON.

    Args:
        values: the accuracy of each run in percent, by the name of the group.
    """
    groups = []
    for a, b in itertools.combinations(values, 2):
        p = permutation_test(values[a], values[b])
        smallest = smallest_permutation_p(len(values[a]), len(values[b]))
        group = {"a": a, "b": b, "values": [list(values[a]), list(values[b])], "p": p, "smallest_p": smallest}
        groups.append({**group, "sentence": _describe_group(group)})
    return groups


def _describe_group(group: Mapping[str, Any]) -> str:
    a, b, p, least, (first, second) = (group[key] for key in ("a", "b", "p", "smallest_p", "values"))
    sizes = f"{counted(len(first), 'run')} and {counted(len(second), 'run')}"
    difference = statistics.fmean(second) - statistics.fmean(first)
    gap = f"{difference:+.2f} points of top-1 on average"
    if least >= ALPHA:
        reason = f"with {sizes}, no difference could be significant (the smallest possible p is {least:.2f})"
        return f"Too few runs to tell {a} and {b} apart: {gap}, but {reason}."
    if p >= ALPHA:
        return f"No significant difference between {a} and {b}: {gap}, p = {format_p(p)} ({sizes})."
    better, worse = (b, a) if difference > 0 else (a, b)
    points = f"{abs(difference):.2f} points of top-1 on average"
    return f"{better} is better than {worse} by {points}, p = {format_p(p)} ({sizes})."


# -------------------------------------------------------------------------------------- all runs


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
