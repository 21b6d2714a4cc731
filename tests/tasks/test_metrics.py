"""Metrics and their accumulation, against naive implementations and torchmetrics; what a task logs."""

import itertools
import json

import numpy as np
import pytest
import torch
from support.processes import on_processes
from support.runs import records

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import TASKS
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import process_group
from distribuuuu.launch.detect import detect_launch
from distribuuuu.tasks.class_metrics import average_precisions
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.metrics import Mean, Meter, StepOutput, SumMetric, build_metrics, hard_labels, rank_classes
from distribuuuu.trainer import evaluate_weights, train_model

CPU = torch.device("cpu")


def classification_meter(topk: int, num_classes: int = 7) -> Meter:
    metrics = build_metrics("TEST.METRICS", ("top1", "topk"), num_classes, topk, multilabel=False)
    return Meter(metrics, num_classes, CPU)


def multilabel_meter(num_classes: int) -> Meter:
    metrics = build_metrics("TEST.METRICS", ("map",), num_classes, 1, multilabel=True)
    return Meter(metrics, num_classes, CPU)


def add(meter: Meter, loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
    """Add a batch like the classification tasks."""
    is_multilabel = bool(meter._score_metrics)
    targets = targets.ge(0.5).to(torch.uint8) if is_multilabel else hard_labels(targets)
    meter.update(StepOutput(loss, logits, targets))


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, 7, generator=generator)
    labels = torch.randint(0, 7, (size,), generator=generator)
    return torch.nn.functional.cross_entropy(logits, labels), logits, labels


def naive_metrics(batches) -> dict:
    """Compute the metrics in a loop over single images."""
    count = top1 = top3 = loss = 0
    for _, logits, labels in batches:
        for row, label in zip(logits, labels, strict=True):
            order = row.argsort(descending=True).tolist()
            count, top1, top3 = count + 1, top1 + (order[0] == label), top3 + (int(label) in order[:3])
            loss += float(torch.logsumexp(row, 0) - row[label])
    return {"count": count, "loss": loss / count, "top1": 100 * int(top1) / count, "topk": 100 * top3 / count}


@pytest.mark.parametrize("at_once", [1, 4, 64])
def test_batches_added_together_give_the_same_sums_to_the_last_bit(at_once, monkeypatch):
    monkeypatch.setattr("distribuuuu.tasks.metrics._MAX_PENDING", at_once)
    names = ("top1", "topk", "macro_recall", "macro_f1", "ece")
    metrics = build_metrics("TEST.METRICS", names, 7, 3, multilabel=False) | {"mean": Mean("extra")}
    meter, other = Meter(metrics, 7, CPU), Meter(metrics, 7, CPU)
    expected = torch.zeros_like(meter._sums)
    for number in range(37):
        loss, logits, labels = batch(1 + number % 11, number)
        output = StepOutput(loss * 10.0 ** (number % 9 - 4), logits, labels, {"extra": loss / 3})
        meter.update(output)
        other.update(output)
        parts = [torch.tensor([len(labels)]), output.loss.double() * len(labels)]
        parts += [metric.batch_sums(output).double() for metric in metrics.values()]
        expected += torch.cat([part.reshape(-1) for part in parts])
        if number in (2, 20):  # a checkpoint at any step changes nothing
            assert torch.equal(other.state_dict()["sums"], expected)
    for one in (meter, other):
        assert torch.equal(one.state_dict()["sums"], expected)
    assert meter.read() == other.read()


def with_sums(size: int, seed: int, **sums: float) -> StepOutput:
    return StepOutput(*batch(size, seed), {name: torch.tensor(value) for name, value in sums.items()})


def test_sums_that_no_metric_shows_are_means():
    metrics = build_metrics("TEST.METRICS", ("top1", "topk"), 7, 5, False) | {"mean": Mean("known")}
    meter = Meter(metrics, 7, CPU)
    with torch.inference_mode():  # as in an evaluation
        meter.update(with_sums(3, 0, known=3.0, top1=9.0, top5=9.0, mean=9.0, rate=6.0))
        meter.add_pending()
        meter.update(with_sums(1, 1, known=1.0, rate=1.0, late=2.0))
    first = meter.read()
    assert list(first) == ["count", "loss", "top1", "topk", "mean", "rate", "late"]
    assert (first["mean"], first["rate"], first["late"]) == (1.0, 7 / 4, 0.5)
    empty = meter.read()
    assert list(empty) == list(first) and np.isnan(empty["rate"])
    for name, value in (("loss", torch.zeros(())), ("rates", torch.zeros(3))):
        meter.update(StepOutput(*batch(3, 0), {name: value}))
        with pytest.raises(ConfigError, match=rf"StepOutput.sums: got '{name}', shape \({'3,' * value.dim()}\)"):
            meter.read()
        meter.load_state_dict([])


def scored(num: int, seed: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and targets (num, 4); few levels give many ties; the fourth class has no image."""
    random = np.random.default_rng(seed)
    scores = random.integers(-levels, levels, (num, 4)).astype(np.float32) / 8
    applies = random.random((num, 4)) < [0.1, 0.5, 0.9, 0.0]
    applies[0, :3] = True
    return scores, applies


SCORED = scored(41, 3, 10)


def read_sums() -> list[dict]:
    with process_group(detect_launch(), CPU, 60):
        meter, rank = classification_meter(3), dist.rank()
        labels, scores = classification_meter(3), multilabel_meter(4)
        for number in range(rank):
            add(labels, *batch(3 + number, 10 * rank + number))
        if rank:
            part = slice(0, 5) if rank == 1 else slice(5, None)
            logits, targets = (torch.from_numpy(array[part]) for array in SCORED)
            add(scores, torch.tensor(float(rank)), logits, targets.float())
        for number in range(rank):  # rank 0 has no images
            meter.update(with_sums(2, number, rate=float(rank), **({"second": 1.0} if rank == 2 else {})))
        rows = [meter.read()]
        meter.update(with_sums(1, rank, rate=1.0 + rank))
        states = dist.gather_objects(meter.state_dict())
        meter.load_state_dict(states if rank == 1 else [])  # one process continues for all
        return [*rows, meter.read(), labels.read(), scores.read()]


def test_processes_agree_on_names_reduce_sums_before_division_and_join_scores():
    batches = [batch(3 + number, 10 * rank + number) for rank in range(3) for number in range(rank)]
    meter, (scores, applies) = multilabel_meter(4), SCORED
    add(meter, torch.tensor((5 + 2 * 36) / 41), torch.from_numpy(scores), torch.from_numpy(applies).float())
    expected = meter.read()
    for first, second, of_labels, of_scores in on_processes(3, read_sums):
        assert of_labels == pytest.approx(naive_metrics(batches))
        assert of_scores == pytest.approx(expected) and of_scores["map"] == expected["map"]
        assert (first["count"], first["rate"], first["second"]) == (6, 5 / 6, 2 / 6)
        assert (second["count"], second["rate"], second["second"]) == (3, 2.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 7, 100])
def test_average_precision_is_that_of_scikit_learn(num, monkeypatch):
    average_precision_score = pytest.importorskip("sklearn.metrics").average_precision_score
    for seed, levels in itertools.product(range(5), (1, 4, 10**6)):
        scores, applies = scored(num, seed, levels)
        expected = [average_precision_score(applies[:, number], scores[:, number]) for number in range(3)]
        found = average_precisions(torch.from_numpy(scores), torch.from_numpy(applies))
        assert found[:3].tolist() == pytest.approx(expected, abs=1e-12) and found[3].isnan()
        with monkeypatch.context() as patch:
            patch.setattr("distribuuuu.tasks.class_metrics._MAX_SORTED", 2 * num)
            in_parts = average_precisions(torch.from_numpy(scores), torch.from_numpy(applies))
        assert torch.equal(in_parts.nan_to_num(), found.nan_to_num())


def test_a_saved_and_loaded_meter_reads_the_same():
    scores, applies = (torch.from_numpy(array).float() for array in scored(40, 3, 10))
    for make in (lambda: multilabel_meter(4), lambda: classification_meter(2, 4)):
        whole, before, after = make(), make(), make()
        for meter in (whole, before):
            meter._add_others({"rate": torch.tensor(1 / 3)})
        add(after, torch.tensor(7.0), scores, applies)  # replaced by what is loaded
        for meter, parts in ((whole, (0, 30, 40)), (before, (0, 30))):
            for start, end in zip(parts, parts[1:], strict=False):
                add(meter, torch.tensor(start / 7), scores[start:end], applies[start:end])
        after.load_state_dict([before.state_dict()])
        add(after, torch.tensor(30 / 7), scores[30:], applies[30:])
        assert after.read() == whole.read() and "rate" in before.read()
        after.load_state_dict([])
        assert after.read()["count"] == 0


def metric_value(name: str, logits: torch.Tensor, targets: torch.Tensor) -> float:
    num_classes, multilabel = logits.shape[1], targets.ndim == 2
    meter = Meter(build_metrics("TEST.METRICS", (name,), num_classes, 3, multilabel), num_classes, CPU)
    for part in (slice(0, 7), slice(7, 8), slice(8, None)):
        meter.update(StepOutput(torch.zeros(()), logits[part], targets[part]))
    return meter.read()[name]


# Of the images of seed 0, by torchmetrics.
RECORDED = {"top1": 20.0, "topk": 60.666668, "macro_recall": 20.086977, "macro_f1": 20.081601, "ece": 46.228921,
            "map": 21.583292}  # fmt: skip


def test_the_loss_may_select_the_best(small_cfg, tmp_path):
    train_model(small_cfg("TEST.METRICS", "[loss, top1]"))
    losses = [row["loss"] for row in records(tmp_path / "out") if row["kind"] == "eval"]
    found = json.loads((tmp_path / "out" / "results.json").read_text())["accuracy"]["raw"]
    assert found["best"]["loss"] == min(losses) and found["last"]["loss"] == losses[-1]


def test_metrics_of_one_label_match_torchmetrics():
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(300, 5, generator=draw) * 2, torch.randint(0, 5, (300,), generator=draw)
    for name, value in RECORDED.items():
        # Within a class, logits and softmax probabilities rank images differently; torchmetrics gets probabilities.
        scores = logits.softmax(1) if name == "map" else logits
        assert metric_value(name, scores, labels) == pytest.approx(value, abs=1e-4), name
    assert rank_classes(torch.tensor([[0.0, 0, 1, 0, 0, 0, 1]]), 5).tolist() == [[2, 6, 0, 1, 3]], "the first of equals"


def test_metrics_undefined_for_the_targets_are_rejected():
    with pytest.raises(ConfigError, match="TEST.METRICS: got top1, ece; .*several labels per image: .*macro_f1.*map"):
        build_metrics("TEST.METRICS", ("top1", "ece"), 4, 2, multilabel=True)


class Wrong(SumMetric):
    """A metric of a user: the number of images, with a mistake."""

    def batch_sums(self, output):
        return torch.ones(output.num_images)


class Late(SumMetric):
    """A metric of a user whose value is a tensor."""

    def batch_sums(self, output):
        return torch.ones(())

    def value(self, sums, count):
        return sums / count


def test_mistakes_in_a_metric_of_a_user_are_named_and_its_value_is_a_number():
    meter = Meter({"wrong": Wrong(7)}, 7, CPU)
    meter.update(StepOutput(*batch(3, 0)))
    with pytest.raises(ConfigError, match=r"Wrong.batch_sums: got shape \(3,\); expected \(\), its `shape`"):
        meter.read()
    meter = Meter({"late": Late(7)}, 7, CPU)
    meter.update(StepOutput(*batch(4, 0), {"rate": 2.0}))  # a float is a sum too
    read = meter.read()
    assert read["late"] == 0.25 and type(read["late"]) is float and read["rate"] == 0.5


BATCHES: list[torch.Tensor | None] = []


class Logging(Classification):
    """Logs the confidence of each image, and after an evaluation a random number and the first images."""

    def train_step(self, model, batch, key):
        return self.with_confidence(super().train_step(model, batch, key))

    def eval_step(self, model, batch):
        return self.with_confidence(super().eval_step(model, batch))

    def with_confidence(self, output):
        output.sums |= {"confidence": output.logits.float().softmax(1).amax(1).sum(), "top1": torch.zeros(())}
        return output

    def log_epoch(self, log, model, batch):
        assert not model.training and torch.is_inference_mode_enabled()
        BATCHES.append(batch)
        log.scalars({"fc_norm": model.fc.weight.norm(), "noise": torch.rand(())}, self.state.epoch)
        if batch is not None:
            log.images("first", batch.images.sigmoid(), self.state.epoch)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Register the task for the length of a test."""
    TASKS.get("distillation")  # imports the modules of the package, which register their entries once
    monkeypatch.setitem(TASKS._table, "logging", Logging)
    BATCHES.clear()


LOGGING = ("TASK.NAME", "logging")


def test_the_means_and_numbers_of_a_task_appear_everywhere(small_cfg, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    cfg, out = small_cfg(*LOGGING, "EMA.HALF_LIFE", 30, "LOG.TENSORBOARD", True), tmp_path / "out"
    train_model(cfg)
    rows = records(out)
    assert [row["kind"] for row in rows] == [*["train"] * 4, "eval", "eval_ema"] * 2
    assert all(1 / 3 < row["confidence"] < 1 and row["top1"] > 0 for row in rows)
    assert ["fc_norm" in row for row in rows] == [*[False] * 4, True, False] * 2
    last = json.loads((out / "results.json").read_text())["accuracy"]
    assert last["raw"]["last"]["confidence"] == rows[-2]["confidence"] and "confidence" in last["ema"]["best"]
    log = (out / "train.log").read_text()
    assert " confidence " in log and f" confidence {rows[-2]['confidence']:.4f} loss " in log
    evaluate_weights(cfg)
    assert json.loads((out / "test_results.json").read_text())["accuracy"]["ema"]["confidence"] == pytest.approx(
        rows[-1]["confidence"])  # fmt: skip
    assert f" confidence {rows[-1]['confidence']:.4f} loss " in (out / "test.log").read_text()
    read = events.EventAccumulator(str(out / "tensorboard"))
    read.Reload()
    assert {"train/confidence", "eval/confidence", "eval/fc_norm"} <= set(read.Tags()["scalars"])
    assert [image.step for image in read.Images("first")] == [4, 8]
    assert [len(batch.images) for batch in BATCHES] == [16, 16]
