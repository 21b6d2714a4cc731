"""Packing a data set into a few large files, and verifying such a pack: the work of distribuuuu pack.

Worker processes read, decode and encode; this process appends the results in the order of the images, so the bytes do
not depend on the number of workers.
"""

import contextlib
import functools
import os
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distribuuuu.commands.pack.writer import PackWriter, Record, find_conflicts, remove_files, remove_parts
from distribuuuu.commands.scan.pool import map_in_order
from distribuuuu.config import Config, ConfigError
from distribuuuu.config.errors import Problem, counted
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.array_file import checksum_of
from distribuuuu.data.packed.dataset import NAME_OF, is_url
from distribuuuu.data.packed.format import (
    FOREIGN_SHARD,
    HEADER_SIZE,
    INDEX,
    SEVERAL_LABELS,
    Meta,
    read_index,
    shard_header,
)
from distribuuuu.files.locks import try_lock

if TYPE_CHECKING:
    import numpy as np

    from distribuuuu.commands.pack.encode import Encoder

SPLITS = {"train": (True,), "val": (False,), "both": (True, False)}


@dataclass(frozen=True)
class PackJob:
    """A parsed command line.

    Attributes:
        out: the folder of the packs, one sub-folder per split.
        flags: those of the command.
        cfg: the source, and the handling of broken images.
        options: format, shorter_side, quality and shard_mb as stored in the index; longer_side and exif_rotate if set.
    """

    out: Path
    flags: Namespace
    cfg: Config
    options: dict[str, Any]

    @property
    def trains(self) -> tuple[bool, ...]:
        """The splits to pack: True for the training images, False for the evaluation images."""
        return SPLITS[self.flags.split]

    def folder(self, train: bool) -> Path:
        """Return the folder of a pack."""
        return self.out / ("train" if train else "val")

    def source(self, train: bool) -> dict[str, Any]:
        """Return the source of the images as stored in the index."""
        section = self.cfg.TRAIN if train else self.cfg.TEST
        folder = section.DATASET if is_url(section.DATASET) else os.path.realpath(section.DATASET)
        return {"data_set": self.cfg.DATA.NAME, "folder": folder, "split": section.SPLIT}


# ------------------------------------------------------------------------------------------ packing


def pack_split(job: PackJob, train: bool) -> None:
    """Pack the training or the evaluation images, or resume packing, and print a summary.

    Raises:
        ConfigError: the folder holds another pack, an image is broken, or a file cannot be written.
    """
    encoder, folder = _build_encoder(job, train), job.folder(train)
    images = encoder.images
    source = {**job.source(train), "images": len(images), "digest_of_names_and_labels": images.digest}
    if images.targets == "labels":
        source["targets"] = SEVERAL_LABELS
    identity = {"options": job.options, "source": source}
    for note in images.notes():
        if "fix: distribuuuu pack" not in note:  # which this is
            print(note, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, lock)
        if try_lock(lock) is False:
            raise ConfigError(f"{folder}: another command is packing into it; wait until it ends")
        if job.flags.overwrite:
            remove_files(folder)
        if conflicts := find_conflicts(folder, identity):
            raise ConfigError(conflicts)
        if (folder / INDEX).exists():
            remove_parts(folder)
            print(f"{folder} is packed already: nothing to do")
            return
        started = time.perf_counter()
        writer = PackWriter(folder, identity, max_bytes=int(job.options["shard_mb"] * 2**20))
        if first := writer.next_image:
            finished = counted(len(writer.shards), "finished shard")
            print(f"{folder}: resumed after {finished}, at image {first:,}", flush=True)
        meta = {"classes": images.classes, "mean": images.mean, "std": images.std, "crop": images.crop}
        try:
            _append_all(writer, encoder, job.flags.workers, skip=job.cfg.DATA.ON_BAD_IMAGE == "skip")
            data = job.cfg.DATA
            stored = {"max_pixels": data.MAX_PIXELS, "channels": data.CHANNELS, "pixels": data.PIXELS}
            writer.finish(len(images), {**meta, **stored})
        except OSError as error:
            remove_files(folder, keep={Path(shard["name"]).stem for shard in writer.shards})  # the unfinished shard
            fix = "finished shards are kept; fix: free some space and run the same command again"
            raise ConfigError(f"{folder}: {error.strerror or error}; {fix}") from error
    images_per_s = (len(images) - first) / (time.perf_counter() - started)
    num_images, num_bytes = (sum(shard[key] for shard in writer.shards) for key in ("images", "size"))
    packed = f"{counted(num_images, 'image')} of {counted(len(images.classes), 'class')}"
    skipped = f", {writer.num_skipped} broken left out" if writer.num_skipped else ""
    size = f"{num_bytes / 1e6:.1f} MB in {counted(len(writer.shards), 'shard')}"
    print(f"{folder}: {packed}{skipped}, {size}; {images_per_s:,.0f} images/s")
    if images.targets != "label":
        print(f"to train: DATA.NAME {NAME_OF[images.targets]}")


def _build_encoder(job: PackJob, train: bool) -> "Encoder":
    from distribuuuu.commands.pack.encode import Encoder
    from distribuuuu.data.datasets.file_check import find_reduced
    from distribuuuu.data.datasets.imagefolder import ImageFolder
    from distribuuuu.data.decode import build_decode_options

    name, encodes = job.cfg.DATA.NAME, job.options["format"] == "raw" or job.options["quality"] is not None
    images = DATASETS.get(name).from_cfg(job.cfg, train)
    if not len(images):
        raise ConfigError(f"DATA.NAME {name}: there is no image to pack")
    if images.targets not in NAME_OF:
        found = f"got {images.targets} targets; expected labels; fix: train from the files"
        raise ConfigError(f"DATA.NAME {name}: {found}")
    decoding = build_decode_options(job.cfg)
    if encodes and not decoding.is_rgb:
        found = f"got {decoding.channels} with DATA.PIXELS {decoding.pixels}; expected 8-bit RGB to encode images again"
        raise ConfigError(f"DATA.CHANNELS: {found}; fix: leave out --format, --quality and --shorter-side")
    if encodes and (reduced := find_reduced(images, decoding)):
        print(reduced, flush=True)
    # The folder above that of the images is removed from their names, so that they are valid on any machine.
    root = str(Path(images.index.root).parent) if isinstance(images, ImageFolder) else ""
    return Encoder(images, root, job.options, not job.flags.no_check, decoding)


def _append_all(writer: PackWriter, encoder: "Encoder", num_workers: int, skip: bool) -> None:
    from distribuuuu.records.run_log import progress

    total = len(encoder.images)
    results = map_in_order(encoder, range(writer.next_image, total), num_workers)
    bar = progress(None, str(writer.folder), total, writer.next_image, unit="img")
    with bar, contextlib.closing(results):
        for indices, records in results:
            for index, record in zip(indices, records, strict=True):
                if isinstance(record, Record):
                    writer.append(index, record)
                    continue
                if not (skip and record.is_damaged):
                    raise record.error(can_skip=True)
                bar.write(f"broken image left out: {record}", file=sys.stderr)
                writer.skip()
            bar.update(len(indices))


# ---------------------------------------------------------------------------------------- verifying


def verify_packs(out: Path, num_workers: int) -> None:
    """Read every byte of the packs in a folder, and print a summary of each.

    Raises:
        ConfigError: with each corrupt image and file.
    """
    folders = [out, *sorted(path for path in out.iterdir() if path.is_dir())] if out.is_dir() else []
    folders = [folder for folder in folders if (folder / INDEX).exists() or any(folder.glob("shard-*"))]
    problems: list[str | Problem] = []
    if not folders:
        problems = [f"--verify: {out} {'holds no packed data' if out.is_dir() else 'is not a folder'}"]
    for folder in folders:
        try:
            problems += _verify_pack(folder, num_workers)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def inspect_pack(folder: Path) -> tuple[Meta, dict[str, "np.ndarray"]]:
    """Return the meta and the columns of a pack, to verify it image by image.

    Raises:
        ConfigError: the index or a shard is missing, incomplete or of another pack.
    """
    meta, columns = read_index(folder)
    if meta["crc32"] != checksum_of(columns):
        raise ConfigError(f"{folder / INDEX} is corrupt: its checksum does not match; pack the data again")
    for number, shard in enumerate(meta["shards"]):
        with open(folder / shard["name"], "rb") as file:
            if file.read(HEADER_SIZE) != shard_header(number, meta):
                raise ConfigError(f"{folder / shard['name']} {FOREIGN_SHARD}")
    return meta, columns


def _verify_pack(folder: Path, num_workers: int) -> list[str]:
    from distribuuuu.commands.pack.encode import find_stored_problem
    from distribuuuu.records.run_log import progress

    meta, columns = inspect_pack(folder)
    total, problems = len(columns["label"]), list[str]()
    check = functools.partial(find_stored_problem, folder, meta, columns)
    results = map_in_order(check, range(total), num_workers)
    with progress(None, str(folder), total, unit="img") as bar, contextlib.closing(results):
        for indices, found in results:
            problems += filter(None, found)
            bar.update(len(indices))
    if not problems:
        size = sum(shard["size"] for shard in meta["shards"])
        shards = f"{counted(len(meta['shards']), 'shard')} ({size / 1e6:.1f} MB)"
        print(f"{folder}: {counted(total, 'image')} in {shards}: every checksum matches and every image decodes")
    return problems
