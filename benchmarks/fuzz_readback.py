"""Fuzzer for the files that a run reads: damaged files must be rejected, repaired or ignored, never with a traceback.

It damages metrics.jsonl, results.json, predictions.npz, config files, command-line overrides, a
README with tables, the folder index, the record of checked files, packed data sets and their side files, also with a
right checksum, the CSV of a multi-label data set, and the config.json of exported models; and a server answers requests
for packed data in invalid and endless ways. Tars, ZIPs, shards and the files of ImageNet are damaged too, also with
right checksums; no file may appear outside of the cache. Required files must be read or rejected with a ConfigError
that names the file or the URL, or for exported models the value; optional files must be repaired, rebuilt, or left out
with a note that names the file, as those of a report. A case of more than 20 s, and growth of the memory by more than
512 MiB, are violations.

    python benchmarks/fuzz_readback.py --number 5000 --seed 0
"""

import collections
import contextlib
import copy
import faulthandler
import io
import json
import logging
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_support.mutations import MUTATIONS, count_verdicts, damage, parse_fuzz_args, print_verdicts
from PIL import Image

from distribuuuu.checkpoint.weights_files import find_weights_file
from distribuuuu.commands.pack.packer import inspect_pack
from distribuuuu.commands.pack.writer import PackWriter, Record, find_conflicts
from distribuuuu.commands.report.run_report import build_report, list_report, read_run
from distribuuuu.commands.stats.run_groups import Result, group_runs
from distribuuuu.commands.stats.stored_predictions import read_predictions
from distribuuuu.commands.table.tables import format_table, make_row
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.json_file import replace_nonfinite
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.file_check import check_images
from distribuuuu.data.datasets.image_list import Multilabel
from distribuuuu.data.datasets.imagefolder import ImageFolder, open_folder
from distribuuuu.data.datasets.shapes import draw_shapes
from distribuuuu.data.packed import remote as remote_pack
from distribuuuu.data.packed import transport
from distribuuuu.data.packed.dataset import Packed
from distribuuuu.data.packed.format import INDEX
from distribuuuu.records.metric_writers import drop_records_after
from distribuuuu.records.predictions import write_npz as save_arrays
from distribuuuu.records.read_results import read_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.archives import archive_folder, write_imagenet
from support.range_server import CONTRADICTIONS, ENDLESS, Attack, RangeServer

# Seconds for a case, and growth of the memory in MiB, that are violations.
MAX_S, MAX_GROWTH = 20, 512

ODD_VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    2**70,
    1e308,
    "",
    "text",
    "\ud800",
    [],
    {},
    [[1]],
    {"a": 1},
    ["a", 2],
    float("nan"),
]
ODD_YAML = [
    "&a ", "*a ", "<<: *a\n", "!!binary x\n", "!!bool 3\n", "!!timestamp x\n", "? [1, 2]\n", "{", "[" * 60, "- ", ": ",
    "\t", "\0", "\ud800", "!!python/object:os.system x", "9" * 5000, "1e999", "2021-02-31", "|\n", "'", '"', "%",
    "---\n", "!!int ''", "!!set {a}", "~", "\x85", "#", "{1: 2}", "-" * 200,
]  # fmt: skip
RESULTS = Path(__file__).parent / "results"


@dataclass
class Subject:
    """A file to damage and its reader, which raises AssertionError for a wrong result."""

    path: Path
    whole: bytes
    read: Callable[[], Any]
    craft: Callable[[bytes, random.Random], bytes] | None = None
    name: str = ""


# ------------------------------------------------------------------------------------ crafted files


def change_json(value: Any, chance: random.Random) -> Any:
    """Return JSON with one of its values, at any depth, replaced or removed."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.2:
        return copy.deepcopy(chance.choice(ODD_VALUES))
    key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if chance.random() < 0.2:
        del value[key]
    else:
        value[key] = change_json(value[key], chance)
    return value


def craft_json(whole: bytes, chance: random.Random) -> bytes:
    """Return JSON, or lines of JSON, with one value changed."""
    lines = whole.splitlines() if whole.count(b"\n{") else [whole]
    place = chance.randrange(len(lines))
    lines[place] = json.dumps(change_json(json.loads(lines[place]), chance)).encode()
    return b"\n".join(lines)


def craft_yaml(whole: bytes, chance: random.Random) -> bytes:
    """Return YAML with invalid or unusual text inserted at random positions."""
    text = whole.decode()
    for _ in range(chance.choice((1, 1, 3))):
        place = chance.randrange(len(text) + 1)
        text = text[:place] + chance.choice(ODD_YAML) + text[place:]
    return text.encode(errors="surrogatepass")


def craft_array_file(whole: bytes, chance: random.Random) -> bytes:
    """Return an array file with one changed header value, or numbers in its arrays, and a valid checksum and size."""
    length = int.from_bytes(whole[8:16], "little")
    header, rest = json.loads(whole[20 : 20 + length]), bytearray(whole[20 + length :])
    if chance.random() < 0.3:
        place = chance.choice(list(header["arrays"].values()) or [["", [], 20 + length]])[2] - 20 - length
        place += 4 * chance.randrange(4)
        number = chance.choice((0, 1, 2, 3, 9, -1, -(2**31), 2**31 - 1, 2**20)).to_bytes(4, "little", signed=True)
        rest[place : place + 8] = (number + chance.choice((number, bytes(4))))[: len(rest[place : place + 8])]
    else:
        header = change_json(header, chance)
    if isinstance(header, dict) and chance.random() < 0.9:
        text = json.dumps({**header, "size": 10**9}).encode().ljust(length)
        header["size"] = 20 + len(text) + len(rest)
        length = len(text)
    text = json.dumps(header).encode().ljust(length)
    return whole[:8] + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little") + text + bytes(rest)


def craft_npz(whole: bytes, chance: random.Random) -> bytes:
    """Return an npz file with one array replaced, removed or added."""
    with np.load(io.BytesIO(whole)) as file:
        arrays = dict(file)
    name = chance.choice([*arrays, "more", "meta"])
    odd = (np.zeros(0), np.zeros((6, 0)), np.full(6, np.nan), np.full((6, 2), np.inf), np.arange(6), np.array("{}"),
           np.array("[" * 500), np.arange(6) - 3, np.zeros((6, 2), ">f8"), np.array(["a"] * 6), np.zeros(6, "M8[s]"),
           np.zeros(6, "V4"), np.array([[1 + 1j]]))  # fmt: skip
    if name == "meta":
        arrays[name] = np.array(json.dumps(change_json(json.loads(str(arrays[name])), chance)))
    elif chance.random() < 0.2 and name in arrays:
        del arrays[name]
    else:
        arrays[name] = chance.choice(odd)
    np.savez(buffer := io.BytesIO(), **arrays)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------- the files


def draw_images(folder: Path, classes: Sequence[str] = "ab") -> None:
    """Write six small images in two classes."""
    for number in range(6):
        path = folder / classes[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)


def pack(folder: Path, kind: str, is_finished: bool = True) -> None:
    """Write a packed data set of four images in two shards, or only its first shard."""
    folder.mkdir(parents=True)
    identity = {"options": {"format": kind}, "source": {"name": "test"}}
    about = {"classes": ["a", "b"], "mean": [0.5] * 3, "std": [0.5] * 3, "crop": "resized"}
    with PackWriter(folder, identity, max_bytes=100) as writer:
        for number in range(4):
            data = bytes(range(48))
            writer.append(number, Record(data, zlib.crc32(data), number % 2, 4, 4, b"image %d" % number))
        if is_finished:
            writer.finish(4, about)


def read_pack(folder: Path) -> None:
    """Read all images of a packed data set, check whether packing can continue, and verify the files."""
    find_conflicts(folder, {"options": {"format": "raw"}, "source": {}})
    images = Packed(folder.parent, folder.name)
    for index in range(len(images)):
        assert 0 <= images.label(index) < len(images.classes)
        images.describe(index)
        bytes(images.read(index))
    inspect_pack(folder)


def read_parts(folder: Path) -> None:
    """Resume an unfinished pack in a copy of its folder."""
    copy = folder.with_name("resumed")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(copy)
    shutil.copytree(folder, copy)
    identity = {"options": {"format": "raw"}, "source": {"name": "test"}}
    find_conflicts(copy, identity)
    with PackWriter(copy, identity, max_bytes=100) as writer:
        assert len(writer.shards) <= 4


def read_remote_pack(server: RangeServer, folder: Path) -> None:
    """Read all images of a pack at a URL, with an empty cache."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder / "cache")
    remote_pack.read_meta(f"{server.url}/raw")
    images = Packed(server.url, "raw", None, str(folder / "cache"), 1.0, 0.3)
    for index in range(len(images)):
        bytes(images.read(index))


def read_record(root: Path) -> None:
    """Check the evaluation images, which are intact, whatever the record of an earlier check says."""
    cfg = load_cfg(None, ["TEST.DATASET", str(root), "TRAIN.DATASET", str(root), "DATA.CACHE_DIR", str(root / "cache")])
    problem, _ = check_images(cfg, ImageFolder.from_cfg(cfg, train=False), train=False)
    assert not problem, problem


def write_npz(path: Path) -> None:
    """Write the predictions of six images."""
    meta = {"schema": 1, "multilabel": False, "weights": "raw", "epoch": 3, "folder": "/d", "images": "x", "data": "y"}
    names, logits = np.array([f"{number}.jpg" for number in range(6)]), np.arange(12, dtype=np.float32).reshape(6, 2)
    arrays = {"path": names, "label": np.arange(6) % 2, "loss": np.ones(6, np.float32), "logits": logits}
    np.savez(path, classes=np.array(["a", "b"]), meta=np.array(json.dumps(meta)), **arrays)


def read_npz(path: Path) -> None:
    """Read predictions, and what reports derive from them."""
    predictions = read_predictions(path, "run it")
    with np.errstate(all="ignore"):
        assert len(predictions.confidence) == len(predictions.correct) == len(predictions)


def read_index(root: Path) -> None:
    """Open a folder index, which must be correct for any damage of its file."""
    index = open_folder(root, "train", root / "cache")
    names = [Path(index.describe(number)).name for number in range(len(index))]
    assert names == [f"{number}.jpg" for number in (0, 2, 4, 1, 3, 5)]
    assert index.arrays["label"].tolist() == [0, 0, 0, 1, 1, 1]


def read_table(path: Path) -> None:
    """Format the results table of a run."""
    groups, _ = group_runs([Result(path, read_results(path)), Result(path, read_results(path))])
    format_table([make_row(group, "best", {}) for group in groups], "best").encode()


def read_records(path: Path) -> None:
    """Resume the records of a run; all remaining lines must be records."""
    drop_records_after(path, 3, 0)
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        assert json.loads(line)["epoch"] <= 4


def read_shapes(root: Path) -> None:
    """Open the synthetic data set of shapes."""
    draw_shapes(root, num_train=10, num_val=10, size=8)


def make_data_subjects(folder: Path, server: RangeServer) -> list[Subject]:
    """Write the files of packed data and of predictions; return them with their readers."""
    shutil.copytree(folder / "packs" / "raw", folder / "served" / "raw")
    unfinished, records = folder / "unfinished" / "raw", folder / "checked"
    pack(unfinished, "raw", is_finished=False)
    draw_images(records / "val")
    read_record(records)
    (record,) = records.rglob("*.headers")
    write_npz(folder / "predictions.npz")
    readers: dict[Path, tuple[Callable[[], Any], Callable | None, str]] = {
        unfinished / "shard-00000.part": (lambda: read_parts(unfinished), None, ""),
        record: (lambda: read_record(records), None, ""),
        folder / "predictions.npz": (lambda: read_npz(folder / "predictions.npz"), craft_npz, ""),
        folder / "served" / "raw" / INDEX: (lambda: read_remote_pack(server, folder), craft_array_file, server.url),
        folder / "served" / "raw" / "shard-00000.bin": (lambda: read_remote_pack(server, folder), None, server.url),
    }
    return [Subject(path, path.read_bytes(), *reader) for path, reader in readers.items()]


def make_subjects(folder: Path) -> list[Subject]:
    """Write the files; return them with their readers."""
    data, runs = folder / "data", folder / "run"
    draw_images(data / "train")
    open_folder(data, "train", data / "cache")
    (index,) = (data / "cache" / "index").glob("*.bin")
    for kind in ("jpeg", "raw"):
        pack(folder / "packs" / kind, kind)
    runs.mkdir()
    records = [{"kind": kind, "epoch": e, "step": s} for e in (1, 2, 3) for kind, s in (("train", 5), ("eval", 10))]
    csv = runs / "train.csv"
    texts = {
        "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
        "results.json": next(iter(sorted(RESULTS.rglob("*.json")))).read_text(),
        "config.yaml": load_cfg(None, ["FINETUNE.LR_MULT.a", "2.0"]).dump(),
        "README.md": "# Title\n<!-- table one -->\n| a |\n<!-- /table -->\n",
        "train.csv": "image,labels\n" + "".join(f"{n}.jpg,a;b\n" for n in range(5)),
        "main": "0123abc\n",
    }
    for number in range(5):
        (runs / f"{number}.jpg").write_bytes(b"")
    for name, text in texts.items():
        (runs / name).write_text(text)
    (runs / "model.safetensors").write_bytes(b"")
    hub = folder / "hub"
    (hub / "refs").mkdir(parents=True)
    (hub / "snapshots" / "0123abc").mkdir(parents=True)
    (hub / "snapshots" / "0123abc" / "model.safetensors").write_bytes(b"")
    (hub / "refs" / "main").write_text("0123abc\n")
    read_shapes(folder / "shapes")
    readers: dict[Path, tuple[Callable[[], Any], Callable | None]] = {
        runs / "metrics.jsonl": (lambda: read_records(runs / "metrics.jsonl"), craft_json),
        runs / "results.json": (lambda: read_table(runs / "results.json"), craft_json),
        runs / "config.yaml": (lambda: load_cfg(str(runs / "config.yaml")).dump(), craft_yaml),
        csv: (lambda: Multilabel(Multilabel.open_table(csv)), None),
        hub / "refs" / "main": (lambda: find_weights_file(str(hub)), None),
        index: (lambda: read_index(data), None),
        folder / "shapes" / "README.txt": (lambda: read_shapes(folder / "shapes"), None),
    }
    for kind in ("jpeg", "raw"):
        place = folder / "packs" / kind
        readers[place / INDEX] = (lambda place=place: read_pack(place), craft_array_file)
        readers[place / "shard-00000.bin"] = (lambda place=place: read_pack(place), None)
    return [Subject(path, path.read_bytes(), *reader) for path, reader in readers.items()]


# ------------------------------------------------------------------------------------ untrusted runs


def read_report(run: Path) -> None:
    """Build the report of a run, as a page and as JSON; what is left out is named."""
    files = read_run(str(run))
    page = build_report(files)
    assert "\x1b" not in page and all(str(run) in note for note in files.history.notes)
    json.dumps(replace_nonfinite(list_report(files)), allow_nan=False, default=str)


def make_report_subjects(run: Path) -> list[Subject]:
    """Write the files of a finished run; return those that a report reads."""
    run.mkdir()
    label = np.arange(12, dtype=np.int32) % 3
    meta = {"schema": 1, "weights": "raw", "epoch": 2, "folder": "", "data": "dummy", "multilabel": False}
    save_arrays(run / "predictions.npz", {
        "meta": np.array(json.dumps(meta)), "classes": np.array(["a", "b", "c"]), "label": label,
        "path": np.array([f"image {index}" for index in range(12)]), "loss": np.ones(12, np.float32),
        "logits": np.eye(3, dtype=np.float32)[label[::-1]],
    })  # fmt: skip
    numbers = {"loss": 0.5, "top1": 50.0, "count": 320, "lr": 0.1, "images_per_s": 9.0, "wait": 0.1, "seconds": 2.0}
    records = [{"kind": kind, "epoch": epoch, "step": 5, **numbers} for epoch in (1, 2) for kind in ("train", "eval")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "results.json").write_bytes(next(iter(sorted(RESULTS.rglob("*.json")))).read_bytes())
    (run / "train.log").write_text("resumed from x: epoch 2, step 1\n")
    crafts = {"predictions.npz": craft_npz, "metrics.jsonl": craft_json, "results.json": craft_json, "train.log": None}
    return [
        Subject(run / name, (run / name).read_bytes(), lambda: read_report(run), craft)
        for name, craft in crafts.items()
    ]


# ----------------------------------------------------------------------------------------- archives


def craft_tar(whole: bytes, chance: random.Random) -> bytes:
    """Return a tar with one to three fields of its headers changed, and valid checksums."""
    data = bytearray(whole)
    headers = [place for place in range(0, len(data), 512) if data[place + 257 : place + 262] == b"ustar"]
    for place in chance.choices(headers, k=chance.choice((1, 1, 3))):
        start, size = chance.choice(((0, 100), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
        kind = bytes([chance.choice(b"0123456789gxLKSMVDNX")])
        values = (b"../../x.jpg", b"/etc/x.jpg", b"a//./b.jpg", b"b/1.jpg\0", b"\0", b"\xff" * 12, b"-1\0", kind,
                  b"\x80" + b"\xff" * 11, b"77777777777\0", b"00000000000\0", chance.randbytes(size))  # fmt: skip
        value = chance.choice(values)[:size]
        data[place + start : place + start + len(value)] = value
        total = sum(data[place : place + 512]) - sum(data[place + 148 : place + 156]) + 8 * 32
        data[place + 148 : place + 156] = b"%06o\0 " % total
    return bytes(data)


def craft_zip(whole: bytes, chance: random.Random) -> bytes:
    """Return a ZIP with one to three fields of its headers and directory changed."""
    data = bytearray(whole)
    kinds = {b"PK\3\4": 30, b"PK\1\2": 46, b"PK\5\6": 22}
    places = [(match.start(), kinds[match[0]]) for match in re.finditer(rb"PK(\x03\x04|\x01\x02|\x05\x06)", data)]
    for start, length in chance.choices(places, k=chance.choice((1, 1, 3))):
        place = start + chance.randrange(4, length)
        number = chance.choice((0, 1, 8, 99, 2**16 - 1, 2**31, 2**32 - 1, chance.randrange(2**32)))
        value = number.to_bytes(4, "little")[: chance.choice((1, 2, 4))]
        data[place : place + len(value)] = value
    return bytes(data)


def read_archive(root: Path, name: str) -> None:
    """Read all images of archives, with the index in the cache folder; no other file may appear."""
    words = ["DATA.NAME", name, "TRAIN.DATASET", str(root), "DATA.CACHE_DIR", str(root.parent / "cache")]
    cfg, before = load_cfg(None, words), sorted(root.rglob("*"))
    family = DATASETS.get(name)
    try:
        for train in (True, False):
            images = family.from_cfg(cfg, train)
            for index in range(len(images)):
                assert 0 <= images.label(index) < len(images.classes)
                assert ".." not in images.describe(index).split("/")
                try:
                    assert len(images.read(index)) <= 1 << 20
                except ValueError as error:  # a broken image
                    raise ConfigError(f"{root}: {images.describe(index)}: {error}") from error
    finally:
        assert sorted(root.rglob("*")) == before, "a file has appeared"


def make_archive_subjects(folder: Path) -> list[Subject]:
    """Write archives of each kind; return them with their readers."""
    for split in ("train", "val"):
        draw_images(folder / "images" / split, ("ant", "bee"))
    subjects = []
    for kind in ("tar", "pax", "zip", "deflated", "shards"):
        root = archive_folder(folder / "images", folder / kind, kind)
        path = next(path for path in sorted(root.iterdir()) if path.name.startswith("train"))
        craft = craft_zip if path.suffix == ".zip" else craft_tar
        subjects.append(Subject(path, path.read_bytes(), partial(read_archive, root, "archive"), craft))
    files = {
        "tars": ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"),
        "flat": ("ILSVRC2012_devkit_t12/data/meta.mat",),
        "kaggle": ("LOC_val_solution.csv",),
    }
    for layout, names in files.items():
        root, _ = write_imagenet(folder / "images", folder / "imagenet", layout)
        for path in map(root.joinpath, names):
            craft = craft_tar if path.suffix == ".tar" else None
            subjects.append(Subject(path, path.read_bytes(), partial(read_archive, root, "imagenet"), craft))
    return subjects


def run_archive_trials(folder: Path, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Damage and read archives; yield the file, the mutation and the verdict of each trial."""
    chance, subjects = random.Random(seed), make_archive_subjects(folder)
    yield from run_subject_trials(subjects, folder, number, chance)


def fuzz_archives(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage archives `number` times; return the counts of verdicts by file, and the violations."""
    return count_verdicts(run_archive_trials(folder, number, seed))


# ------------------------------------------------------------------------------------ exported models

ODD_OPTIONS = {
    "architecture": "resnet1\x1b[2J", "num_classes": 2**31 - 1, "input_size": [3, 8192, 8192], "crop_pct": 1e-2,
    "model_args": {"no_such": 1}, "label_names": ["a"] * 9, "mean": [1e308] * 3, "std": [5e-324] * 3,
    "MODEL.ARCH": "resnet8\n", "MODEL.KWARGS.no such": {"a": [1]}, "TASK.NAME": "\u202e", "DATA.NAME": "packed",
    "OUT_DIR": "\0", "CFG_DEST": "../x", "DATA.MEAN": ["\udce4"] * 3, "OPTIM.STEPS": [2**70] * 3, "": {"": {"": ""}},
}  # fmt: skip


def write_exports(folder: Path) -> list[Path]:
    """Write a small model in our format and in that of timm; return the paths of config.json."""
    import torch

    from distribuuuu.commands.export.exporter import write_safetensors, write_timm
    from distribuuuu.inference.loaded_run import LoadedRun
    from distribuuuu.models import build_model

    paths = []
    for arch, write in (("resnet8", write_safetensors), ("timm/test_resnet", write_timm)):
        words = ["MODEL.ARCH", arch, "MODEL.NUM_CLASSES", "3", "TRAIN.IM_SIZE", "32", "TEST.IM_SIZE", "36"]
        cfg = load_cfg(None, [*words, "DATA.MEAN", "[0.5, 0.5, 0.5]", "DATA.STD", "[0.2, 0.2, 0.2]"])
        weights = build_model(cfg).state_dict()
        (out := folder / write.__name__).mkdir(parents=True)
        write(LoadedRun("", "raw", cfg, ("a", "b", "c"), weights, given_device=torch.device("cpu")), out)
        paths.append(out / "config.json")
    return paths


def nest(value: Any, chance: random.Random) -> Any:
    """Return a value inside of 1 to 900 lists or objects."""
    for _ in range(chance.choice((1, 10, 31, 40, 900))):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


def craft_export(whole: bytes, chance: random.Random) -> bytes:
    """Return the config of an export with one to three values replaced, removed, added or nested."""
    content = json.loads(whole)
    for _ in range(chance.choice((1, 1, 2, 3))):
        part: Any = content
        inner = [value for value in content.values() if isinstance(value, dict) and value]
        for _ in range(chance.choice((0, 1, 2))):
            part = chance.choice(inner) if inner else part
            inner = [value for value in part.values() if isinstance(value, dict) and value]
        key = chance.choice([*part] * 3 + [*ODD_OPTIONS])
        if chance.random() < 0.15:
            part.pop(key, None)
        elif chance.random() < 0.15:
            part[key] = nest(part.get(key), chance)
        elif chance.random() < 0.3:
            part[key] = change_json(part.get(key), chance)
        else:
            odd = [*ODD_VALUES, *ODD_OPTIONS.values(), ODD_OPTIONS.get(key)]
            part[key] = copy.deepcopy(chance.choice(odd))
    try:
        text = json.dumps(content)
    except RecursionError:  # values were nested twice
        return craft_export(whole, chance)
    if chance.random() < 0.03:  # what the encoder does not write
        text = text.replace('"a"', chance.choice(("9" * 5000, "1e999", "-Infinity", "[" * 10**5)), 1)
    return text.encode()


def run_export_trials(folder: Path, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Damage the config.json of exported models and load them; yield the file, the mutation and the verdict."""
    from distribuuuu import load_run

    chance, paths = random.Random(seed), write_exports(folder)
    subjects = [
        Subject(path, path.read_bytes(), lambda path=path: load_run(path.parent, device="cpu")) for path in paths
    ]
    for subject in subjects:
        subject.read()
    for _ in range(number):
        subject = chance.choice(subjects)
        restore(subject)
        if chance.random() < 0.8:
            subject.path.write_bytes(craft_export(subject.whole, chance))
            mutation = "crafted"
        else:
            mutation = damage(subject.path, subject.whole, [other.whole for other in subjects], chance)
        yield f"exported {subject.path.name}, {subject.path.parent.name}", mutation, verdict_of(subject.read, "")


# ------------------------------------------------------------------------------------------ fuzzing


def read_words(chance: random.Random) -> tuple[str, str]:
    """Parse a random command-line override; return it and the verdict."""
    text = "".join(chance.choice((*ODD_YAML, "1", ",", "]", "}", "a", "(")) for _ in range(chance.randrange(1, 6)))
    key = chance.choice(
        ("OPTIM.BASE_LR", "OPTIM.STEPS", "MODEL.KWARGS.x", "TRAIN.WORKERS", "FINETUNE.FREEZE", "OUT_DIR")
    )
    return f"{key} {text!r}", verdict_of(lambda: load_cfg(None, [key, text]).dump(), key)


class HangError(BaseException):
    """A case that does not end."""


def end_case(*_: Any) -> None:
    """Raise HangError: the handler of the alarm."""
    raise HangError(f"more than {MAX_S} s")


def verdict_of(read: Callable[[], Any], name: str) -> str:
    """Return 'read', 'refused' or 'violation: ...'."""
    previous = signal.signal(signal.SIGALRM, end_case)
    signal.alarm(MAX_S)
    try:
        read()
    except ConfigError as error:
        return "refused" if name in str(error) else f"violation: {name} is not named: {error}"
    except OSError as error:  # raised by the shapes data set for its folder
        return "refused" if "draw the data set" in str(error) else f"violation: {traceback.format_exc()}"
    except BaseException:
        return f"violation: {traceback.format_exc()}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return "read"


def damaged_answer(chance: random.Random) -> Attack:
    """Return an attack with the right answer, damaged."""
    mutate = chance.choice(MUTATIONS)

    def answer(first: int, last: int, size: int, body: bytes) -> Iterator[bytes]:
        lines = [
            "HTTP/1.1 206 OK",
            f"Content-Range: bytes {first}-{last}/{size}",
            f"Content-Length: {len(body)}",
            "",
            "",
        ]
        data = bytearray("\r\n".join(lines).encode() + body)
        mutate(data, chance)
        return iter([bytes(data)])

    return answer


def read_answer(server: RangeServer, whole: bytes, chance: random.Random) -> tuple[str, str]:
    """Read a range from a server with a hostile answer; return the answer and the verdict."""
    attacks = {**ENDLESS, **CONTRADICTIONS, **{f"damaged {n}": damaged_answer(chance) for n in range(60)}}
    name, start = chance.choice(list(attacks)), chance.randrange(len(whole) - 1)
    end = chance.randrange(start + 1, len(whole) + 1)
    server.attack = attacks[name]

    def is_wrong(part: transport.Part) -> str:
        return "" if part.data == whole[start:end] else "wrong bytes"

    verdict = verdict_of(lambda: transport.fetch(f"{server.url}/file", start, end, 0.15, is_wrong), server.url)
    server.attack = None
    return name[:60], verdict


def restore(subject: Subject) -> None:
    """Restore the original file."""
    if subject.path.is_dir():
        subject.path.rmdir()
    subject.path.parent.mkdir(parents=True, exist_ok=True)
    subject.path.write_bytes(subject.whole)


def run_trials(folder: Path, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Damage and read files; yield the file, the mutation and the verdict of each trial."""
    (folder / "served").mkdir(parents=True)
    (folder / "served" / "file").write_bytes(whole := bytes(range(256)) * 300)
    usual = transport.FIRST_PAUSE_S, remote_pack.MEMORY_S, remote_pack.START_S, remote_pack.START_TIMEOUT_S
    transport.FIRST_PAUSE_S, remote_pack.MEMORY_S = 0.001, 0
    remote_pack.START_S, remote_pack.START_TIMEOUT_S = 0.3, 0.3
    try:
        yield from run_trials_on_a_server(whole, folder, number, seed)
    finally:
        transport.FIRST_PAUSE_S, remote_pack.MEMORY_S, remote_pack.START_S, remote_pack.START_TIMEOUT_S = usual


def run_trials_on_a_server(whole: bytes, folder: Path, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield the trials of `run_trials`, with a server of `whole` as `file`."""
    with RangeServer(folder / "served") as server:
        yield from run_trials_with(server, whole, folder, number, random.Random(seed))


def run_trials_with(
    server: RangeServer, whole: bytes, folder: Path, number: int, chance: random.Random
) -> Iterator[tuple[str, str, str]]:
    """Yield the trials of `run_trials`; the server has `whole` as `file`."""
    subjects = [*make_subjects(folder), *make_data_subjects(folder, server)]
    subjects += make_report_subjects(folder / "reported")
    others = (("words", lambda: read_words(chance)), ("server", lambda: read_answer(server, whole, chance)))
    yield from run_subject_trials(subjects, folder, number, chance, others)


def run_subject_trials(
    subjects: list[Subject], folder: Path, number: int, chance: random.Random, others: Sequence[tuple] = ()
) -> Iterator[tuple[str, str, str]]:
    """Damage and read one of the subjects at a time, or run one of other trials, each in a tenth of the cases."""
    for subject in subjects:
        subject.read()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(number):
        for name, trial in others:
            if chance.random() < 0.1:
                yield name, *trial()
                break
        else:
            yield damage_and_read(subjects, folder, chance, before)


def damage_and_read(subjects: list[Subject], folder: Path, chance: random.Random, before: int) -> tuple[str, str, str]:
    """Damage one of the subjects, read it and restore it; return its name, the mutation and the verdict."""
    subject = chance.choice(subjects)
    restore(subject)
    if subject.craft and chance.random() < 0.5:
        subject.path.write_bytes(subject.craft(subject.whole, chance))
        mutation = "crafted"
    else:
        mutation = damage(subject.path, subject.whole, [other.whole for other in subjects], chance)
    verdict = verdict_of(subject.read, subject.name or str(folder))
    restore(subject)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > MAX_GROWTH:
        verdict = f"violation: the memory has grown by {grown} MiB"
    return str(subject.path.relative_to(folder)), mutation, verdict


def fuzz(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage files `number` times; return the counts of verdicts by file, and the violations."""
    return count_verdicts(run_trials(folder, number, seed))


def fuzz_exports(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage exported models `number` times; return the counts of verdicts by file, and the violations."""
    return count_verdicts(run_export_trials(folder, number, seed))


def main() -> int:
    """Run the fuzzer, print a summary, and return the status."""
    args = parse_fuzz_args(__doc__)
    faulthandler.enable()
    logging.getLogger("distribuuuu").setLevel(logging.ERROR)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts, violations = fuzz(Path(folder) / "files", args.number, args.seed)
        for trials in (fuzz_exports, fuzz_archives):
            own, found = trials(Path(folder) / trials.__name__, args.number, args.seed)
            counts, violations = {**counts, **own}, [*violations, *found]
    print_verdicts(counts, violations)
    seconds = time.perf_counter() - start
    print(f"{args.number} mutations, and as many of exports and of archives, with seed {args.seed} in {seconds:.0f} s: "
          f"{len(violations)} violations")  # fmt: skip
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
