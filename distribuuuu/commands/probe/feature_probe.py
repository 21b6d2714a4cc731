"""Quality of the features of a trained model: k-nearest neighbors and a linear probe, without training the model."""

from typing import Any

import torch
from torch import Tensor

from distribuuuu.commands.scan.data_config import open_images
from distribuuuu.commands.stats.intervals import wilson_interval
from distribuuuu.config import ConfigError
from distribuuuu.data.batch import as_targets
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.loader import count_workers
from distribuuuu.inference.features import CHUNK, has_classifier, iter_features
from distribuuuu.inference.forward_chunks import ChunkLoader, list_spans
from distribuuuu.inference.linear_probe import NUM_NEIGHBORS, TEMPERATURE, compute_logits, fit_probe, predict_knn
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.launch.detect import detect_launch
from distribuuuu.records.run_log import progress

_MAX_FLOAT32 = 2**28  # more values of features are kept in float16


def probe_run(run: LoadedRun) -> dict[str, Any]:
    """Return the content of probe.json: top-1 in percent of the classifier, of k-NN and of a linear probe.

    Raises:
        ConfigError: the data cannot be read or has several labels per image, or the model has no features.
    """
    sets = [open_labeled_images(run, train) for train in (True, False)]
    sizes = CHUNK, count_workers(run.cfg.TRAIN.WORKERS, detect_launch()), run.cfg.DATA.WORKER_KIND
    loaders = [ChunkLoader(own, run.transform, list_spans(len(own), CHUNK), run.device, *sizes) for own in sets]
    run.build()  # after the workers have been forked: the model may be on a GPU
    torch.set_float32_matmul_precision("highest")
    (rows, labels, _), (test_rows, test_labels, num_right) = (extract_features(run, loader) for loader in loaders)
    classes, num = tuple(sets[0].classes), len(test_labels)
    counts = {"classifier": num_right} if has_classifier(run) and classes == run.classes else {}
    counts["k-NN"] = int(predict_knn(rows, labels, test_rows, len(classes), run.device).eq(test_labels).sum())
    weights, penalty = fit_probe(rows, labels, len(classes), run.device)
    counts["linear probe"] = int(compute_logits(test_rows, weights).argmax(1).eq(test_labels).sum())
    return {
        "source": run.source, "weights": run.weights, "arch": run.cfg.MODEL.ARCH, "features": rows.shape[1],
        "classes": len(classes), "num_train": len(rows), "num_test": num, "digest": sets[1].digest, "k": NUM_NEIGHBORS,
        "temperature": TEMPERATURE, "penalty": penalty, "correct": counts,
        "top1": {name: 100 * count / num for name, count in counts.items()},
        "interval": {name: [100 * end for end in wilson_interval(count, num)] for name, count in counts.items()},
        "amp": run.cfg.TRAIN.AMP, "channels_last": run.cfg.MODEL.CHANNELS_LAST,
    }  # fmt: skip


def open_labeled_images(run: LoadedRun, train: bool) -> ImageDataset:
    """Return the training or the evaluation set of a run; its classes may be others than those of the model."""
    try:
        images = open_images(run.cfg, train)
    except ConfigError as error:
        fix = "the probe needs these images; fix: add TRAIN.DATASET FOLDER TEST.DATASET FOLDER"
        raise ConfigError([*error.problems, fix]) from error
    if images.targets != "label" or not len(images):
        raise ConfigError(f"DATA.NAME: got {run.cfg.DATA.NAME}; expected images with one label each")
    return images


def extract_features(run: LoadedRun, loader: ChunkLoader) -> tuple[Tensor, Tensor, int]:
    """Return features (N, dim) on the CPU, labels (N,) and the number of right answers of the classifier.

    Raises:
        ConfigError: an image is broken, or as `iter_features`.
    """
    images, num_right, rows = loader.images, 0, torch.empty(0)
    labels = as_targets([images.label(index) for index in range(len(images))])
    chunks = progress(iter_features(run, loader), label="features", total=len(loader.sampler.spans))
    for span, features, predicted, causes in chunks:
        for fault in causes.values():
            raise fault.error()
        if not len(rows):
            size = len(images), features.shape[1]
            rows = torch.empty(size, dtype=torch.float32 if size[0] * size[1] <= _MAX_FLOAT32 else torch.float16)
        rows[span.start : span.stop] = features
        num_right += int(predicted.eq(labels[span.start : span.stop]).sum())
    return rows, labels, num_right
