"""Files of features: made chunk by chunk and resumable, then written as .npz or .parquet."""

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.config import ConfigError
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import parse_json, untrusted
from distribuuuu.inference.features import CHUNK, iter_features
from distribuuuu.inference.forward_chunks import ChunkLoader, UnlabeledImages, list_spans
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.models.head import find_head, layer_of
from distribuuuu.records.predictions import write_npz


def compute_features(
    run: LoadedRun, files: Sequence[str], out: Path, workers: int, bar: Any, mirrored: int = 0, part: Any = (0, 1)
) -> tuple[np.ndarray, dict[str, str]]:
    """Return features (N, dim), float32, of image files, and the causes of broken ones, whose features are zeros.

    Those of the last `mirrored` files are of their mirror images. Each chunk is a file in the folder OUT.partial, which
    stays, so that any number of processes resumes them. The part (rank, N) is every N-th chunk.

    Raises:
        ConfigError: the features on disk are those of another job.
    """
    images, plain = UnlabeledImages(list(files)), len(files) - mirrored
    spans = list_spans(plain, CHUNK)
    spans += [range(plain + span.start, plain + span.stop) for span in list_spans(mirrored, CHUNK)]
    folder = _open_partial(out, run.hash_job(files, mirrored))
    own = [(folder / f"{number}", spans[number]) for number in range(part[0], len(spans), part[1])]
    left = [(path, span) for path, span in own if not path.exists()]
    bar.update(sum(len(span) for _, span in own) - sum(len(span) for _, span in left))
    if left:
        loader = ChunkLoader(images, run.transform, [span for _, span in left], run.device, CHUNK, workers, "thread")
        for (path, _), (span, features, _, faults) in zip(left, iter_features(run.build(), loader, plain), strict=True):
            for index, fault in faults.items():
                if not fault.is_damaged:  # the disk fails
                    raise fault.error()
                features[index - span.start] = 0
            causes = json.dumps({files[index]: fault.reason for index, fault in faults.items()})
            with replacing(path) as file:
                file.write(f"{causes}\n".encode() + features.numpy().tobytes())
            bar.update(len(span))
    rows, broken = [np.empty((0, 0), np.float32)], dict[str, str]()
    for path, span in own:
        with untrusted(path, "chunk of features"):
            text, _, data = path.read_bytes().partition(b"\n")
            rows.append(np.frombuffer(data, np.float32).reshape(len(span), -1))
            broken |= parse_json(text)
    return np.concatenate(rows[1:] or rows), broken


def _open_partial(out: Path, job: str) -> Path:
    """Return the folder of the finished chunks of `out`; raise ConfigError if it has those of another job."""
    folder = out.with_name(f"{out.name}.partial")
    if folder.is_file():
        raise ConfigError(f"--out: {folder} is a file; expected a folder; fix: delete or rename it")
    folder.mkdir(exist_ok=True)
    if not (known := folder / "job").exists():
        with replacing(known, "w") as file:
            file.write(job)
    if known.read_text() != job:
        what = f"{folder} has features of another model, other options or other images"
        raise ConfigError(f"--out: {what}; fix: remove it, or name another file")
    return folder


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
    names, classes = [os.path.abspath(files[index]) for index in kept], [labels[index] for index in kept]
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
