"""Explanations of mistakes: where the model looked, and the training images that are nearest in its features."""

import os
import zipfile
from pathlib import Path

import numpy as np
from torch import Tensor

from distribuuuu.commands.stats.stored_predictions import Predictions, read_arrays
from distribuuuu.config import ConfigError
from distribuuuu.files.untrusted import open_regular, untrusted
from distribuuuu.inference.features import call_layers
from distribuuuu.inference.loaded_run import LoadedRun

# What `embed` or `finetune` writes into the folder of a run, and the number of nearest images that are shown.
FEATURES, NUM_NEAREST = "features.npz", 3
# Layers of a convolutional network after the last one whose output has positions: pooling, norm, dropout, classifier.
_MAX_HEAD = 10


def find_nearest(folder: Path, content: Predictions, indices: list[int]) -> dict[int, list[tuple[str, str]]]:
    """Return the path and the label of the images of features.npz that are nearest to some evaluated images.

    The evaluated images have to be in the file too; they are not among the nearest. Empty without the file.

    Raises:
        InvalidFileError, OSError: the file is damaged or cannot be read.
    """
    path = folder / FEATURES
    if not os.path.lexists(path):
        return {}
    with open_regular(path) as file, untrusted(path, "features"), zipfile.ZipFile(file) as archive:
        arrays = read_arrays(archive, ("path", "label", "features"))
        names, labels, rows = arrays["path"].tolist(), arrays["label"].tolist(), arrays["features"]
        is_text = arrays["path"].dtype.kind == arrays["label"].dtype.kind == "U"
        if not is_text or len(labels) != len(names) or rows.shape[:-1] != (len(names),) or rows.dtype.kind != "f":
            raise ValueError("its arrays do not fit together")
        where = {os.path.realpath(name): row for row, name in enumerate(names)}
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    root = content.meta.get("folder") or ""
    evaluated = [where.get(os.path.realpath(os.path.join(root, name))) for name in content.path.tolist()]
    is_other = np.ones(len(rows), bool)
    is_other[[row for row in evaluated if row is not None]] = False
    others, found = np.flatnonzero(is_other), {}
    for index in indices:
        if (row := evaluated[index]) is not None:
            order = others[np.argsort(-(rows[others] @ rows[row]), kind="stable")[:NUM_NEAREST]]
            found[index] = [(names[other], labels[other]) for other in order]
    return found


def draw_attention(run: LoadedRun, crop: Tensor, pixels: np.ndarray, target: int) -> list[np.ndarray]:
    """Return a picture, uint8 (H, W, 3), in red where a class was recognized; none if the network has no positions.

    Grad-CAM (arXiv 1610.02391) of the last layer whose output has positions; that of a transformer is far from the end.
    Without the package captum, that is a ConfigError.
    """
    try:
        from captum.attr import LayerAttribution, LayerGradCam
    except ImportError as error:
        raise ConfigError("captum is not installed; fix: pip install 'distribuuuu[explain]'") from error
    images = crop[None].to(run.device)
    calls, _ = call_layers(run.model, images, [layer for layer in run.model.modules() if not any(layer.children())])
    if int(run.compute_scores(images).argmax()) != target:
        raise ConfigError("the best weights answer otherwise; fix: distribuuuu test RUN")
    layers = [layer for layer, output in calls[-_MAX_HEAD:] if isinstance(output, Tensor) and output.ndim == 4
              and min(output.shape[2:]) > 1 and output.shape[1] >= output.shape[3]]  # fmt: skip
    if not layers:
        return []
    found = LayerGradCam(run.model, layers[-1]).attribute(images, target=target, relu_attributions=True)
    heat = LayerAttribution.interpolate(found.float(), tuple(crop.shape[1:]), "bilinear")[0, 0].detach().cpu().numpy()
    heat = 0.7 * (heat / max(heat.max(), 1e-12))[..., None]
    return [(pixels * (1 - heat) + np.array([255, 0, 0]) * heat).round().astype(np.uint8)]
