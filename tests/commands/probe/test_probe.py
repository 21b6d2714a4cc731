"""The command probe: k-NN and the linear probe against scikit-learn, features against timm, whole runs, errors."""

import contextlib
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from support.images import draw_folder
from torch import nn

from distribuuuu.commands.main import start_command
from distribuuuu.commands.probe import feature_probe as probes
from distribuuuu.commands.stats.intervals import wilson_interval
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.inference import linear_probe
from distribuuuu.inference.features import find_classifiers, iter_features
from distribuuuu.inference.linear_probe import fit_linear, predict_knn, standardize
from distribuuuu.inference.load_run import find_run
from distribuuuu.models import build_model

CPU = torch.device("cpu")


def draw_features(num: int, dim: int, num_classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    centers = torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, num_classes, (num,), generator=random)
    return centers[labels] + 1.5 * torch.randn(num, dim, generator=random), labels


def run(*words) -> int:
    return start_command("probe", "distribuuuu probe", [*map(str, words), "TRAIN.WORKERS", "0"])


@pytest.mark.slow
def test_knn_equals_that_of_scikit_learn(monkeypatch):
    from sklearn.neighbors import KNeighborsClassifier  # its import takes seconds

    monkeypatch.setattr(linear_probe, "_QUERIES", 64)
    monkeypatch.setattr(linear_probe, "_NEIGHBORS", 190)  # the last block has fewer rows than there are neighbors
    (rows, labels), (queries, _) = draw_features(583, 24, 7, 1), draw_features(300, 24, 7, 2)
    rows, queries = (F.normalize(own, dim=1) for own in (rows, queries))
    reference = KNeighborsClassifier(20, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    expected = reference.fit(rows.numpy(), labels.numpy()).predict(queries.numpy())
    assert predict_knn(rows, labels, queries, 7, CPU).tolist() == expected.tolist()
    # Of fewer rows than neighbors, all vote.
    few = KNeighborsClassifier(5, metric="cosine", weights=reference.weights).fit(rows[:5].numpy(), labels[:5].numpy())
    assert predict_knn(rows[:5], labels[:5], queries, 7, CPU).tolist() == few.predict(queries.numpy()).tolist()


@pytest.mark.slow
def test_the_linear_probe_equals_the_logistic_regression_of_scikit_learn(monkeypatch, penalty=1e-3):
    from sklearn.linear_model import LogisticRegression

    monkeypatch.setattr(linear_probe, "_ROWS", 100)
    rows, labels = draw_features(450, 12, 4, 1)
    rows[:, 3] = 7.0  # a constant feature
    scale = (rows.std(0, correction=0) * rows.var(0, correction=0).mean().sqrt()).rsqrt()
    expected = (rows - rows.mean(0)) * scale.where(torch.arange(12) != 3, 0)
    standardize(rows)
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)

    is_kept = torch.arange(450) % 3 > 0
    start = torch.zeros(13, 4, dtype=torch.float64)
    weights = fit_linear(rows, labels, is_kept / is_kept.sum(), penalty, start)
    kept, targets = rows[is_kept].double().numpy(), labels[is_kept].numpy()
    reference = LogisticRegression(C=1 / (penalty * len(kept)), tol=1e-10, max_iter=10_000).fit(kept, targets)

    def loss(coefficients: torch.Tensor, biases: torch.Tensor) -> float:
        logits = torch.from_numpy(kept) @ coefficients + biases
        return float(F.cross_entropy(logits, labels[is_kept]) + penalty / 2 * coefficients.square().sum())

    theirs = torch.from_numpy(reference.coef_).T, torch.from_numpy(reference.intercept_)
    assert loss(weights[:-1], weights[-1]) == pytest.approx(loss(*theirs), abs=1e-9)
    torch.testing.assert_close(weights[:-1], theirs[0], atol=1e-4, rtol=1e-3)
    predicted = linear_probe.compute_logits(rows, weights).argmax(1)
    assert predicted.tolist() == reference.predict(rows.double().numpy()).tolist()


class Classified(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.source = model.eval(), "it"
        self.cfg = load_cfg(None, ["MODEL.ARCH", "resnet14"])
        self.task = SimpleNamespace(has_scores=True, adapt_model=lambda initial: model)


@pytest.mark.parametrize("name, options", [
    ("test_resnet", {}), ("test_convnext", {}), ("mobilenetv3_small_050", {}),
    ("deit_tiny_distilled_patch16_224", {"img_size": 32, "depth": 2}),
])  # fmt: skip
def test_features_are_those_that_timm_returns_for_pre_logits(name, options):
    model, inputs = timm.create_model(name, num_classes=5, **options), []
    images = torch.randn(2, 3, 32, 32)
    run = Classified(model)
    layers = find_classifiers(run, images[:1])
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.inference_mode():
        model(images)
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
    torch.testing.assert_close(torch.stack(inputs[: len(layers)]).mean(0), expected)


def test_a_whole_run(shapes_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(linear_probe, "PENALTIES", (0.1, 0.01))  # for speed
    folder = shutil.copytree(shapes_run, tmp_path / "run")
    assert run(folder, "TEST.BATCH_SIZE", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "64 features per image; 200 training and 70 evaluation images"
    assert [line[:12].strip() for line in lines[1:]] == ["classifier", "k-NN", "linear probe"]
    assert max(map(len, lines)) <= 80
    written = json.loads((folder / "probe.json").read_text())
    evaluated = json.loads((shapes_run / "test_results.json").read_text())["accuracy"]["raw"]["top1"]
    assert written["top1"]["classifier"] == pytest.approx(evaluated)
    for name, count in written["correct"].items():
        assert written["interval"][name] == pytest.approx([100 * end for end in wilson_interval(count, 70)])
    (folder / "probe.json").unlink()
    assert run(folder, "--format", "json", "TEST.BATCH_SIZE", 64, "--out", tmp_path / "x.json") == 0
    assert json.loads(capsys.readouterr().out) == written == json.loads((tmp_path / "x.json").read_text())
    assert not (folder / "probe.json").exists()


def test_probe_and_finetune_have_the_same_number(shapes_run):
    head = pytest.importorskip("distribuuuu.commands.finetune.head")
    run = find_run(shapes_run)
    probed = probes.probe_run(run)
    parts = {}
    for name, is_train in (("train", True), ("val", False), ("test", False)):
        images = probes.open_labeled_images(run, is_train)
        spans = probes.list_spans(len(images), probes.CHUNK)
        loader = probes.ChunkLoader(images, run.transform, spans, CPU, 64, 0, "thread")
        parts[name] = head.Part(*probes.extract_features(run.build(), loader)[:2])
    fitted = head.fit_probe(parts, 10)
    assert fitted.penalty == probed["penalty"] and fitted.correct["probe"]["test"] == probed["correct"]["linear probe"]
    assert fitted.correct["k-NN"]["test"] == probed["correct"]["k-NN"]


def test_images_of_other_classes_have_no_classifier(shapes_run, image_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(linear_probe, "PENALTIES", (0.1,))
    data = "TRAIN.DATASET", image_folder, "TEST.DATASET", image_folder, "TEST.FLIP", "True"
    results = []
    for most in (2**28, 100):  # features in float32, and in float16
        monkeypatch.setattr(probes, "_MAX_FLOAT32", most)
        assert run(shapes_run, *data, "--out", tmp_path / "x.json", "--format", "json") == 0
        results.append(json.loads(capsys.readouterr().out))
        assert list(results[-1]["top1"]) == ["k-NN", "linear probe"]
        assert (results[-1]["num_train"], results[-1]["num_test"]) == (48, 37)
    assert results[0]["correct"] == results[1]["correct"] != {"k-NN": 0, "linear probe": 0}


@pytest.mark.parametrize("reason", ["published without a head", "a task that does not classify"])
def test_answers_that_are_no_classes_are_not_counted(shapes_run, monkeypatch, reason):
    monkeypatch.setattr(linear_probe, "PENALTIES", (0.1,))
    run = replace(find_run(shapes_run), has_classifier=reason != "published without a head")
    run.task.classifies = reason != "a task that does not classify"
    assert list(probes.probe_run(run)["top1"]) == ["k-NN", "linear probe"]


class Heads(nn.Module):
    """A network with a head for each of two label sets, or with another output than that of its last linear layer."""

    def __init__(self, backbone, is_dict):
        super().__init__()
        self.one, self.other, self.is_dict = nn.Linear(64, 3), nn.Linear(64, 2), is_dict
        self.backbone, backbone.fc = backbone, nn.Identity()

    def forward(self, images):
        features = self.backbone(images)
        one, other = self.one(features), self.other(features)
        return {"one": one, "other": other} if self.is_dict else one.cumsum(1)


@pytest.mark.parametrize("is_dict", [True, False])
def test_the_features_are_the_input_of_the_head_that_a_task_has_added(is_dict):
    cfg = load_cfg(None, ["MODEL.ARCH", "resnet8", "MODEL.NUM_CLASSES", "3"])
    task = SimpleNamespace(has_scores=True, adapt_model=lambda model: Heads(model, is_dict))
    run = SimpleNamespace(cfg=cfg, task=task, model=task.adapt_model(build_model(cfg)))
    assert find_classifiers(run, torch.zeros(1, 3, 16, 16)) == [run.model.one]


def test_a_convolution_whose_output_is_averaged_has_the_mean_of_its_input_as_features():
    cfg = load_cfg(None, ["MODEL.ARCH", "torchvision/squeezenet1_1", "MODEL.NUM_CLASSES", "3"])
    task = SimpleNamespace(has_scores=True, adapt_model=lambda model: model, autocast=contextlib.nullcontext)
    run = SimpleNamespace(cfg=cfg, task=task, model=build_model(cfg).eval(), has_classifier=False, device=CPU)
    images = torch.randn(2, 3, 64, 64)
    loader = SimpleNamespace(zero_images=lambda num: images[:num], chunks=lambda: iter([(range(2), images, {})]))
    ((_, features, _, _),) = iter_features(run, loader)
    torch.testing.assert_close(features, run.model.features(images).mean((2, 3)))
    with pytest.raises(ConfigError, match="does not end with a linear layer"):
        find_classifiers(run, images)
    run.model = timm.create_model("crossvit_tiny_240", num_classes=3).eval()
    with pytest.raises(ConfigError, match="has heads of different widths; fix: another model"):
        find_classifiers(run, torch.randn(1, 3, 240, 240))


def break_an_image(folder, data):
    (data / "train" / "ant" / "000.jpg").write_bytes(b"no image")


@pytest.mark.parametrize("damage, words, message", [
    (None, ("TRAIN.DATASET", "/no/such"), r"TRAIN.DATASET \(command line\): no such folder: /no/such"),
    (None, ("--out", "/no/such/x.json"), "--out: no such folder: /no/such"),
    (break_an_image, ("DATA",), r"broken image: .*000.jpg: .*; fix: repair or remove it"),
])  # fmt: skip
def test_errors_have_a_message_and_status_2(shapes_run, tmp_path, capsys, damage, words, message):
    folder = shutil.copytree(shapes_run, tmp_path / "run")
    for split, num in (("train", 4), ("val", 1)):
        draw_folder(tmp_path / "data", split, {"ant": num, "bee": num})
    if damage:
        damage(folder, tmp_path / "data")
    data = ("TRAIN.DATASET", tmp_path / "data", "TEST.DATASET", tmp_path / "data")
    assert run(folder, *(data if words == ("DATA",) else words)) == 2
    printed = capsys.readouterr().err
    assert re.search(message, printed) and "Traceback" not in printed
    assert not (folder / "probe.json").exists()
