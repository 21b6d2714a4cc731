"""Files of features: made chunk by chunk and resumable, then written as .npz or .parquet.

The partial file is append-only: a line of JSON with the hash of the job, then for each chunk a line of JSON and the
bytes of its features, float32. A chunk that a kill has cut off is computed again.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.config import ConfigError
from distribuuuu.files.atomic_file import open_for_writing, replacing
from distribuuuu.files.locks import lock_file
from distribuuuu.files.untrusted import untrusted
from distribuuuu.inference.features import CHUNK, iter_features
from distribuuuu.inference.forward_chunks import ChunkLoader, UnlabeledImages, list_spans
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.records.predictions import write_npz

Chunk = tuple[np.ndarray, dict[str, str]]


class Features(NamedTuple):
    """Features (N, dim), float32, of the images at `path`, and the causes of broken ones, whose features are zeros."""

    rows: np.ndarray
    path: list[str]
    broken: dict[str, str]


def hash_job(run: LoadedRun, files: Sequence[str]) -> str:
    """Return a hash of what features depend on: weights, preprocessing, mode, images and the version of torch."""
    cfg, sizes = run.cfg, [Path(file).stat().st_size if Path(file).exists() else -1 for file in files]
    texts = (cfg.MODEL.ARCH, dict(cfg.MODEL.KWARGS), run.transform, cfg.TEST.FLIP, cfg.TRAIN.AMP, [*files], sizes,
             torch.__version__, torch.cuda.is_available())  # fmt: skip
    digest = hashlib.blake2b(repr(texts).encode(errors="surrogateescape"), digest_size=16)
    digest.update(hash_tensors(run.state_dict or {}).encode() if run.state_dict else run.source.encode())
    return digest.hexdigest()


class PartialFeatures:
    """The finished chunks of a file of features, locked against other processes until it is closed."""

    def __init__(self, out: Path, job: str):
        self.path = out.with_name(f"{out.name}.partial")
        self._file = open_for_writing(self.path, "a+b", buffering=0)
        if not lock_file(self._file.fileno(), timeout_s=0.0):
            raise ConfigError(f"--out: another process writes {self.path}; fix: wait for it, or name another file")
        self.chunks, header = list[Chunk](), json.dumps(job).encode() + b"\n"
        if not self._file.tell():
            self._append(header)
        with untrusted(self.path, "partial file of features"):
            self._file.seek(0)
            content = self._file.read()
        if not content.startswith(header):
            reason = f"{self.path} has features of other weights, images or preprocessing"
            raise ConfigError(f"--out: {reason}; fix: remove it, or name another file")
        found = list(_read_chunks(content, len(header)))
        self.chunks += [chunk for chunk, _ in found]
        self._file.truncate(found[-1][1] if found else len(header))

    def append(self, rows: np.ndarray, broken: dict[str, str]) -> None:
        """Add the next chunk."""
        data = np.ascontiguousarray(rows, np.float32)
        digest = hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()
        self._append(json.dumps([*data.shape, broken, digest]).encode() + b"\n" + data.tobytes())
        self.chunks.append((data, broken))

    def _append(self, content: bytes) -> None:
        while content:
            content = content[self._file.write(content) :]

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def _read_chunks(content: bytes, start: int) -> Iterator[tuple[Chunk, int]]:
    """Yield the complete chunks of a partial file, and the end of each."""
    while (newline := content.find(b"\n", start)) > 0:
        with contextlib.suppress(ValueError, TypeError):
            num, dim, broken, digest = json.loads(content[start:newline])
            start = newline + 1 + 4 * num * dim
            data = content[newline + 1 : start]
            if len(data) == 4 * num * dim and hashlib.blake2b(data, digest_size=8).hexdigest() == digest:
                yield (np.frombuffer(data, np.float32).reshape(num, dim), dict(broken)), start
                continue
        return


def compute_features(run: LoadedRun, files: Sequence[str], out: Path, workers: int, progress: Any) -> Features:
    """Return the features of image files, resumed from the partial file of `out`, which stays for `finish`.

    Raises:
        ConfigError: the features on disk are those of another job.
    """
    images, spans = UnlabeledImages(list(files)), list_spans(len(files), CHUNK)
    partial = PartialFeatures(out, hash_job(run, files))
    try:
        left = spans[len(partial.chunks) :]
        progress.update(len(files) - sum(map(len, left)))
        if left:
            loader = ChunkLoader(images, run.transform, left, run.device, CHUNK, workers, "thread")
            for span, features, _, causes in iter_features(run.build(), loader):
                for index, fault in causes.items():
                    if not fault.is_damaged:  # the disk fails
                        raise fault.error()
                    features[index - span.start] = 0
                partial.append(features.numpy(), {files[index]: fault.reason for index, fault in causes.items()})
                progress.update(len(span))
    finally:
        partial.close()
    rows = np.concatenate([rows for rows, _ in partial.chunks])
    broken = {path: cause for _, own in partial.chunks for path, cause in own.items()}
    return Features(rows, [str(file) for file in files], broken)


def describe(run: LoadedRun) -> dict[str, Any]:
    """Return what features were made with: architecture, weights and their hash, preprocessing and precision."""
    weights = hash_tensors(run.state_dict) if run.state_dict else None
    return {"schema": 1, "arch": run.cfg.MODEL.ARCH, "weights": run.source, "weights_sha256": weights,
            "preprocessing": str(run.transform.crop), "mean": run.transform.mean, "std": run.transform.std,
            "amp": run.cfg.TRAIN.AMP}  # fmt: skip


def write_features(out: Path, found: Features, labels: Sequence[str], meta: dict[str, Any]) -> None:
    """Write the features, paths and labels of the images that are not broken as .npz or .parquet.

    Raises:
        ConfigError: pyarrow is missing.
    """
    kept = [index for index, path in enumerate(found.path) if path not in found.broken]
    rows, names = found.rows[kept], [found.path[index] for index in kept]
    classes, text = [labels[index] for index in kept], json.dumps(meta, sort_keys=True)
    if out.suffix == ".npz":
        arrays = {"path": np.array(names), "label": np.array(classes), "features": rows, "meta": np.array(text)}
        write_npz(out, arrays)
        return
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"--out: {out} needs pyarrow; fix: pip install pyarrow, or name a .npz file") from error
    flat = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    table = pa.table({"path": names, "label": classes, "features": flat})
    with replacing(out) as file:
        parquet.write_table(table.replace_schema_metadata({"distribuuuu": text}), file)
