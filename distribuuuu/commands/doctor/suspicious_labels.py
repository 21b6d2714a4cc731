"""Labels that disagree with the features of a trained model, by confident learning."""

from collections.abc import Mapping

import torch
from torch import Tensor

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.inference.features import CHUNK, iter_features
from distribuuuu.inference.forward_chunks import ChunkLoader, list_spans
from distribuuuu.inference.linear_probe import NUM_FOLDS, compute_logits, fit_cross_validated, fit_linear, standardize
from distribuuuu.inference.load_run import load_run
from distribuuuu.inference.loaded_run import CPU


def find_suspicious_labels(model: str, splits: Mapping[str, ImageDataset], workers: int) -> dict[int, str]:
    """Return what the features of a model (RUN of `load_run`) say of images with a suspicious label, by index.

    The index counts over all splits. A ConfigError is raised if the model has no features, or images several labels.
    """
    if any(images.targets != "label" for images in splits.values()):
        raise ConfigError("--model: got images with several labels or targets; expected one label each")
    run = load_run(model)
    classes = list(dict.fromkeys(name for images in splits.values() for name in images.classes))
    parts, labels, indices, first = list[Tensor](), list[int](), list[int](), 0
    for images in splits.values():
        spans = list_spans(len(images), CHUNK)
        loader = ChunkLoader(images, run.transform, spans, run.device, CHUNK, workers, "thread")
        for span, features, _, causes in iter_features(run, loader):
            kept = [index for index in span if index not in causes]
            parts.append(features[[index - span.start for index in kept]])
            labels += [classes.index(images.classes[int(images.label(index))]) for index in kept]
            indices += [first + index for index in kept]
        first += len(images)
    ranked = rank_suspicious(torch.cat(parts), torch.tensor(labels), len(classes)) if labels else []
    return {indices[place]: f"label {classes[labels[place]]}; features: {classes[other]} ({probability:.0%})"
            for place, other, probability in ranked}  # fmt: skip


def rank_suspicious(rows: Tensor, labels: Tensor, num_classes: int) -> list[tuple[int, int, float]]:
    """Return the rows with a suspicious label, the worst one first, and another class with its probability.

    A linear classifier of the features (N, dim) gives each row the probabilities of its class by the other four fifths
    of the rows. A label is suspicious if another class has at least the mean probability of this class on rows with its
    label; the least probable label is the worst (Northcutt et al., "Confident Learning", arXiv 1911.00068).
    """
    standardize(rows)
    start, penalty = fit_cross_validated(rows, labels, num_classes, CPU)
    zeros = torch.zeros_like(start, dtype=torch.float32)
    folds = torch.empty_like(labels)
    folds[labels.argsort(stable=True)] = torch.arange(len(labels)) % NUM_FOLDS
    probabilities = torch.zeros(len(labels), num_classes, dtype=torch.float64)
    for fold in range(NUM_FOLDS):
        weights = fit_linear(rows, labels, (folds != fold) / (folds != fold).sum(), penalty, zeros)
        probabilities[folds == fold] = compute_logits(rows[folds == fold], weights).double().softmax(1)
    own = probabilities.gather(1, labels[:, None])[:, 0]
    sums = torch.zeros(num_classes, dtype=torch.float64).scatter_add_(0, labels, own)
    least = sums / labels.bincount(minlength=num_classes).clamp(min=1)
    likely, others = probabilities.where(probabilities >= least, 0.0).max(dim=1)
    suspicious = (likely > 0) & others.ne(labels)
    return [(place, int(others[place]), float(likely[place]))
            for place in own.argsort(stable=True).tolist() if suspicious[place]]  # fmt: skip
