"""Files of features: made chunk by chunk and resumable, then written as .npz or .parquet."""

import base64
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.commands.scan.journal import Journal
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import untrusted
from distribuuuu.inference.features import CHUNK, iter_features
from distribuuuu.inference.forward_chunks import ChunkLoader, UnlabeledImages, list_spans
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.models.head import find_head, layer_of
from distribuuuu.records.predictions import write_npz


def compute_features(
    run: LoadedRun, files: Sequence[str], out: Path, workers: int, bar: Any, mirrored: int = 0, parts: Any = ((0, 1),)
) -> tuple[np.ndarray, dict[str, str]]:
    """Return features (N, dim), float32, of image files, and the causes of broken ones, whose features are zeros.

    Those of the last `mirrored` files are of their mirror images. They are resumed from the partial files of `out`,
    which stay. A part (rank, N) is every N-th chunk, and has a partial file; the rows are those of the given parts.

    Raises:
        ConfigError: the features on disk are those of another job.
    """
    images, plain = UnlabeledImages(list(files)), len(files) - mirrored
    spans = list_spans(plain, CHUNK)
    spans += [range(plain + span.start, plain + span.stop) for span in list_spans(mirrored, CHUNK)]
    chunks, broken = [np.empty((0, 0), np.float32)] * len(spans), dict[str, str]()
    for rank, num in parts:
        own = spans[rank::num]
        journal = Journal(out.with_name(f"{out.name}.{rank}"), run.hash_job(files, mirrored, num))
        try:
            left = own[journal.num_chunks :]
            bar.update(sum(map(len, own)) - sum(map(len, left)))
            if left:
                loader = ChunkLoader(images, run.transform, left, run.device, CHUNK, workers, "thread")
                for span, features, _, causes in iter_features(run.build(), loader, plain):
                    for index, fault in causes.items():
                        if not fault.is_damaged:  # the disk fails
                            raise fault.error()
                        features[index - span.start] = 0
                    text = base64.b64encode(features.numpy().tobytes()).decode()
                    journal.append(text, [[files[index], fault.reason] for index, fault in causes.items()])
                    bar.update(len(span))
            with untrusted(journal.path, "partial output"):
                found = [np.frombuffer(base64.b64decode(text), np.float32) for text in journal.rows()]
                chunks[rank::num] = [row.reshape(len(span), -1) for row, span in zip(found, own, strict=True)]
        finally:
            journal.close()
        broken |= dict(journal.broken)
    return np.concatenate([chunk for chunk in chunks if len(chunk)] or chunks), broken


def describe(run: LoadedRun) -> dict[str, Any]:
    """Return what features were made with: weights, the hash of those that were trained, preprocessing, precision."""
    head = () if run.has_classifier else find_head(run.cfg, run.model)
    tensors = run.state_dict or run.model.state_dict()
    known = {name: tensor.cpu() for name, tensor in tensors.items() if layer_of(name) not in head}
    return {"schema": 1, "arch": run.cfg.MODEL.ARCH, "weights": run.source, "weights_sha256": hash_tensors(known),
            "preprocessing": str(run.transform.crop), "mean": run.transform.mean, "std": run.transform.std,
            "amp": run.cfg.TRAIN.AMP}  # fmt: skip


def write_features(
    out: Path, files: Sequence[str], labels: Sequence[str], rows: np.ndarray, broken: Collection[str], meta: dict
) -> None:
    """Write the features, paths and labels of the images that are not broken: .npz or, by name, parquet.

    Of parquet, `meta` is an entry of the metadata of the schema, and bytes of a name that are not UTF-8 are escaped.
    """
    kept = [index for index, path in enumerate(files) if path not in broken]
    names, classes = ([own[index] for index in kept] for own in (files, labels))
    rows, text = rows[kept], json.dumps(meta, sort_keys=True)
    if out.suffix != ".parquet":
        arrays = {"path": np.array(names), "label": np.array(classes), "features": rows, "meta": np.array(text)}
        write_npz(out, arrays)
        return
    import pyarrow
    from pyarrow import parquet

    names, classes = ([os.fsencode(one).decode(errors="backslashreplace") for one in own] for own in (names, classes))
    features = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), rows.shape[1])
    table = pyarrow.table({"path": names, "label": classes, "features": features})
    with replacing(out) as file:
        parquet.write_table(table.replace_schema_metadata({"meta": text}), file)
