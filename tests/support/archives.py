"""Archives of small image folders: tars, ZIPs, shards, and ImageNet as it is distributed."""

import gzip
import io
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields) -> None:
    """Add a member; `fields` are attributes of `TarInfo`."""
    member = tarfile.TarInfo(name)
    member.size, member.type = len(data), kind
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(data))


def write_tar(path: Path, files: dict[str, bytes], format: int = tarfile.GNU_FORMAT) -> Path:
    """Write files by name into a tar."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in files.items():
            add(archive, name, data)
    return path


def write_zip(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """Write files by name into a ZIP."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by relative name, in an order of no meaning."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return dict(sorted(files.items(), key=lambda item: zlib.crc32(item[0].encode())))


def archive_folder(source: Path, root: Path, kind: str) -> Path:
    """Write the splits of an image folder as archives of a kind into ROOT; return it."""
    for split in ("train", "val"):
        files = files_of(source / split)
        if kind == "tar":
            write_tar(root / f"{split}.tar", files)
        elif kind == "pax":
            write_tar(root / f"{split}.tar", {f"./{split}/{name}": files[name] for name in files}, tarfile.PAX_FORMAT)
        elif kind == "tars":
            for number in range(3):
                write_tar(root / f"{split}-{number:03d}.tar", dict([*files.items()][number::3]))
        elif kind in ("zip", "deflated"):
            write_zip(root / f"{split}.zip", files, zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED)
        elif kind == "shards":  # in the order of the folder, so that the images have the same numbers
            samples = sorted(files)
            classes = sorted({name.partition("/")[0] for name in samples})
            for number in range(3):
                part = range(number * len(samples) // 3, (number + 1) * len(samples) // 3)
                shard = {}
                for sample in part:
                    shard[f"{sample:06d}.jpg"] = files[samples[sample]]
                    shard[f"{sample:06d}.cls"] = str(classes.index(samples[sample].partition("/")[0])).encode()
                write_tar(root / f"{split}-{number:06d}.tar", shard)
    if kind == "one zip":
        write_zip(root / "data.zip", {f"{split}/{name}": data for split in ("train", "val")
                                      for name, data in files_of(source / split).items()})  # fmt: skip
        return root / "data.zip"
    return root


SYNSETS = {"ant": "n00000003", "bee": "n00000001", "cat": "n00000002"}


def write_meta(synsets: list[str]) -> bytes:
    """Return a meta.mat with the fields of the development kit that are needed."""
    kinds = [("ILSVRC2012_ID", object), ("WNID", object)]
    rows = np.array([(number, synset) for number, synset in enumerate(synsets, 1)], kinds)
    buffer = io.BytesIO()
    pytest.importorskip("scipy.io").savemat(buffer, {"synsets": rows.reshape(-1, 1)}, do_compression=True)
    return buffer.getvalue()


def write_imagenet(source: Path, root: Path, layout: str) -> tuple[Path, Path]:
    """Write images as ImageNet is distributed (tars, unpacked, kaggle, flat); return it, and them in class folders."""
    root, plain = root / layout, root / "plain"
    train = {f"{SYNSETS[name.split('/')[0]]}/{name.split('/')[1]}": data
             for name, data in files_of(source / "train").items()}  # fmt: skip
    val, truth = {}, []
    for number, (name, data) in enumerate(files_of(source / "val").items(), 1):
        val[f"ILSVRC2012_val_{number:08d}.JPEG"] = data
        truth.append(SYNSETS[name.split("/")[0]])
    folders = {**{f"train/{name}": data for name, data in train.items()},
               **{f"val/{synset}/{name}": val[name] for name, synset in zip(val, truth, strict=True)}}  # fmt: skip
    order = ["n00000002", "n00000003", "n00000001"]
    kit = {"ILSVRC2012_validation_ground_truth.txt": "".join(f"{order.index(name) + 1}\n" for name in truth).encode(),
           "meta.mat": write_meta(order)}  # fmt: skip
    inner = "ILSVRC/Data/CLS-LOC/" if layout == "kaggle" else ""
    flat = {**{f"{inner}train/{name}": data for name, data in train.items()},
            **{f"{inner}val/{name}": data for name, data in val.items()}}  # fmt: skip
    if layout == "tars":
        tars = {f"{synset}.tar": _tar_bytes({name.split("/")[1]: train[name] for name in train if synset in name})
                for synset in sorted(SYNSETS.values(), reverse=True)}  # fmt: skip
        write_tar(root / "ILSVRC2012_img_train.tar", tars)
        write_tar(root / "ILSVRC2012_img_val.tar", val)
        kit = _tar_bytes({f"ILSVRC2012_devkit_t12/data/{name}": data for name, data in kit.items()})
        (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(kit))
        flat = {}
    elif layout == "kaggle":
        lines = [f"{name[:-5]},{synset} 1 2 3 4" for name, synset in zip(val, truth, strict=True)]
        flat["LOC_val_solution.csv"] = "\n".join(["ImageId,PredictionString", *lines]).encode()
    else:
        flat |= {f"ILSVRC2012_devkit_t12/data/{name}": data for name, data in kit.items()}
    for folder, files in ((root, flat), (plain, folders)):
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return root, plain


def _tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            add(archive, name, data)
    return buffer.getvalue()
