"""Archives of small image folders: tars, ZIPs, shards, and ImageNet as it is distributed."""

import io
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path


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


# ------------------------------------------------------------------------------------------ ImageNet

SYNSETS = {"ant": "n00000003", "bee": "n00000001", "cat": "n00000002"}


def _element(kind: int, data: bytes) -> bytes:
    if 0 < len(data) <= 4:
        return struct.pack("<2H", kind, len(data)) + data.ljust(4, b"\0")
    return struct.pack("<2I", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def _matrix(kind: int, shape: tuple[int, int], *parts: bytes) -> bytes:
    flags = _element(6, struct.pack("<2I", kind, 0)) + _element(5, struct.pack("<2i", *shape)) + _element(1, b"")
    return _element(14, flags + b"".join(parts))


def write_meta(synsets: list[str], is_compressed: bool = True) -> bytes:
    """Return a meta.mat with the fields of the development kit of which ILSVRC2012_ID and WNID are needed."""
    names = [b"ILSVRC2012_ID", b"WNID", b"words"]
    values = []
    for number, synset in enumerate(synsets, 1):
        values += [_matrix(6, (1, 1), _element(2, bytes([number]))),
                   _matrix(4, (1, len(synset)), _element(4, synset.encode("utf-16-le"))),
                   _matrix(4, (1, 3), _element(16, b"abc"))]  # fmt: skip
    fields = _element(5, struct.pack("<i", 32)) + _element(1, b"".join(name.ljust(32, b"\0") for name in names))
    array = _matrix(2, (len(synsets), 1), fields, *values)
    if is_compressed:
        packed = zlib.compress(array)
        array = struct.pack("<2I", 15, len(packed)) + packed
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + array


def write_imagenet(source: Path, root: Path, layout: str) -> tuple[Path, Path]:
    """Write the images of a folder as ImageNet is distributed: tars, unpacked, kaggle or flat.

    Returns:
        The folder of the layout; and one with the same images in class folders.
    """
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
           "meta.mat": write_meta(order, layout == "tars")}  # fmt: skip
    inner = "ILSVRC/Data/CLS-LOC/" if layout == "kaggle" else ""
    flat = {**{f"{inner}train/{name}": data for name, data in train.items()},
            **{f"{inner}val/{name}": data for name, data in val.items()}}  # fmt: skip
    if layout == "tars":
        tars = {f"{synset}.tar": _tar_bytes({name.split("/")[1]: train[name] for name in train if synset in name})
                for synset in sorted(SYNSETS.values(), reverse=True)}  # fmt: skip
        write_tar(root / "ILSVRC2012_img_train.tar", tars)
        write_tar(root / "ILSVRC2012_img_val.tar", val)
        (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(
            _gzip(_tar_bytes({f"ILSVRC2012_devkit_t12/data/{name}": data for name, data in kit.items()}))
        )
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


def _gzip(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def _tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            add(archive, name, data)
    return buffer.getvalue()
