"""Packing of a data set into a few large files: the work of distribuuuu pack.

Worker processes read, decode and encode; this process appends the results in the order of the images, so the bytes do
not depend on the number of workers.
"""

import contextlib
import os
import re
import sys
import time
from argparse import Namespace
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from distribuuuu.commands.scan.pool import map_in_order
from distribuuuu.config import Config, ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.array_file import checksum_of, pack_names, write_arrays
from distribuuuu.data.packed.dataset import is_url
from distribuuuu.data.packed.format import (
    COLUMNS,
    HEADER_SIZE,
    INDEX,
    KIND,
    VERSION,
    Identity,
    read_index_file,
    shard_header,
    shard_name,
)
from distribuuuu.files.atomic_file import open_for_writing, sync_folder
from distribuuuu.files.locks import try_lock

if TYPE_CHECKING:
    from distribuuuu.commands.pack.encode import Encoder, Record

DEFAULT_QUALITY = 90
# With the files of shards that were finished, of older versions.
OWN_FILES = re.compile(r"index\.bin|shard-\d+\.(bin|part)|\.(index\.bin|shard-\d+\.part)\.[0-9a-f]+\.tmp")
SPLITS = {"train": (True,), "val": (False,), "both": (True, False)}


@dataclass(frozen=True)
class PackJob:
    """A parsed command line; `out` is the folder of the packs, and `options` those that their indexes store."""

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
    """Pack the training or the evaluation images, and print a summary; files that a stopped command left are replaced.

    Raises:
        ConfigError: the folder holds another pack, an image is broken, or a file cannot be written.
    """
    encoder, folder = _build_encoder(job, train), job.folder(train)
    images, data = encoder.images, job.cfg.DATA
    source = {**job.source(train), "images": len(images), "digest_of_names_and_labels": images.digest}
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
        if (folder / INDEX).exists():
            if conflict := find_conflict(folder, identity):
                raise ConfigError(conflict)
            print(f"{folder} is packed already: nothing to do")
            return
        started = time.perf_counter()
        writer = PackWriter(folder, identity, max_bytes=int(job.options["shard_mb"] * 2**20))
        meta = {"classes": images.classes, "mean": images.mean, "std": images.std, "crop": images.crop}
        meta |= {"max_pixels": data.MAX_PIXELS, "channels": data.CHANNELS, "pixels": data.PIXELS}
        try:
            remove_files(folder)
            num_skipped = _append_all(writer, encoder, job.flags.workers, skip=data.ON_BAD_IMAGE == "skip")
            writer.finish({**meta, "num_skipped": num_skipped})
        except OSError as error:
            fix = "free some space and run the same command again"
            raise ConfigError(f"{folder}: {error.strerror or error}; the pack is incomplete; fix: {fix}") from error
    images_per_s = len(images) / (time.perf_counter() - started)
    num_images, num_bytes = (sum(shard[key] for shard in writer.shards) for key in ("images", "size"))
    packed = f"{counted(num_images, 'image')} of {counted(len(images.classes), 'class')}"
    skipped = f", {num_skipped} broken left out" if num_skipped else ""
    size = f"{num_bytes / 1e6:.1f} MB in {counted(len(writer.shards), 'shard')}"
    print(f"{folder}: {packed}{skipped}, {size}; {images_per_s:,.0f} images/s")


def _build_encoder(job: PackJob, train: bool) -> "Encoder":
    from distribuuuu.commands.pack.encode import Encoder
    from distribuuuu.data.datasets.file_check import find_reduced
    from distribuuuu.data.datasets.imagefolder import ImageFolder
    from distribuuuu.data.decode import build_decode_options

    name, encodes = job.cfg.DATA.NAME, job.options["format"] == "raw" or job.options["quality"] is not None
    images = DATASETS.get(name).from_cfg(job.cfg, train)
    if not len(images):
        raise ConfigError(f"DATA.NAME {name}: there is no image to pack")
    if images.targets != "label":
        found = f"got {images.targets} targets; expected one class per image; fix: train from the files"
        raise ConfigError(f"DATA.NAME {name}: {found}")
    decoding = build_decode_options(job.cfg)
    if encodes and not decoding.is_rgb:
        found = f"got {decoding.channels} with DATA.PIXELS {decoding.pixels}; expected 8-bit RGB to encode images again"
        raise ConfigError(f"DATA.CHANNELS: {found}; fix: leave out --format, --quality and --shorter-side")
    if encodes and (reduced := find_reduced(images, decoding)):
        print(reduced, flush=True)
    # The folder above that of the images is removed from their names, so that they are valid on any machine.
    root = str(Path(images.index.root).parent) if isinstance(images, ImageFolder) else ""
    return Encoder(images, root, job.options, decoding)


def _append_all(writer: "PackWriter", encoder: "Encoder", num_workers: int, skip: bool) -> int:
    """Write all records; return the number of damaged images, which are left out if `skip`."""
    from distribuuuu.data.image_faults import ImageFault
    from distribuuuu.records.run_log import progress

    total, num_skipped = len(encoder.images), 0
    results = map_in_order(encoder, range(total), num_workers)
    with progress(None, str(writer.folder), total, unit="img") as bar, contextlib.closing(results):
        for _, records in results:
            for record in records:
                if not isinstance(record, ImageFault):
                    writer.append(record)
                elif skip and record.is_damaged:
                    bar.write(f"broken image left out: {record}", file=sys.stderr)
                    num_skipped += 1
                else:
                    raise record.error(can_skip=True)
            bar.update(len(records))
    return num_skipped


# ------------------------------------------------------------------------------------------ writing


def find_conflict(folder: Path, identity: Identity) -> str:
    """Return the problem if a folder, which need not exist, holds a pack of another source or with other options.

    `identity` is the known part of it.
    """
    if not (folder / INDEX).exists():
        return ""
    try:
        existing = read_index_file(folder)[0]
    except ConfigError as error:
        return f"{error}; fix: remove {folder} first"
    before, now = ({**one["options"], **one["source"]} for one in (existing, identity))
    keys = dict.fromkeys([*now, *existing["options"]])  # an option may be present only if it is not the default
    differences = [f"{key.replace('_', ' ')} {before.get(key)}, now {now.get(key)}" for key in keys
                   if before.get(key) != now.get(key)]  # fmt: skip
    fix = "fix: name another folder, or remove this one"
    return f"{folder} holds another pack: {'; '.join(differences)}; {fix}" if differences else ""


def remove_files(folder: Path) -> None:
    """Delete the files of a pack. The index goes first, so that no incomplete pack has one."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != INDEX):
        if OWN_FILES.fullmatch(path.name):
            path.unlink()


class PackWriter:
    """Appends records to the shards of a folder.

    Args:
        folder: an existing folder without files of a pack.
        max_bytes: the maximum size of a shard with more than one record.

    Attributes:
        shards: the name, the size and the number of images of each finished shard.
    """

    def __init__(self, folder: Path, identity: Identity, max_bytes: int):
        self.folder, self.identity, self.max_bytes = folder, identity, max_bytes
        self.shards: list[dict[str, Any]] = []
        self._file: IO | None = None
        self._end = self._first = 0  # of the current shard: its size, and its first image
        self._rows, self._names = array("q"), list[bytes]()

    def append(self, record: "Record") -> None:
        """Write the record of the next image."""
        if self._file and self._end + len(record.data) > self.max_bytes:
            self._finish_shard()
        number = len(self.shards)
        if self._file is None:
            self._file = open_for_writing(self.folder / shard_name(number), "wb", buffering=1 << 20)
            self._file.write(shard_header(number, self.identity))
            self._end, self._first = HEADER_SIZE, len(self._names)
        self._file.write(record.data)
        size = len(record.data)
        self._rows.extend((number, self._end, size, record.label, record.height, record.width, record.crc32))
        self._names.append(record.name)
        self._end += size

    def _finish_shard(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file, name = None, shard_name(len(self.shards))
        self.shards.append({"name": name, "size": self._end, "images": len(self._names) - self._first})

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Write the index, with a meta that a reader needs; raise ConfigError if no image has been appended."""
        if self._file is None:
            raise ConfigError(f"{self.folder}: no image can be read")
        self._finish_shard()
        table = np.frombuffer(self._rows, np.int64).reshape(-1, len(COLUMNS))
        columns = {name: table[:, place].astype(kind) for place, (name, kind) in enumerate(COLUMNS.items())}
        columns |= pack_names("name", self._names)
        counts = {"shards": self.shards, "crc32": checksum_of(columns)}
        write_arrays(self.folder / INDEX, KIND, VERSION, {**meta, **self.identity, **counts}, columns)
        sync_folder(self.folder)
