"""Pack a data set into a few large files, or verify such a pack: what tools/pack_dataset.py does.

Worker processes read, decode and encode; this process appends what they made in the order of the images, so the number
of workers changes nothing about the bytes.
"""

import contextlib
import fcntl
import os
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.tree import Config
from distribuuuu.data.datasets.packed_format import INDEX, read_whole_or_cut
from distribuuuu.data.packing.pool import in_order
from distribuuuu.data.packing.writer import PackWriter, find_changed_shard, find_conflicts, remove_pack, remove_parts

if TYPE_CHECKING:
    from distribuuuu.data.packing.encode import Encoder

DEFAULT_QUALITY = 90
SPLITS = {"train": (True,), "val": (False,), "both": (True, False)}


@dataclass(frozen=True)
class Job:
    """What a command line asks for.

    Attributes:
        out: the folder of the packs, one sub-folder a split.
        verify: look at the packs that are there, and nothing else.
        cfg: names the source, and says what a broken image does.
        options: format, shorter_side, quality and shard_mb, as the index keeps them, and exif_rotate if it applies.
        trains: True for the training images, False for the evaluation images.
        workers: worker processes; 0: none.
        overwrite: delete what was packed before.
        check: decode the files that are kept as they are.
    """

    out: Path
    verify: bool
    cfg: Config
    options: dict[str, Any]
    trains: tuple[bool, ...]
    workers: int
    overwrite: bool
    check: bool

    def folder(self, train: bool) -> Path:
        """Return the folder of a pack."""
        return self.out / ("train" if train else "val")

    def source(self, train: bool) -> dict[str, Any]:
        """Return where the images come from, as the index keeps it."""
        section = self.cfg.TRAIN if train else self.cfg.TEST
        folder = os.path.realpath(section.DATASET)
        return {"data_set": self.cfg.DATA.NAME, "folder": folder, "split": section.SPLIT}


# ------------------------------------------------------------------------------------------ packing


def pack_split(job: Job, train: bool) -> None:
    """Pack the training or the evaluation images, or go on with it, and print what there is now.

    Raises:
        ConfigError: the folder holds another pack, an image is broken, or the disk refuses the files.
    """
    folder = job.folder(train)
    encoder = _build_encoder(job, train)
    images = encoder.images
    identity = {"options": job.options, "source": {**job.source(train), **_fingerprint(encoder)}}
    for note in images.notes():
        print(note, flush=True)
    with _locked(folder):
        if job.overwrite:
            remove_pack(folder)
        if conflicts := find_conflicts(folder, identity):
            raise ConfigError(conflicts)
        changed = find_changed_shard(folder, images.stamp)
        if (folder / INDEX).exists():
            remove_parts(folder)
            print(f"{folder} is packed already: nothing to do")
            if changed:
                print(f"{folder}: source images have changed since {changed} was packed; --overwrite packs them again")
            return
        if changed:
            (folder / changed).with_suffix(".part").unlink()
            print(f"{folder}: source images have changed since {changed} was packed; it is packed again", flush=True)
        started = time.perf_counter()
        writer = PackWriter(folder, identity, max_bytes=int(job.options["shard_mb"] * 2**20))
        if first := writer.next_image:
            done = counted(len(writer.shards), "finished shard")
            print(f"{folder}: resumed after {done}, at image {first:,}", flush=True)
        about = {"classes": images.classes, "mean": images.mean, "std": images.std, "crop": images.crop}
        about["max_pixels"] = job.cfg.DATA.MAX_PIXELS
        with writer:
            _append_all(writer, encoder, job.workers, skip=job.cfg.DATA.ON_BAD_IMAGE == "skip")
            if not writer.num_images:
                raise ConfigError(f"{folder}: no image can be read ({counted(len(images), 'image')})")
            writer.finish(len(images), about)
    seconds = time.perf_counter() - started
    print(_summary(writer, len(images.classes), (len(images) - first) / seconds))


def _build_encoder(job: Job, train: bool) -> "Encoder":
    from distribuuuu.data.decode import build_decode_options
    from distribuuuu.data.packing.encode import Encoder, is_file

    name, options = job.cfg.DATA.NAME, job.options
    images = DATASETS.get(name).from_cfg(job.cfg, train)
    if images.multilabel:
        raise ConfigError(f"DATA.NAME {name}: a pack has room for one class an image; train from the files")
    # A set of files has a folder; what is above it is left out of the names, so that they fit on any machine.
    root = str(getattr(images, "folder", Path()).parent)
    if not len(images):
        raise ConfigError(f"DATA.NAME {name}: there is no image to pack")
    if options["format"] == "jpeg" and options["quality"] is None:
        try:
            keeps_files = is_file(images.read(0))
        except Exception:  # a broken first image is told in its turn
            keeps_files = True
        if not keeps_files:
            what = f"{name} has pixels, and no files to be kept as they are"
            raise ConfigError(f"--format jpeg: {what}; add --quality {DEFAULT_QUALITY}, or use --format raw")
    is_raw, decoding = options["format"] == "raw", build_decode_options(job.cfg)
    return Encoder(images, root, is_raw, options["shorter_side"], options["quality"], job.check, decoding)


def _fingerprint(encoder: "Encoder") -> dict[str, int]:
    """Return what tells one list of images from another."""
    checksum = zlib.crc32("\0".join(encoder.images.classes).encode(errors="replace"))
    for index in range(len(encoder.images)):
        line = f"{encoder.name(index)}\0{encoder.images.label(index)}\n"
        checksum = zlib.crc32(line.encode(errors="replace"), checksum)
    return {"images": len(encoder.images), "checksum_of_names_and_labels": checksum}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep a second command out of it for the length of the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise ConfigError(f"{folder}: another command is packing into it; wait for its end") from None
    except OSError:  # a file system without locks for folders
        pass
    try:
        yield
    finally:
        os.close(number)


def _append_all(writer: PackWriter, encoder: "Encoder", num_workers: int, skip: bool) -> None:
    from tqdm import tqdm

    total, before, started = len(encoder.images), writer.num_bytes, time.perf_counter()
    results = in_order(encoder, range(writer.next_image, total), num_workers)
    bar = tqdm(total=total, initial=writer.next_image, desc=str(writer.folder), unit="img", disable=None, leave=False)
    with bar, contextlib.closing(results):
        for numbers, records in results:
            for number, (record, stamp) in zip(numbers, records, strict=True):
                if not isinstance(record, str):
                    writer.append(number, record, stamp)
                    continue
                if not skip:
                    how = "mend it and run the same command again, or add DATA.ON_BAD_IMAGE skip"
                    raise ConfigError(f"broken image: {record}; {how}")
                tqdm.write(f"broken image left out: {record}", file=sys.stderr)
                writer.skip(stamp)
            speed = (writer.num_bytes - before) / 1e6 / (time.perf_counter() - started)
            bar.set_postfix_str(f"{speed:.0f} MB/s", refresh=False)
            bar.update(len(numbers))


def _summary(writer: PackWriter, num_classes: int, images_per_s: float) -> str:
    left_out = f", {writer.num_skipped} broken left out" if writer.num_skipped else ""
    return (
        f"{writer.folder}: {counted(writer.num_images, 'image')} of {counted(num_classes, 'class')}{left_out}, "
        f"{writer.num_bytes / 1e6:.1f} MB in {counted(len(writer.shards), 'shard')}; {images_per_s:,.0f} images/s"
    )


# ---------------------------------------------------------------------------------------- verifying


def verify_packs(out: Path, num_workers: int) -> None:
    """Read every byte of the packs in a folder, and print what was looked at.

    Raises:
        ConfigError: with each image and file that is not sound.
    """
    folders = [out, *sorted(path for path in out.iterdir() if path.is_dir())] if out.is_dir() else []
    folders = [folder for folder in folders if (folder / INDEX).exists() or any(folder.glob("shard-*"))]
    if not folders:
        beside = [path.name for path in out.absolute().parent.glob("*/")]
        what = "holds no packed data" if out.is_dir() else "is no folder"
        raise ConfigError(f"--verify: {out} {what}{did_you_mean(out.name, beside)}")
    problems = []
    for folder in folders:
        try:
            problems += _verify_pack(folder, num_workers)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _verify_pack(folder: Path, num_workers: int) -> list[str]:
    from tqdm import tqdm

    from distribuuuu.data.packing.encode import Checker

    meta, columns, problems = read_whole_or_cut(folder)
    total = len(columns["label"])
    results = in_order(Checker(folder, meta, columns), range(total), num_workers)
    with tqdm(total=total, desc=str(folder), unit="img", disable=None, leave=False) as bar, contextlib.closing(results):
        for numbers, found in results:
            problems += [problem for problem in found if problem]
            bar.update(len(numbers))
    if not problems:
        size = sum(shard["size"] for shard in meta["shards"])
        shards = f"{counted(len(meta['shards']), 'shard')} ({size / 1e6:.1f} MB)"
        print(f"{folder}: {counted(total, 'image')} in {shards}: every checksum matches and every image decodes")
    return problems
