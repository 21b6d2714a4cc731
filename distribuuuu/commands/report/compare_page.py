"""Comparison of runs on the same images, or of groups of runs with several seeds, and its page."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from distribuuuu.commands.html.history import MAX_TEXT, draw_curves
from distribuuuu.commands.html.page import Column, PageSection, build_page, html
from distribuuuu.commands.report.run_report import RunFiles, make_pictures, read_run
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
from distribuuuu.config.options import OPTIONS
from distribuuuu.files.untrusted import read_regular
from distribuuuu.records.results import replace_nonfinite

# A difference is called significant if its p-value is below this.
ALPHA = 0.05
# Cards of each gallery, and rows of the table of classes.
_MAX_CARDS, _MAX_CLASSES = 24, 1000


@dataclass
class Pair:
    """Two runs on the same images.

    Attributes:
        a, b: the names of the runs.
        values: the accuracy of both, in percent.
        difference: B - A in points.
        interval: its 95 % interval.
        p: McNemar's exact p-value.
        adjusted_p: `p` adjusted for the number of pairs.
        chosen: the images that only A, and that only B got right, the most confident mistakes first: for each its
            index in A and in B.
        by_class: for each class, its images, and how many of them only A and only B got right, int64 (3, classes).
    """

    a: str
    b: str
    values: tuple[float, float]
    difference: float
    interval: Interval
    p: float
    chosen: tuple[np.ndarray, np.ndarray]
    by_class: np.ndarray
    adjusted_p: float = math.nan

    def list_figures(self) -> dict[str, Any]:
        """Return the figures as plain values, for JSON."""
        names = ("a", "b", "values", "difference", "interval", "p", "adjusted_p")
        only_a, only_b = map(len, self.chosen)
        return {
            **{name: getattr(self, name) for name in names},
            "only_a": only_a,
            "only_b": only_b,
            "significant": self.adjusted_p < ALPHA,
            "sentence": self.describe(),
        }

    def describe(self) -> str:
        """Return the result as a sentence."""
        low, high = self.interval if self.difference >= 0 else (-self.interval.high, -self.interval.low)
        return _describe(self.a, self.b, self.difference, self.adjusted_p, f"95 % interval {low:.2f} to {high:.2f}")


def _describe(a: str, b: str, difference: float, p: float, basis: str) -> str:
    """Return the result of a comparison as a sentence; `difference` is B - A, `basis` the origin of the p-value."""
    better, worse = (b, a) if difference >= 0 else (a, b)
    gap = f"{abs(difference):.2f} points of top-1 ({basis}, p = {p:{'.1g' if p < 0.001 else '.3f'}})."
    if p < ALPHA:
        return f"{better} is better than {worse} by {gap}"
    return f"No significant difference between {a} and {b}: {better} - {worse} = {gap}"


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
    only_a = only_a[np.argsort(-b.confidence[order[only_a]], kind="stable")]
    only_b = only_b[np.argsort(-a.confidence[only_b], kind="stable")]
    counts = [np.bincount(labels, minlength=num_classes) for labels in (a.label, a.label[only_a], a.label[only_b])]
    values = 100 * float(right_a.mean()), 100 * float(right_b.mean())
    low, high = paired_interval(len(only_a), len(only_b), len(a))
    return Pair(
        *names,
        values=values,
        difference=values[1] - values[0],
        interval=Interval(100 * low, 100 * high),
        p=mcnemar_p(len(only_a), len(only_b)),
        chosen=(np.stack([only_a, order[only_a]], axis=1), np.stack([only_b, order[only_b]], axis=1)),
        by_class=np.stack(counts),
    )


def compare_all(runs: Mapping[str, Predictions]) -> list[Pair]:
    """Return the comparison of every two runs, with p-values adjusted for the number of pairs."""
    pairs = [compare_pair(runs[a], runs[b], (a, b)) for a, b in itertools.combinations(runs, 2)]
    for pair, adjusted in zip(pairs, holm_adjusted([pair.p for pair in pairs]), strict=True):
        pair.adjusted_p = adjusted
    return pairs


# -------------------------------------------------------------------------------- several seeds


def compare_groups(values: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return the comparison of every two groups of runs by a permutation test of their means, as values for JSON.

    Args:
        values: the accuracy of each run in percent, by the name of the group.
    """
    groups = []
    for a, b in itertools.combinations(values, 2):
        p, sizes = permutation_test(values[a], values[b]), (len(values[a]), len(values[b]))
        smallest = smallest_permutation_p(*sizes)
        basis = " and ".join(counted(size, "run") for size in sizes)
        difference = statistics.fmean(values[b]) - statistics.fmean(values[a])
        sentence = _describe(a, b, difference, p, f"on average, {basis}")
        if smallest >= ALPHA:
            sentence = f"Too few runs to tell {a} and {b} apart, p is never below {smallest:.2f}. {sentence}"
        groups.append({"a": a, "b": b, "values": [values[a], values[b]], "p": p, "smallest_p": smallest,
                       "sentence": sentence})  # fmt: skip
    return groups


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
    pairs: list[Pair]
    groups: list[dict[str, Any]]
    changes: dict[str, list[Any]] | None

    def sentences(self) -> list[str]:
        """Return the results in words: of the groups, if there are any, else of the pairs."""
        return [group["sentence"] for group in self.groups] or [pair.describe() for pair in self.pairs]


def compare_runs(sides: Mapping[str, Sequence[Path]]) -> Comparison:
    """Return the comparison of two or more sides, each of one run or of several seeds.

    Raises:
        ConfigError: a run cannot be read, or the runs were evaluated on different images.
    """
    runs = {name: [read_run(str(folder)) for folder in folders] for name, folders in sides.items()}
    firsts = {name: members[0] for name, members in runs.items()}
    contents = {name: run.content for name, run in firsts.items()}
    if others := [name for name, content in contents.items() if content.multilabel or not content.classifies]:
        raise ConfigError(f"RUN: {others[0]} does not predict one class per image; fix: compare the metrics by `table`")
    pairs, has_seeds = compare_all(contents), any(len(members) > 1 for members in runs.values())
    groups = compare_groups({name: _values(members) for name, members in runs.items()}) if has_seeds else []
    return Comparison(runs, pairs, groups, list_changes(firsts))


def _values(runs: Sequence[RunFiles]) -> list[float]:
    """Return the accuracy of each run of a side in percent."""
    return [100 * float(run.content.correct.mean()) for run in runs]


# ------------------------------------------------------------------------------------------ output


def list_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return the figures of a comparison as plain values, for JSON."""
    runs = {name: [str(run.out_dir) for run in members] for name, members in comparison.sides.items()}
    pairs = [pair.list_figures() for pair in comparison.pairs]
    return replace_nonfinite({"runs": runs, "pairs": pairs, "groups": comparison.groups, "config": comparison.changes})


def build_compare_page(comparison: Comparison) -> str:
    """Return the page as HTML; of a side with several runs, it shows the curves and images of the first one."""
    firsts = {name: members[0] for name, members in comparison.sides.items()}
    sections = [
        _summary(comparison),
        _config_section(comparison),
        PageSection("Curves", [draw_curves({name: run.history for name, run in firsts.items()})]),
        _classes(comparison.pairs, firsts),
        _changed_images(comparison.pairs, firsts),
    ]
    num = counted(len(next(iter(firsts.values())).content), "image")
    return build_page(f"Comparison of {', '.join(firsts)}", f"{num}, the same for every run", sections)


def _summary(comparison: Comparison) -> PageSection:
    parts = [html.paragraph(sentence, "lead") for sentence in comparison.sentences()]
    parts.append(html.tiles([_tile(name, members) for name, members in comparison.sides.items()]))
    if comparison.groups:
        note = "The tests of single runs on the same images do not include the differences between seeds."
        parts += [html.heading("The first run of each side"), html.paragraph(note, "note")]
        parts += [html.paragraph(pair.describe()) for pair in comparison.pairs]
    note = f"p: McNemar's exact test, of several pairs adjusted by Holm's method; significant below {ALPHA}."
    parts.append(html.paragraph(f"{note} Interval: Newcombe's, by Wilson limits.", "note"))
    return PageSection("Summary", parts)


def _tile(name: str, runs: Sequence[RunFiles]) -> tuple[str, str, str]:
    values, content = _values(runs), runs[0].content
    if len(values) > 1:
        low, high = mean_interval(values)
        detail = f"± {statistics.stdev(values):.2f} over {len(values)} runs, 95 % interval of the mean"
    else:
        low, high = (100 * end for end in wilson_interval(int(content.correct.sum()), len(content)))
        detail = f"top-1, {content.meta.get('weights', 'raw')} weights, 95 % interval"
    return name, f"{statistics.fmean(values):.2f} %", f"{detail} {low:.2f} to {high:.2f}"


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


def _classes(pairs: Sequence[Pair], firsts: Mapping[str, RunFiles]) -> PageSection:
    parts: list[str] = []
    for pair in pairs:
        images, only_a, only_b = pair.by_class
        counts = (Column(name, ".0f") for name in ("images", f"only {pair.a} right", f"only {pair.b} right"))
        columns = [Column("class"), *counts, Column("difference in points", "+.2f", signed=True)]
        change = 100 * (only_b - only_a) / np.maximum(1, images)
        figures = (values.tolist() for values in (images, only_a, only_b, change))
        rows = list(zip(firsts[pair.a].content.classes, *figures, strict=True))
        order = np.argsort(-np.abs(change), kind="stable")[:_MAX_CLASSES]
        parts += [html.heading(f"{pair.a} and {pair.b}"), html.table(columns, [rows[number] for number in order])]
    return PageSection("Classes", parts)


def _changed_images(pairs: Sequence[Pair], firsts: Mapping[str, RunFiles]) -> PageSection:
    """Return the section of the images that only one of two runs got right, the most confident mistakes first."""
    galleries = []
    for pair in pairs:
        a, b = (firsts[name].content for name in (pair.a, pair.b))
        for right, wrong, places in ((pair.a, pair.b, pair.chosen[0]), (pair.b, pair.a, pair.chosen[1])):
            cards = []
            for place_a, place_b in places[:_MAX_CARDS]:
                lines = [f"{name}: {content.classes[content.predicted[place]]} ({content.confidence[place]:.0%})"
                         for name, content, place in ((pair.a, a, place_a), (pair.b, b, place_b))]  # fmt: skip
                cards.append((f"label: {a.classes[a.label[place_a]]}", lines, str(a.path[place_a])))
            title = f"{right} is right, {wrong} is wrong: {counted(len(places), 'image')}"
            galleries += [(title, cards)] if cards else []
    first, names = next(iter(firsts.values())), {card[2] for _, cards in galleries for card in cards}
    pictures, notes = make_pictures(first.out_dir, first.content, names)
    parts = [html.heading(title) + html.gallery(cards, pictures) for title, cards in galleries]
    return PageSection("Changed answers", [*parts, *(html.paragraph(note, "note") for note in notes)])
