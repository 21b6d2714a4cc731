"""Probe of a backbone as a model: features of all images, a logistic regression as its head, and its baselines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distribuuuu.checkpoint.manager import write_atomically
from distribuuuu.checkpoint.weights_files import RAW, best_path
from distribuuuu.config import Config, ConfigError
from distribuuuu.config.config_node import changed, iter_options
from distribuuuu.config.derived import height_and_width
from distribuuuu.config.run_files import PROBE
from distribuuuu.data.seeding import derive_seed, seed_cpu
from distribuuuu.engine.build import build_initial_model, write_config
from distribuuuu.inference import linear_probe
from distribuuuu.inference.calibration import Calibration, fit_calibration, write_calibration
from distribuuuu.inference.features import find_classifiers
from distribuuuu.inference.linear_probe import compute_logits, predict_knn
from distribuuuu.inference.loaded_run import CPU, LoadedRun


class Part(NamedTuple):
    """Features (N, dim) and labels (N,) of images."""

    rows: Tensor
    labels: Tensor


class Probe(NamedTuple):
    """A fitted head and its answers.

    Attributes:
        weight, bias: of the linear layer, (classes, dim) and (classes,).
        penalty: by cross-validation on the training images.
        calibration: by the validation images.
        correct: right answers by method and part, e.g. {"probe": {"val": 150, "test": 320}}.
    """

    weight: Tensor
    bias: Tensor
    penalty: float
    calibration: Calibration
    correct: dict[str, dict[str, int]]

    def scaled(self) -> "Probe":
        """Return the head divided by its temperature, with which a fine-tuning starts."""
        scale = self.calibration.temperature
        return self._replace(weight=self.weight / scale, bias=self.bias / scale)


def open_backbone(cfg: Config, classes: Sequence[str], source: str) -> LoadedRun:
    """Return the model of a config with its initial weights and a random head; errors as for `find_head_layers`."""
    seed_cpu(derive_seed(cfg.RNG_SEED))
    model = build_initial_model(cfg, tuple(classes), pretrained=True)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    run = LoadedRun(source, RAW, cfg, tuple(classes), tensors, has_classifier=False)
    find_head_layers(run)
    return run


def fit_probe(parts: dict[str, Part], num_classes: int) -> Probe:
    """Fit the head to the training features and its calibration to the validation features; classify all others.

    The part `mirrored`, if there is one, has the mirror images of the training images.
    """
    views = [parts[name] for name in ("train", "mirrored") if name in parts]
    others = {name: part for name, part in parts.items() if name not in ("train", "mirrored")}
    train, nearest_of = Part(*(torch.cat(own) for own in zip(*views, strict=True))), parts["train"]
    torch.set_float32_matmul_precision("highest")
    folded, penalty = linear_probe.fit_probe(train.rows, train.labels, num_classes, CPU, len(views))
    logits = {name: compute_logits(part.rows, folded) for name, part in others.items()}
    correct: dict[str, dict[str, int]] = {"most frequent class": {}, "k-NN": {}, "probe": {}}
    frequent = train.labels.bincount().argmax()
    for name, part in others.items():
        nearest = predict_knn(nearest_of.rows, nearest_of.labels, part.rows, num_classes, CPU)
        answers = {"most frequent class": frequent, "k-NN": nearest, "probe": logits[name].argmax(1)}
        for method, answer in answers.items():
            correct[method][name] = int(part.labels.eq(answer).sum())
    folded, calibration = folded.float(), fit_calibration(logits["val"], others["val"].labels)
    return Probe(folded[:-1].T.contiguous(), folded[-1].clone(), penalty, calibration, correct)


def find_head_layers(run: LoadedRun) -> list[str]:
    """Return the names of the last layers of a run; ConfigError: one has no bias, or as `find_classifiers`."""
    size = height_and_width(run.transform.crop.size)
    layers = find_classifiers(run, torch.zeros(1, run.cfg.DATA.CHANNELS, *size, device=run.device))
    names = [name for name, layer in run.model.named_modules() if any(layer is one for one in layers)]
    if any(f"{name}.bias" not in (run.state_dict or {}) for name in names):
        raise ConfigError(f"--backbone: the last layer of {run.cfg.MODEL.ARCH} has no bias; fix: another backbone")
    return names


def set_head(run: LoadedRun, probe: Probe) -> dict[str, Tensor]:
    """Return the weights of a run with the head of its probe, which replaces its last layers."""
    tensors = dict(run.state_dict or {})
    for name in find_head_layers(run):
        shape = tensors[f"{name}.weight"].shape
        tensors |= {f"{name}.weight": probe.weight.reshape(shape), f"{name}.bias": probe.bias}
    return tensors


def write_probe(folder: Path, probe: Probe, run: LoadedRun) -> Path:
    """Write the head as the file that FINETUNE.HEAD names."""
    path = folder / PROBE
    tensors = {"weight": probe.weight, "bias": probe.bias}
    write_atomically(path, {"state_dict": tensors, "classes": list(run.classes), "arch": run.cfg.MODEL.ARCH})
    return path


def write_model(
    cfg: Config, out: Path, tensors: dict[str, Tensor], classes: Sequence[str], facts: dict[str, Any],
    calibration: Calibration,
) -> Config:  # fmt: skip
    """Write weights, their calibration and the config as a run; return that of its evaluation on the test images."""
    cfg = changed(cfg, {"OUT_DIR": str(out), "TEST.SPLIT": "test", "DATA.WORKER_KIND": "thread"})
    content = {"epoch": 0, "arch": cfg.MODEL.ARCH, "seed": cfg.RNG_SEED, "classes": list(classes),
               "config": dict(iter_options(cfg)), "weights": RAW, "finetune": facts, "state_dict": tensors}  # fmt: skip
    write_atomically(best_path(out), content)
    write_config(cfg)
    write_calibration(out, calibration, tensors)
    metrics = (*dict.fromkeys((*cfg.TEST.METRICS, "top1")),) if cfg.TEST.METRICS else ()  # the default, which has it
    return changed(cfg, {"MODEL.WEIGHTS": str(best_path(out)), "TEST.METRICS": metrics})
