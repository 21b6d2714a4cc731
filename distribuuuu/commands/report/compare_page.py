"""The page that compares runs, or groups of runs with several seeds."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from distribuuuu.commands.html.charts import line_chart
from distribuuuu.commands.html.history import MAX_TEXT, curve, list_curves, title_of
from distribuuuu.commands.html.page import Card, Column, PageSection, build_page, html
from distribuuuu.commands.report.comparison import (
    ALPHA,
    Group,
    GroupPair,
    Pair,
    accuracy_interval,
    compare_all,
    compare_groups,
    config_difference,
    describe_groups,
    describe_pair,
    format_p,
)
from distribuuuu.commands.report.pictures import Pictures, make_pictures
from distribuuuu.commands.report.run_report import RunFiles, read_run
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.config import ConfigError, yaml_file
from distribuuuu.config.errors import counted
from distribuuuu.config.options import OPTIONS
from distribuuuu.files.untrusted import read_regular
from distribuuuu.tasks.class_metrics import average_precisions

# Cards of each gallery, and rows of the table of classes.
_MAX_CARDS, _MAX_CLASSES = 24, 1000


def read_config(out_dir: Path) -> dict[str, Any]:
    """Return the options of a run by dotted key; empty if its config.yaml cannot be read."""
    try:
        content = yaml_file.load(read_regular(out_dir / "config.yaml", MAX_TEXT).decode("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return dict(_flatten(content)) if isinstance(content, dict) else {}


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
        groups: the comparison of every two sides by their runs; empty if each has one run.
        changes: options that differ between the sides; None: a config cannot be read.
    """

    sides: dict[str, list[RunFiles]]
    pairs: dict[tuple[str, str], Pair]
    groups: list[GroupPair]
    changes: dict[str, list[Any]] | None

    @property
    def metric(self) -> str:
        """Display name of the compared metric."""
        return "mAP" if next(iter(self.pairs.values())).metric == "map" else "top-1"

    def sentences(self) -> list[str]:
        """Return the results in words: of the groups, if there are any, else of the pairs."""
        if self.groups:
            return [describe_groups(group, self.metric) for group in self.groups]
        return [describe_pair(names, pair) for names, pair in self.pairs.items()]


def compare_runs(sides: Mapping[str, Sequence[Path]]) -> Comparison:
    """Return the comparison of two or more sides, each of one run or of several seeds.

    Raises:
        ConfigError: a run cannot be read, or the runs were evaluated on different images.
    """
    runs = {name: [read_run(str(folder)) for folder in folders] for name, folders in sides.items()}
    firsts = {name: members[0].content for name, members in runs.items()}
    if values := [name for name, content in firsts.items() if not content.classifies]:
        raise ConfigError(f"RUN: {values[0]} predicts values, not classes; fix: compare the metrics by `table`")
    pairs = compare_all(firsts)
    has_groups = any(len(members) > 1 for members in runs.values())
    groups = (
        compare_groups([Group(name, _values(members, pairs)) for name, members in runs.items()]) if has_groups else []
    )
    configs = {name: read_config(members[0].out_dir) for name, members in runs.items()}
    ignored = [key for key, option in OPTIONS.items() if not option.compared]
    given = {key: option.default for key, option in OPTIONS.items()}
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}  # as in YAML
    changes = config_difference(configs, ignored, defaults) if all(configs.values()) else None
    return Comparison(runs, pairs, groups, changes)


def _values(runs: Sequence[RunFiles], pairs: Mapping[tuple[str, str], Pair]) -> list[float]:
    """Return the metric of each run of a side in percent."""
    if next(iter(pairs.values())).metric == "top1":
        return [100 * float(run.content.correct.mean()) for run in runs]
    return [_mean_average_precision(run.content) for run in runs]


def _mean_average_precision(content: Predictions) -> float:
    scores = torch.from_numpy(np.ascontiguousarray(content.scores, dtype=np.float32))
    return 100 * float(average_precisions(scores, torch.from_numpy(content.label)).nanmean())


# ------------------------------------------------------------------------------------------ output


def list_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return the figures of a comparison as plain values, for JSON."""
    pairs = [
        {
            "a": names[0],
            "b": names[1],
            "metric": pair.metric,
            "values": list(pair.values),
            "difference": pair.difference,
            "interval": list(pair.interval),
            "only_a": len(pair.only_a),
            "only_b": len(pair.only_b),
            "p": _known(pair.p),
            "adjusted_p": _known(pair.adjusted_p),
            "significant": pair.is_significant,
            "sentence": describe_pair(names, pair),
        }
        for names, pair in comparison.pairs.items()
    ]
    groups = [
        {
            "a": group.a.name,
            "b": group.b.name,
            "values": [group.a.values, group.b.values],
            "p": group.p,
            "smallest_p": group.smallest_p,
            "sentence": describe_groups(group, comparison.metric),
        }
        for group in comparison.groups
    ]
    runs = {name: [str(run.out_dir) for run in members] for name, members in comparison.sides.items()}
    return {"runs": runs, "pairs": pairs, "groups": groups, "config": comparison.changes}


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def build_compare_page(comparison: Comparison) -> str:
    """Return the page as HTML."""
    sections = [
        _summary(comparison),
        _config_section(comparison),
        _curves(comparison),
        _classes(comparison),
        _changed_images(comparison),
    ]
    names = " and ".join(comparison.sides) if len(comparison.sides) == 2 else ", ".join(comparison.sides)
    num = len(next(iter(comparison.sides.values()))[0].content)
    subtitle = f"{counted(num, 'image')}, the same for every run"
    return build_page(f"Comparison of {names}", subtitle, [section for section in sections if section.parts])


def _summary(comparison: Comparison) -> PageSection:
    parts = [html.paragraph(sentence.replace(" -", " \N{MINUS SIGN}"), "lead") for sentence in comparison.sentences()]
    parts.append(html.tiles([_tile(name, members, comparison) for name, members in comparison.sides.items()]))
    if comparison.groups:
        note = "The tests of single runs on the same images do not include the differences between seeds."
        parts += [html.heading("The first run of each side"), html.paragraph(note, "note")]
        parts += [html.paragraph(describe_pair(names, pair)) for names, pair in comparison.pairs.items()]
    if comparison.metric == "top-1":
        columns = [
            Column("A"),
            Column("B"),
            *(Column(name, "d") for name in ("only A right", "only B right")),
            Column("B \N{MINUS SIGN} A, points", "+.2f", signed=True),
            Column("95 % low", "+.2f"),
            Column("95 % high", "+.2f"),
            Column("p"),
        ]
        rows = [[a, b, len(pair.only_a), len(pair.only_b), pair.difference, *pair.interval, format_p(pair.adjusted_p)]
                for (a, b), pair in comparison.pairs.items()]  # fmt: skip
        parts.append(html.table(columns, rows, sortable=False))
        adjusted = f", adjusted for {counted(len(rows), 'pair')} by Holm's method" if len(rows) > 1 else ""
        note = f"p: McNemar's exact test{adjusted}; significant below {ALPHA}. Interval: Newcombe's, by Wilson limits."
        parts.append(html.paragraph(note, "note"))
    return PageSection("Summary", parts)


def _tile(name: str, runs: Sequence[RunFiles], comparison: Comparison) -> tuple[str, str, str]:
    values = _values(runs, comparison.pairs)
    if len(values) > 1:
        group = Group(name, values)
        interval = group.interval
        detail = f"± {group.deviation:.2f} over {len(values)} runs"
        if interval:
            detail += f", 95 % interval of the mean {interval.low:.2f} to {interval.high:.2f}"
        return name, f"{group.mean:.2f} %", detail
    interval = accuracy_interval(runs[0].content)
    weights = f", {runs[0].content.meta.get('weights', 'raw')} weights"
    detail = f"95 % interval {interval.low:.2f} to {interval.high:.2f}{weights}" if interval else weights[2:]
    return name, f"{values[0]:.2f} %", f"{comparison.metric}, {detail}"


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


def _curves(comparison: Comparison) -> PageSection:
    """Return the section of the curves of all runs: of a side with several runs, the first one."""
    firsts = {name: members[0].history for name, members in comparison.sides.items()}

    def chart(title: str, key: str, kind: str) -> str:
        series = []
        for name, history in firsts.items():
            records = history.train if kind == "train" else history.evaluations.get(kind, [])
            series.append(curve(history, records, key, name, has_dots=kind != "train" and len(records) <= 40))
        return line_chart(title, [one for one in series if one.x], "epoch")

    metrics = dict.fromkeys(
        itertools.chain.from_iterable(list_curves(history.evaluations.get("eval", [])) for history in firsts.values())
    )
    charts = [chart("Training loss", "loss", "train"), chart("Validation loss", "loss", "eval")]
    charts += [chart(f"Validation {title_of(next(iter(firsts.values())), name)}", name, "eval") for name in metrics]
    charts += [chart("Learning rate", "lr", "train"), chart("Throughput in images/s", "images_per_s", "train")]
    drawn = [text for text in charts if text]
    return PageSection("Curves", [html.grid(drawn, "narrow")] if drawn else [])


def _classes(comparison: Comparison) -> PageSection:
    parts: list[str] = []
    classes = next(iter(comparison.sides.values()))[0].content.classes
    for names, pair in comparison.pairs.items():
        if len(comparison.pairs) > 1:
            parts.append(html.heading(f"{names[0]} and {names[1]}"))
        images, *figures = pair.by_class
        if pair.metric == "map":
            columns = [Column("class"), Column("images", "d"), *(Column(f"AP of {name}", ".2f") for name in names),
                       Column("difference", "+.2f", signed=True)]  # fmt: skip
            change = figures[1] - figures[0]
        else:
            columns = [Column("class"), Column("images", "d"), *(Column(f"only {name} right", "d") for name in names),
                       Column("difference in points", "+.2f", signed=True)]  # fmt: skip
            change = 100 * (figures[1] - figures[0]) / np.maximum(1, images)
        order = np.argsort(-np.nan_to_num(np.abs(change)), kind="stable")[:_MAX_CLASSES]
        rows = [[classes[k], int(images[k]), *(_cell(values[k], pair.metric) for values in figures), float(change[k])]
                for k in order]  # fmt: skip
        parts.append(html.table(columns, rows))
    return PageSection("Classes", parts)


def _cell(value: Any, metric: str) -> float | int:
    return float(value) if metric == "map" else int(value)


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
        first = runs[0].content
        targets = {int(index): int(first.predicted[index]) for index in np.concatenate(chosen)}
        pictures = make_pictures(runs[0].out_dir, first, targets, has_saliency=False)
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
    title, uris = f"label: {first.classes[first.label[index]]}", pictures.uris.get(index, ())
    return Card(title, lines, str(first.path[index]), uris, pictures.is_tiny)
