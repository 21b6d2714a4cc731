"""The report of one run: what it was, how it trained, and which classes and images it gets wrong."""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu import __version__
from distribuuuu.checkpoint.weights_files import KINDS, RAW
from distribuuuu.commands.html.history import (
    History,
    draw_curves,
    read_facts,
    read_history,
    read_lines,
)
from distribuuuu.commands.html.page import Card, Column, PageSection, build_page, html, percent
from distribuuuu.commands.report import prediction_figures as analysis
from distribuuuu.commands.report.pictures import Pictures, image_folder, make_pictures
from distribuuuu.commands.stats.significance import wilson_interval
from distribuuuu.commands.stats.stored_predictions import Predictions, read_predictions
from distribuuuu.config import ConfigError, get_cfg
from distribuuuu.config.errors import counted
from distribuuuu.config.json_file import load_json
from distribuuuu.config.run_files import RESULTS
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.files.untrusted import printable
from distribuuuu.records.metric_writers import format_duration
from distribuuuu.records.predictions import FILE_NAME
from distribuuuu.records.read_results import TEST_FILE_NAME

logger = logging.getLogger(__name__)

# Mistakes and uncertain images in the galleries, and rows of the lists of confused pairs.
_NUM_MISTAKES, _NUM_UNCERTAIN, _NUM_PAIRS = 16, 8, 20
# Classes up to which there is a confusion matrix; rows of the errors of a task that does not classify.
_MAX_MATRIX, _NUM_VALUES = 40, 50


@dataclass
class RunFiles:
    """The files of a run.

    Attributes:
        out_dir: its folder.
        content: its predictions.
        history: its records.
        facts: content of results.json or, if the predictions are of a later evaluation, of test_results.json.
    """

    out_dir: Path
    content: Predictions
    history: History
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.out_dir.resolve().name


def read_run(run: str) -> RunFiles:
    """Return the files of a run.

    Raises:
        ConfigError: it is no folder, or has no predictions.
    """
    out_dir = Path(run).expanduser()
    if not out_dir.is_dir():
        raise ConfigError(f"RUN: no such folder: {run}; expected the OUT_DIR of a run")
    if not any((out_dir / name).exists() for name in (FILE_NAME, RESULTS)):
        raise ConfigError(f"RUN: {run} has no {RESULTS}: no epoch of it has been evaluated yet")
    content = read_predictions(out_dir / FILE_NAME, f"distribuuuu test {run}, which makes it")
    if not len(content):
        raise ConfigError(f"RUN: {out_dir / FILE_NAME} holds no image; fix: evaluate a data set with images")
    history = read_history(out_dir)
    facts = history.results
    if content.meta.get("epoch") is None:
        facts = read_facts(out_dir / TEST_FILE_NAME, "evaluation", history.notes)
    for note in history.notes:
        logger.warning("%s", printable(note))
    return RunFiles(out_dir, content, history, facts)


def build_report(run: RunFiles) -> str:
    """Return the report as an HTML document."""
    content = run.content
    if content.classifies:
        pictures = make_pictures(run.out_dir, content, [*rank_uncertain(content), *rank_mistakes(content)])
        for note in pictures.notes:
            logger.warning("%s", printable(note))
        sections = [summarize(run), describe_classes(content), describe_images(content, pictures)]
        if not content.multilabel:
            sections[1:1] = [describe_confusions(content)]
    else:
        sections = [summarize(run), describe_values(content)]
    sections.append(describe_provenance(run))
    kind = KINDS.get(content.meta.get("weights", RAW), KINDS[RAW])
    weights = f"{kind.average} of the weights" if kind.average else "trained weights"
    epoch = f"epoch {content.meta['epoch']}" if content.meta.get("epoch") else "a separate evaluation"
    arch = run.facts["model"]["arch"] if run.facts else "model"
    subtitle = f"{arch} on {content.meta.get('data')}; {weights}, {epoch}; {counted(len(content), 'image')}"
    return build_page(run.name, subtitle, sections, f"distribuuuu {__version__}, from {FILE_NAME} and metrics.jsonl")


def list_report(run: RunFiles) -> dict[str, Any]:
    """Return the figures of the report as plain values."""
    history, content = run.history, run.content
    if content.classifies:
        mistakes, uncertain = rank_mistakes(content), rank_uncertain(content)
        figures = analysis.list_figures(content) | {
            "mistakes": [describe_answer(content, index) for index in mistakes],
            "least_certain": [describe_answer(content, index) for index in uncertain],
        }
    else:
        figures = {**dict(list_value_figures(content, run.facts)), "values": list_values(content)}
    return {
        "run": run.name,
        "predictions": content.meta,
        **figures,
        "curves": {"training": history.train, **history.evaluations},
        "restarts": history.restarts,
        "rollbacks": history.rollbacks,
        "results": run.facts,
    }


def describe_accuracy(run: RunFiles) -> Iterator[str]:
    """Yield the accuracy and two baselines, as lines: the most frequent class, and k-NN on the features."""
    content = run.content
    for name, value, detail in list(_main_figures(content))[:1]:
        yield f"{name}: {value} ({detail}; {counted(len(content), 'image')})"
    if not content.multilabel:
        share = np.bincount(content.label).max() / len(content)
        yield f"baseline, the most frequent class: {percent(share, 2)}"
        yield f"baseline, k-NN on the features of the model: {_find_knn(run)}"


def _find_knn(run: RunFiles) -> str:
    with contextlib.suppress(ConfigError, TypeError, KeyError, ValueError):
        found = load_json(run.out_dir / "probe.json")
        return percent(float(found["top1"]["k-NN"]) / 100, 2)
    return f"measured by distribuuuu probe {run.out_dir}"


def list_mistakes(content: Predictions) -> str:
    """Return the images with a wrong answer as CSV, the most confident mistakes first."""
    lines = [csv_line(["path", "labels", "predicted", "probability", "loss"])]
    for index in rank_mistakes(content, len(content)):
        answer = describe_answer(content, index)
        label, probability = next(iter(answer["predicted"].items()))
        cells = [answer["image"], ";".join(answer["labels"]), label, f"{probability:.6g}", f"{answer['loss']:.6g}"]
        lines.append(csv_line(cells))
    return "".join(lines)


# ------------------------------------------------------------------------------------- summary


def summarize(run: RunFiles) -> PageSection:
    """Return the section of the main figures and the curves."""
    content, history = run.content, run.history
    entries = list(_main_figures(content)) if content.classifies else [
        (name, f"{value:.4g}", "") for name, value in list_value_figures(content, run.facts)]  # fmt: skip
    if history.results:
        training, starts = history.results["training"], counted(len(history.restarts) + 1, "start")
        epochs = counted(training["epochs_done"], "epoch")
        entries.append(("time", format_duration(3600 * training["hours"]), f"{epochs}, {starts}"))
    curves = draw_curves({"": history})
    missing = html.paragraph("No curves: this folder has no metrics.jsonl of a training run.", "note")
    notes = (html.paragraph(note, "notice") for note in history.notes)
    return PageSection("Summary", [html.tiles(entries), *notes, curves or missing])


def _main_figures(content: Predictions) -> Iterator[tuple[str, str, str]]:
    num, classes = len(content), counted(len(content.classes), "class")
    if content.multilabel:
        has_all = content.top_class is None
        precisions = analysis.average_precision(content) if has_all else np.empty(0)
        yield "mean average precision", percent(analysis.mean_of_known(precisions)), classes
    else:
        num_correct = int(content.correct.sum())
        low, high = wilson_interval(num_correct, num)
        yield "accuracy", percent(num_correct / num, 2), f"95 % interval {100 * low:.2f} to {100 * high:.2f} %"
        if len(content.classes) > 5:
            yield "top-5 accuracy", percent(analysis.top5_accuracy(content), 2), classes
        yield "mistakes", f"{num - num_correct:,}", f"of {counted(num, 'image')}"
    f1 = analysis.compute_class_figures(content)["f1"]
    yield "macro F1", percent(analysis.mean_of_known(f1)), "mean of the classes"
    yield "loss", f"{content.loss.mean():.4f}", "cross-entropy"


# ------------------------------------------------------------------------------------- classes


def describe_classes(content: Predictions) -> PageSection:
    """Return the section with a table of the classes."""
    figures = analysis.compute_class_figures(content)
    # With soft hyphens, at which narrow displays break the heads.
    columns = [Column("class"), Column("F1", ".1%", bar=True), Column("preci\u00adsion", ".1%"),
               Column("recall", ".1%"), Column("images", ",d"), Column("pre\u00addicted", ",d")]  # fmt: skip
    values, parts = [content.classes, *(column.tolist() for column in figures.values())], []
    if content.multilabel and content.top_class is None:
        columns.append(Column("average precision", ".1%"))
        values.append(analysis.average_precision(content).tolist())
        parts.append(html.paragraph("Precision, recall and F1 are those of labels with a probability above 0.5."))
    rows = list(zip(*values, strict=True))
    order = np.argsort(figures["f1"], kind="stable")  # NaN last
    parts.append(html.table(columns, [rows[number] for number in order], ascending_by="F1"))
    return PageSection("Classes", parts)


def describe_confusions(content: Predictions) -> PageSection:
    """Return the section with the confusion matrix of few classes, and the most confused pairs."""
    names, support = content.classes, np.bincount(content.label, minlength=len(content.classes))
    confusions, charts = analysis.list_confusions(content), []
    if len(names) <= _MAX_MATRIX:
        counts = np.zeros((len(names), len(names)), np.int64)
        for row, column, count in confusions:
            counts[row, column] = count
        shares = counts / np.maximum(1, support[:, None])
        charts = [html.heading("Confusion matrix"), html.matrix(names, counts.tolist(), shares.tolist()),
                  html.paragraph("Hold the pointer over a cell for its share of the row.", "note")]  # fmt: skip
    wrong = sorted((pair for pair in confusions if pair[0] != pair[1]), key=lambda pair: -pair[2])[:_NUM_PAIRS]
    columns = [Column("label"), Column("prediction"), Column("images", ",d"), Column("of the label", ".1%", bar=True)]
    rows = [[names[row], names[column], count, count / int(support[row])] for row, column, count in wrong]
    pairs = html.table(columns, rows, sortable=False) if rows else html.paragraph("There is no mistake.")
    return PageSection("Confusion", [*charts, html.heading("Most confused pairs"), pairs])


# -------------------------------------------------------------------------------------- images


def rank_mistakes(content: Predictions, num: int = _NUM_MISTAKES) -> list[int]:
    """Return the images with the most confident mistakes, the most confident first."""
    if content.multilabel:
        errors = (
            np.abs(content.probabilities() - content.label).max(axis=1) if content.top_class is None else content.loss
        )
        return [int(index) for index in np.argsort(-errors, kind="stable")[:num] if errors[index] > 0.5]
    wrong = np.flatnonzero(~content.correct)
    return wrong[np.argsort(-content.confidence[wrong], kind="stable")][:num].tolist()


def rank_uncertain(content: Predictions) -> list[int]:
    """Return the least certain images, the least certain first: with several labels, those with one near 0.5."""
    certainty = np.abs(content.probabilities() - 0.5).min(axis=1) if content.multilabel else content.confidence
    return np.argsort(certainty, kind="stable")[:_NUM_UNCERTAIN].tolist()


def describe_answer(content: Predictions, index: int) -> dict[str, Any]:
    """Return the file, the labels and the most probable classes of an image."""
    probabilities = content.probabilities(slice(index, index + 1))[0]
    order = np.argsort(-probabilities, kind="stable")[:3]
    numbers = order if content.top_class is None else content.top_class[index, order]
    labels = np.flatnonzero(content.label[index]) if content.multilabel else [content.label[index]]
    return {
        "image": str(content.path[index]),
        "labels": [content.classes[number] for number in labels],
        "predicted": {
            content.classes[number]: float(probabilities[at]) for number, at in zip(numbers, order, strict=True)
        },
        "loss": float(content.loss[index]),
    }


def _card(content: Predictions, index: int, pictures: Pictures) -> Card:
    answer = describe_answer(content, index)
    # In parentheses: a class may be called 2.
    texts = [f"{name} ({percent(share)})" for name, share in answer["predicted"].items()]
    title, lines = f"predicted: {texts[0]}", [f"label: {', '.join(answer['labels']) or 'none'}"]
    if content.multilabel and content.top_class is None:  # shown for the class with the most error
        probabilities = content.probabilities(slice(index, index + 1))[0]
        focus = int(np.abs(probabilities - content.label[index]).argmax())
        title = f"{content.classes[focus]} ({percent(probabilities[focus])})"
        lines.append(f"predicted: {', '.join(texts)}")
    elif len(texts) > 1:
        lines.append(f"then {', '.join(texts[1:])}")
    return Card(title, lines, answer["image"], pictures.uris.get(index), pictures.is_tiny)


def describe_images(content: Predictions, pictures: Pictures) -> PageSection:
    """Return the section with the galleries."""
    mistakes, uncertain = rank_mistakes(content), rank_uncertain(content)
    note = "Wrong labels often appear here first." if mistakes else "There is no mistake."
    parts = [*(html.paragraph(text, "notice") for text in pictures.notes), html.heading("Most confident mistakes"),
             html.paragraph(note, "note"),
             html.gallery([_card(content, index, pictures) for index in mistakes]),
             html.heading("Least certain images"),
             html.gallery([_card(content, index, pictures) for index in uncertain])]  # fmt: skip
    return PageSection("Images", parts)


# ------------------------------------------------------------------- tasks that do not classify


def find_errors(content: Predictions) -> np.ndarray | None:
    """Return the mean absolute difference of scores and targets of each image; None if they are not comparable."""
    targets = content.label.reshape(len(content), -1)
    return np.abs(content.scores - targets).mean(axis=1) if targets.shape == content.scores.shape else None


def list_value_figures(content: Predictions, facts: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric of the evaluation, and the mean absolute error if there is one."""
    accuracy = facts.get("accuracy", {}).get(content.meta.get("weights", "raw"), {})
    for name, value in accuracy.get("last", accuracy).items():
        if name != "epoch" and isinstance(value, (int, float)):
            yield name, value
    if (errors := find_errors(content)) is not None:
        yield "mean absolute error", float(errors.mean())


def list_values(content: Predictions) -> list[dict[str, Any]]:
    """Return the images with the largest errors: path, target and scores; without errors, the first images."""
    errors = find_errors(content)
    order = range(len(content)) if errors is None else np.argsort(-errors, kind="stable")
    return [
        {"path": str(content.path[row]), "target": content.label[row].tolist(), "score": content.scores[row].tolist()}
        for row in order[:_NUM_VALUES]
    ]


def describe_values(content: Predictions) -> PageSection:
    """Return the section with the table of `list_values`."""

    def show(value: Any) -> str:
        return " ".join(f"{part:.4g}" for part in np.ravel(value)[:8])

    columns = [Column("image"), Column("target"), Column(", ".join(content.classes[:8]))]
    rows = [[row["path"], show(row["target"]), show(row["score"])] for row in list_values(content)]
    return PageSection("Images with the largest errors", [html.table(columns, rows)])


# ----------------------------------------------------------------------------------- provenance


def describe_provenance(run: RunFiles) -> PageSection:
    """Return the section on the config and the origin of the run."""
    facts = run.facts or run.history.results
    data = facts.get("data", {})
    entries = {
        "folder": run.out_dir.resolve(),
        "config": facts.get("config"),
        "changed on the command line": ", ".join(f"{key} {value}" for key, value in facts.get("overrides", {}).items()),
        "model": "{arch}, {params_m:.3f} M parameters".format(**facts["model"]) if facts else "",
        "data": ", ".join(str(part) for part in (data.get("name"), run.content.meta.get("folder")) if part),
        "pictures from": image_folder(run.content),
        **{name: facts.get(name) for name in ("seed", "weights", "commit", "hardware")},
        "versions": ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items() if version),
    }
    parts = [html.pairs({name: value for name, value in entries.items() if value not in (None, "")})]
    if config := read_lines(run.out_dir / get_cfg().CFG_DEST, []):
        parts.append(html.details("All options", html.preformatted("\n".join(config))))
    if facts:
        parts.append(html.details("All results", html.preformatted(json.dumps(facts, indent=2, default=str)[:20_000])))
    return PageSection("Provenance", parts)
