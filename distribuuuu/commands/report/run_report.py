"""The report of one run: how it trained, which classes and images it gets wrong; thumbnails are data URIs."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu import __version__
from distribuuuu.checkpoint.weights_files import RAW, describe_kind
from distribuuuu.commands.html.history import History, draw_curves, read_facts, read_history, read_lines
from distribuuuu.commands.html.page import Macros, PageSection, build_page, percent
from distribuuuu.commands.report.confidence import describe_confidence, list_confidence
from distribuuuu.commands.report.explanations import find_nearest
from distribuuuu.commands.report.pictures import image_folder, make_pictures
from distribuuuu.commands.stats.finetuned import FineTuned, read_finetuned
from distribuuuu.commands.stats.stored_predictions import Predictions, list_figures, rank_mistakes, read_predictions
from distribuuuu.config import ConfigError, get_cfg
from distribuuuu.config.errors import counted
from distribuuuu.config.json_file import load_json
from distribuuuu.config.run_files import DECISIONS, METRICS, PREDICTIONS, RESULTS, TEST_RESULTS
from distribuuuu.files.untrusted import InvalidFileError, printable
from distribuuuu.inference.calibration import Calibration, CalibrationError
from distribuuuu.inference.load_run import find_run
from distribuuuu.records.evaluated_sets import list_predictions
from distribuuuu.records.metric_writers import format_duration

logger = logging.getLogger(__name__)

sections = Macros(Path(__file__).with_name("templates") / "sections.html")
# Rows of the list of confused pairs, and classes up to which there is a confusion matrix.
_NUM_PAIRS, _MAX_MATRIX = 20, 40


@dataclass
class RunFiles:
    """The files of a run.

    Attributes:
        content: its predictions of one evaluated set.
        facts: content of results.json or, if the predictions are of a later evaluation, of test_results.json.
        file: the file of the predictions; a run has one for each evaluated set.
        precision: the share of right answers that a threshold of the confidence is to promise.
    """

    out_dir: Path
    content: Predictions
    history: History
    facts: dict[str, Any]
    file: Path
    precision: float = 0.95

    @cached_property
    def calibration(self) -> Calibration | None:
        """The calibration of the weights that have made the predictions; None if they are not the best ones."""
        meta, kind = self.content.meta, self.content.meta.get("weights", RAW)
        best = self.history.results.get("accuracy", {}).get(kind, {}).get("best", {})
        if meta.get("epoch") not in (None, best.get("epoch")):
            return None
        try:
            run = find_run(self.out_dir)
        except CalibrationError:
            raise
        except ConfigError:  # e.g. the weights were deleted
            return None
        return run.calibration if run.weights == kind else None

    @cached_property
    def tuned(self) -> FineTuned | None:
        """The record of `finetune`; None unless the predictions are those of its test."""
        found = None if self.history.results or self.file.name != PREDICTIONS else read_finetuned(self.out_dir)
        return found if found and found.tested == len(self.content) else None

    @cached_property
    def evaluated(self) -> str:
        """The evaluated set, as text: its number of images, and where they are."""
        if self.tuned:
            return f"{counted(len(self.content), 'test image')} of {self.tuned.name}"
        where = self.content.meta.get("folder") or self.content.meta.get("data")
        return f"{counted(len(self.content), 'image')} of {where}"

    @cached_property
    def probed(self) -> dict[str, float]:
        """The top-1, in percent, of k-NN and the linear probe on the features of these images; empty: not measured."""
        try:
            content, meta = load_json(self.out_dir / "probe.json"), self.content.meta
            digests = {content.get("digest"), meta.get("digest")} - {None}  # of older files
            if len(digests) > 1 or content["num_test"] != len(self.content):  # another set was evaluated
                return {}
            return {name: float(content["top1"][name]) for name in ("k-NN", "linear probe")}
        except (ConfigError, TypeError, KeyError, ValueError):
            return {}

    def compare_probe(self) -> Iterator[str]:
        """Yield a sentence for each classifier of the features that is better than the model."""
        for name, value in self.probed.items() if "accuracy" in self.figures else ():
            if value > 100 * self.figures["accuracy"]:
                better = f"{name} on the features of the model is better than the model: {value:.2f} %"
                yield f"{better} against {percent(self.figures['accuracy'], 2)}; its head may need more training"

    @cached_property
    def figures(self) -> dict[str, Any]:
        """All figures of the report as plain values."""
        content, history = self.content, self.history
        confidence = {} if content.multilabel else list_confidence(content, self.calibration, self.precision)
        return {
            "run": self.out_dir.resolve().name,
            "predictions": content.meta,
            "probe": self.probed,
            "confidence": confidence,
            **list_figures(content),
            "curves": {"training": history.train, **history.evaluations},
            "results": self.facts,
        }


def read_run(run: str, predictions: str = "", precision: float = 0.95) -> RunFiles:
    """Return the files of a run with the given file of predictions, or with the last one; ConfigError: it has none."""
    out_dir = Path(run).expanduser()
    if not any((out_dir / name).exists() for name in (PREDICTIONS, RESULTS)):
        raise ConfigError(f"RUN: {run} has no {RESULTS}: no epoch of it has been evaluated yet")
    files = list_predictions(out_dir)
    latest = next(iter(files), out_dir / PREDICTIONS)
    file = out_dir / Path(predictions).name if predictions else latest
    content = read_predictions(file, f"distribuuuu test {run}, which makes it")
    history = read_history(out_dir)
    facts = history.results
    if content.meta.get("epoch") is None:
        facts = read_facts(out_dir / TEST_RESULTS, "evaluation", history.notes)
        if file != latest or facts.get("evaluation", {}).get("count") != len(content):
            facts = {}  # of another evaluation
    for note in history.notes:
        logger.warning("%s", printable(note))
    return RunFiles(out_dir, content, history, facts, file, precision)


def build_report(run: RunFiles) -> str:
    """Return the report as an HTML document."""
    content, found, facts = run.content, run.figures, run.facts
    mistakes, notes = rank_mistakes(content)[: len(found["mistakes"])], list[str]()
    try:
        nearest = find_nearest(run.out_dir, content, mistakes)
    except (InvalidFileError, OSError) as error:
        nearest, notes = {}, [f"The nearest training images are not shown: {error}"]
    for index, answer in zip(mistakes, found["mistakes"], strict=True):
        answer["nearest"] = nearest.get(index, [])
    paths = {index: [path for path, _ in nearest.get(index, [])] for index in mistakes}
    pictures, failed = make_pictures(run.out_dir, content, paths)
    notes += failed
    for note in notes:
        logger.warning("%s", printable(note))
    middle = [_describe_classes(found), PageSection("Images", [sections.images(found, pictures, notes)])]
    middle[:0] = [_describe_confusions(found)] if "confusions" in found else []
    middle[-1:-1] = [describe_confidence(found["confidence"])] if found["confidence"] else []
    weights = describe_kind(content.meta.get("weights", RAW))
    epoch = f"epoch {content.meta['epoch']}" if content.meta.get("epoch") else "a separate evaluation"
    arch = (facts or run.history.results or {"model": {"arch": "model"}})["model"]["arch"]
    subtitle = f"{arch} on {content.meta.get('data')}; {weights}, {epoch}; {run.evaluated}"
    if run.tuned:
        subtitle = f"{arch} on {run.tuned.name}; finetune: {run.tuned.kept}; {run.evaluated}"
    footer = f"distribuuuu {__version__}, from {run.file.name} and {DECISIONS if run.tuned else METRICS}"
    return build_page(found["run"], subtitle, [_summarize(run), *middle, _describe_provenance(run)], footer)


def describe_accuracy(run: RunFiles) -> Iterator[str]:
    """Yield the accuracy and two baselines, as lines: the most frequent class, and k-NN on the features."""
    name, value, detail = next(_list_tiles(run))
    yield f"{name}: {value} ({detail}; {run.evaluated})"
    if not run.content.multilabel:
        share = np.bincount(run.content.label).max() / len(run.content)
        yield f"baseline, the most frequent class: {percent(share, 2)}"
        probed = f"{run.probed['k-NN']:.2f} %" if run.probed else f"measured by distribuuuu probe {run.out_dir}"
        yield f"baseline, k-NN on the features of the model: {probed}"
        yield from run.compare_probe()
    if others := [path.name for path in list_predictions(run.out_dir) if path != run.file]:
        yield f"other evaluated sets (--predictions FILE): {', '.join(others)}"


def _summarize(run: RunFiles) -> PageSection:
    """Return the section of the main figures and the curves."""
    history = run.history
    curves, trained = draw_curves(history), history.results.get("data", {})
    about, missing = f"Figures: {run.evaluated}.", f"No curves: this folder has no {METRICS} of a training run."
    if run.tuned:
        about = f"Figures: {run.evaluated}, by which nothing was chosen."
        missing = f"Curves of the fine-tuning: distribuuuu report {run.out_dir}/finetune" if run.tuned.epochs else ""
    if curves and run.content.meta.get("epoch") is None:
        about += f" Curves: the training, which evaluated {counted(trained.get('num_val', 0), 'image')} of its own."
    notices = [*run.compare_probe(), *history.notes]
    return PageSection("Summary", [sections.summary(list(_list_tiles(run)), about, notices, curves, missing)])


def _list_tiles(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """Yield the name and the value of the main figures, and a detail; that of the accuracy is the first."""
    content, found, results = run.content, run.figures, run.history.results
    num, classes = counted(len(content), "image"), counted(len(content.classes), "class")
    if "map" in found:
        yield "mean average precision", percent(found["map"]), classes
    if "accuracy" in found:
        low, high = found["accuracy_interval"]
        yield "accuracy", percent(found["accuracy"], 2), f"95 % interval {100 * low:.2f} to {100 * high:.2f} %"
        if len(content.classes) > 5:
            yield "top-5 accuracy", percent(found["top5_accuracy"], 2), classes
        for kind, value in run.probed.items():
            yield kind, f"{value:.2f}\N{NO-BREAK SPACE}%", "on the features of the model"
        yield "mistakes", f"{(~content.correct).sum():,}", f"of {num}"
    yield "macro F1", percent(found["macro_f1"]), "mean of the classes"
    yield "loss", f"{found['loss']:.4f}", "cross-entropy"
    if results:
        training = results["training"]
        yield "time", format_duration(3600 * training["hours"]), counted(training["epochs_done"], "epoch")


def _describe_classes(found: dict[str, Any]) -> PageSection:
    """Return the section with a table of the classes."""
    rows = [[name, *figures.values()] for name, figures in found["classes"].items()]
    rows.sort(key=lambda row: (row[1] != row[1], row[1]))  # NaN last
    return PageSection("Classes", [sections.classes(rows, "map" in found)])


def _describe_confusions(found: dict[str, Any]) -> PageSection:
    """Return the section with the confusion matrix of few classes, and the most confused pairs."""
    support = {name: figures["support"] for name, figures in found["classes"].items()}
    counts = {(label, answer): count for label, answer, count in found["confusions"]}
    rows = [[counts.get((label, answer), 0) for answer in support] for label in support if len(support) <= _MAX_MATRIX]
    wrong = sorted((pair for pair in found["confusions"] if pair[0] != pair[1]), key=lambda pair: -pair[2])
    pairs = [[label, answer, count, count / support[label]] for label, answer, count in wrong[:_NUM_PAIRS]]
    return PageSection("Confusion", [sections.confusion(list(support), rows, pairs)])


def _describe_provenance(run: RunFiles) -> PageSection:
    """Return the section on the config and the origin of the run."""
    facts = run.facts or run.history.results
    data, mistakes = facts.get("data", {}), run.figures["mistakes"]
    entries = {
        "folder": run.out_dir.resolve(),
        "config": facts.get("config"),
        "license of the initial weights": facts["model"].get("license") if facts else "",
        "data": ", ".join(
            str(part)
            for part in (run.tuned.name if run.tuned else data.get("name"), run.content.meta.get("folder"))
            if part
        ),
        "pictures from": image_folder(run.content, [one[0] for each in mistakes for one in each.get("nearest", ())]),
        **{name: facts.get(name) for name in ("seed", "weights", "commit", "hardware")},
    }
    known = {name: value for name, value in entries.items() if value not in (None, "")}
    config = "\n".join(read_lines(run.out_dir / get_cfg().CFG_DEST, []))
    results = json.dumps(facts, indent=2, default=str)[:20_000] if facts else ""
    return PageSection("Provenance", [sections.provenance(known, config, results)])
