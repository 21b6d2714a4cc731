"""Files of features: made chunk by chunk and resumable, then written as .npz."""

import base64
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.commands.scan.journal import Journal
from distribuuuu.files.untrusted import untrusted
from distribuuuu.inference.features import CHUNK, iter_features
from distribuuuu.inference.forward_chunks import ChunkLoader, UnlabeledImages, list_spans
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.records.predictions import write_npz


def compute_features(
    run: LoadedRun, files: Sequence[str], out: Path, workers: int, progress: Any, mirrored: int = 0
) -> tuple[np.ndarray, dict[str, str]]:
    """Return features (N, dim), float32, of image files, and the causes of broken ones, whose features are zeros.

    Those of the last `mirrored` files are of their mirror images. They are resumed from the partial file of `out`,
    which stays.

    Raises:
        ConfigError: the features on disk are those of another job.
    """
    images, plain = UnlabeledImages(list(files)), len(files) - mirrored
    spans = list_spans(plain, CHUNK)
    spans += [range(plain + span.start, plain + span.stop) for span in list_spans(mirrored, CHUNK)]
    journal = Journal(out, run.hash_job(files, mirrored))
    try:
        left = spans[journal.num_chunks :]
        progress.update(len(files) - sum(map(len, left)))
        if left:
            loader = ChunkLoader(images, run.transform, left, run.device, CHUNK, workers, "thread")
            for span, features, _, causes in iter_features(run.build(), loader, plain):
                for index, fault in causes.items():
                    if not fault.is_damaged:  # the disk fails
                        raise fault.error()
                    features[index - span.start] = 0
                text = base64.b64encode(features.numpy().tobytes()).decode()
                journal.append(text, [[files[index], fault.reason] for index, fault in causes.items()])
                progress.update(len(span))
        with untrusted(journal.path, "partial output"):
            chunks = [np.frombuffer(base64.b64decode(text), np.float32) for text in journal.rows()]
            rows = np.concatenate([chunk.reshape(len(span), -1) for chunk, span in zip(chunks, spans, strict=True)])
    finally:
        journal.close()
    return rows, dict(journal.broken)


def describe(run: LoadedRun) -> dict[str, Any]:
    """Return what features were made with: architecture, weights and their hash, preprocessing and precision."""
    weights = hash_tensors(run.state_dict) if run.state_dict else None
    return {"schema": 1, "arch": run.cfg.MODEL.ARCH, "weights": run.source, "weights_sha256": weights,
            "preprocessing": str(run.transform.crop), "mean": run.transform.mean, "std": run.transform.std,
            "amp": run.cfg.TRAIN.AMP}  # fmt: skip


def write_features(
    out: Path,
    files: Sequence[str],
    rows: np.ndarray,
    broken: Collection[str],
    meta: dict[str, Any],
    labels: Sequence[str] = (),
) -> None:
    """Write the features, paths and labels (or folders) of the images that are not broken."""
    kept = [index for index, path in enumerate(files) if path not in broken]
    classes = [labels[index] if labels else Path(files[index]).parent.name for index in kept]
    names, text = np.array([files[index] for index in kept]), np.array(json.dumps(meta, sort_keys=True))
    write_npz(out, {"path": names, "label": np.array(classes), "features": rows[kept], "meta": text})
