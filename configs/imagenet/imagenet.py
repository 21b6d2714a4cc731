"""ImageNet (ILSVRC 2012) as it is distributed: archives of images-net.org, Kaggle's folders, or a flat val/.

The class of a validation image comes from the development kit or from Kaggle's solution file; nothing is unpacked.
"""

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.archive import Archive, ArchiveSource, open_archives
from distribuuuu.data.datasets.archive_members import ArchiveError, Member, walk_archive, walk_tar
from distribuuuu.data.datasets.array_file import pack_names
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.datasets.index import Index
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import IMAGENET_FOLDERS, IMAGENET_TARS, is_image, list_classes
from distribuuuu.files.untrusted import InvalidFileError, printable, read_regular, untrusted

TRAIN_TAR, VAL_TAR = IMAGENET_TARS
DEVKIT, SOLUTION = "ILSVRC2012_devkit_t12", "LOC_val_solution.csv"
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
# Bytes of the largest file with labels, also after it has been decompressed.
_MAX_BYTES = 1 << 24


@DATASETS.register("imagenet")
class ImageNet(Archive):
    """The training or the validation images of ImageNet, in the order of a folder with one sub-folder per class."""

    has_splits, fault = False, "DATASET"

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST: of archives or of folders."""
        root, cache = Path(cfg[name].DATASET), cfg.DATA.CACHE_DIR
        if not root.is_dir():
            from distribuuuu.hints.sources import missing_root

            raise ConfigError(Problem(*missing_root(name, root, f"{TRAIN_TAR}, {VAL_TAR} and {DEVKIT}.tar.gz")))
        if name == "TRAIN":
            return cls._open_train(root, cache)
        return cls._open_val(root, cache, trained.classes if trained else ())

    @classmethod
    def _open_train(cls, root: Path, cache: str) -> ImageDataset:
        if (root / TRAIN_TAR).is_file():
            return cls(cls._open_tar(root / TRAIN_TAR, "tars", cache))
        for folder in (*(root / name for name in IMAGENET_FOLDERS), root):
            if list_classes(folder / "train"):
                return ImageFolder(folder, "train", None, cache)
        expected = f"expected {TRAIN_TAR}, {IMAGENET_FOLDERS[0]}/train/WNID/ or train/WNID/"
        raise ArchiveError(f"{root} has no training images of ImageNet; {expected}")

    @classmethod
    def _open_val(cls, root: Path, cache: str, classes: Sequence[str]) -> ImageDataset:
        if (root / VAL_TAR).is_file():
            index = cls._open_tar(root / VAL_TAR, "flat", cache)
            return cls(index, *_label([*index.names_of("names")], read_labels(root), classes, root / VAL_TAR))
        for folder in (*(root / name / "val" for name in IMAGENET_FOLDERS), root / "val"):
            if list_classes(folder):
                return ImageFolder(folder.parent, "val", classes or None, cache)
            names = sorted(filter(is_image, os.listdir(folder))) if folder.is_dir() else []
            if names:
                arrays = {**pack_names("files", [b""]), "stamps": np.zeros((1, 3), np.int64),
                          **pack_names("names", [os.fsencode(name) for name in names]),
                          "file": np.zeros(len(names), np.int32)}  # fmt: skip
                meta = {"classes": [], "notes": [], "ignored": {}, "num_beside": 0}
                index = Index(str(folder), str(folder), meta, arrays)
                return cls(index, *_label(names, read_labels(root), classes, folder))
        expected = f"expected {VAL_TAR}, {IMAGENET_FOLDERS[0]}/val/ or val/"
        raise ArchiveError(f"{root} has no validation images of ImageNet; {expected}")

    @classmethod
    def _open_tar(cls, path: Path, layout: str, cache: str) -> Index:
        source = ArchiveSource((str(path),), "val" if layout == "flat" else "", layout=layout)
        return open_archives(source, cache_folder(cache), walk_archive if layout == "flat" else _walk_tars)


def _walk_tars(path: str, file: IO[bytes], size: int) -> Iterator[Member]:
    """Yield the files of the tars in an archive, each in a folder with the name of its tar."""
    for member in [*walk_archive(path, file, size)]:
        if member.name.endswith(".tar") and not (member.fault or member.packed):
            folder = os.path.basename(member.name)[: -len(".tar")]
            for inner in walk_tar(f"{path}:{printable(member.name)}", file, member.offset, member.offset + member.size):
                yield inner._replace(name=f"{folder}/{inner.name}")


def _label(names: list[str], known: dict[str, str], classes: Sequence[str], source: Path) -> tuple[Any, Any, Any]:
    """Return the classes, the order of images by class and name, and their labels in this order.

    Args:
        known: the synset of each image by its name without extension.
        classes: the classes of the training images; empty: those of the labels.
    """
    stems = [os.path.basename(name).partition(".")[0] for name in names]
    if missing := [name for name, stem in zip(names, stems, strict=True) if stem not in known]:
        raise ArchiveError(f"{source} has images without a label: {first_few(missing)}")
    synsets = [known[stem] for stem in stems]
    classes = classes or tuple(sorted(set(known.values())))
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := sorted({*synsets} - {*numbers}):
        raise ArchiveError(f"{source} has classes that the training data lacks: {first_few(unknown)}")
    labels = np.array([numbers[name] for name in synsets], np.int32)
    order = np.array(sorted(range(len(names)), key=lambda number: (labels[number], names[number])), np.int64)
    return classes, order, labels[order]


# ------------------------------------------------------------------------------- validation labels


def read_labels(root: Path) -> dict[str, str]:
    """Return the synset of each validation image by its name, from Kaggle's solution file or the development kit."""
    try:
        with untrusted(root, "folder of validation labels"):
            for folder in (root, *root.absolute().parents[:3]):  # three above Data/CLS-LOC
                if (folder / SOLUTION).is_file():
                    return _read_solution(folder / SOLUTION)
            for folder in (root / DEVKIT / "data", root / "devkit" / "data", root / "data", root):
                if (folder / TRUTH).is_file() and (folder / META).is_file():
                    return _join_labels(*(read_regular(folder / name, _MAX_BYTES) for name in (TRUTH, META)))
            if (path := root / f"{DEVKIT}.tar.gz").is_file():
                return _join_labels(*_read_devkit(path))
    except OSError as error:
        raise ArchiveError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except InvalidFileError as error:
        raise ArchiveError(str(error)) from error
    fix = f"fix: put {DEVKIT}.tar.gz of image-net.org, or Kaggle's {SOLUTION}, into this folder"
    raise ArchiveError(f"{root} has the validation images, but not their labels; {fix}")


def _read_solution(path: Path) -> dict[str, str]:
    """Read lines 'ILSVRC2012_val_00000001,n01751748 85 1 499 272', after a header."""
    rows = [line.partition(",") for line in read_regular(path, _MAX_BYTES).decode().splitlines()[1:] if line.strip()]
    return {name: boxes.split()[0] for name, _, boxes in rows}


def _read_devkit(path: Path) -> list[bytes]:
    """Return the contents of TRUTH and META in the archive of the development kit."""
    content = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(read_regular(path, _MAX_BYTES), _MAX_BYTES)
    members = {
        os.path.basename(member.name): member for member in walk_tar(str(path), io.BytesIO(content), 0, len(content))
    }
    return [content[members[name].offset :][: members[name].size] for name in (TRUTH, META)]


def _join_labels(truth: bytes, meta: bytes) -> dict[str, str]:
    """Return the synset of each validation image, of which `truth` has the number, line by line."""
    if len(meta) > _MAX_BYTES >> 4:  # it may be compressed
        raise ValueError(f"{META} has {len(meta):,} bytes")
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ArchiveError(f"{META} needs scipy, which is not installed; fix: pip install scipy") from error
    try:
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    except OSError as error:  # of the content, no file is read
        raise ValueError(str(error)) from error
    synset_of = {int(entry["ILSVRC2012_ID"]): str(entry["WNID"]) for entry in synsets}
    return {f"ILSVRC2012_val_{place:08d}": synset_of[int(line)] for place, line in enumerate(truth.split(), 1)}
