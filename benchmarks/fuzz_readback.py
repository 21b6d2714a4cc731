"""Fuzzer for the files that a run reads: damaged files must be rejected, repaired or ignored, never with a traceback.

It damages metrics.jsonl, results.json, predictions.npz, config files, packed data sets, also with a
right checksum, the CSV of a multi-label data set, and the config.json of exported models. Tars, ZIPs, shards and the
files of ImageNet are damaged too, also with right checksums; no file may appear outside of the cache. Required files
must be read or rejected with a ConfigError that names the file; optional files must be repaired, rebuilt, or left out
with a note that names the file, as those of a report.

    python benchmarks/fuzz_readback.py --number 5000 --seed 0
"""

import collections
import copy
import io
import json
import random
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_support.mutations import Subject, count_verdicts, run_fuzzer, run_trials
from PIL import Image

from distribuuuu.commands.pack.encode import Record
from distribuuuu.commands.pack.packer import PackWriter, find_conflict
from distribuuuu.commands.report.run_report import build_report, read_run
from distribuuuu.commands.stats.run_groups import Result, group_runs
from distribuuuu.commands.stats.stored_predictions import read_predictions
from distribuuuu.commands.table.table import format_table, make_row
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.image_list import Multilabel
from distribuuuu.data.packed.dataset import Packed
from distribuuuu.data.packed.format import INDEX
from distribuuuu.records.metric_writers import drop_records_after
from distribuuuu.records.predictions import write_npz as save_arrays
from distribuuuu.records.read_results import read_results
from distribuuuu.records.results import replace_nonfinite

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.archives import archive_folder, write_imagenet

ODD_VALUES = [None, True, -1, 0, 1.5, 2**70, 1e308, "", "text", "\ud800", [], {}, [[1]], {"a": 1}, float("nan")]
ODD_YAML = [
    "&a ", "*a ", "<<: *a\n", "!!binary x\n", "!!bool 3\n", "!!timestamp x\n", "? [1, 2]\n", "{", "[" * 60, "- ", ": ",
    "\t", "\0", "\ud800", "!!python/object:os.system x", "9" * 5000, "1e999", "2021-02-31", "|\n", "'", '"', "%",
    "---\n", "!!int ''", "!!set {a}", "~", "\x85", "#", "{1: 2}", "-" * 200,
]  # fmt: skip
RESULTS = Path(__file__).parent / "results"


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


def pack(folder: Path, kind: str) -> None:
    """Write a packed data set of four images in two shards."""
    folder.mkdir(parents=True)
    identity = {"options": {"format": kind}, "source": {"name": "test"}}
    about = {"classes": ["a", "b"], "mean": [0.5] * 3, "std": [0.5] * 3, "crop": "resized"}
    writer = PackWriter(folder, identity, max_bytes=100)
    for number in range(4):
        data = bytes(range(48))
        writer.append(Record(data, zlib.crc32(data), number % 2, 4, 4, b"image %d" % number))
    writer.finish(about)


def read_pack(folder: Path) -> None:
    """Read all images of a packed data set, and compare it with another source."""
    find_conflict(folder, {"options": {"format": "raw"}, "source": {}})
    images = Packed(folder.parent, folder.name)
    for index in range(len(images)):
        assert 0 <= images.label(index) < len(images.classes)
        images.describe(index)
        bytes(images.read(index))


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


def read_table(path: Path) -> None:
    """Format the results table of a run."""
    groups, _ = group_runs([Result(path, read_results(path)), Result(path, read_results(path))])
    format_table([make_row(group, "best") for group in groups], "best").encode()


def read_records(path: Path) -> None:
    """Resume the records of a run; all remaining lines must be records."""
    drop_records_after(path, 3, 0)
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        assert json.loads(line)["epoch"] <= 4


def make_subjects(folder: Path) -> list[Subject]:
    """Write the files; return them with their readers."""
    (runs := folder / "run").mkdir()
    records = [{"kind": kind, "epoch": e, "step": s} for e in (1, 2, 3) for kind, s in (("train", 5), ("eval", 10))]
    texts = {
        "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
        "results.json": next(iter(sorted(RESULTS.rglob("*.json")))).read_text(),
        "config.yaml": load_cfg(None, ["FINETUNE.LR_MULT.a", "2.0"]).dump(),
        "train.csv": "image,labels\n" + "".join(f"{n}.jpg,a;b\n" for n in range(5)),
    }
    for number in range(5):
        (runs / f"{number}.jpg").write_bytes(b"")
    for name, text in texts.items():
        (runs / name).write_text(text)
    write_npz(runs / "predictions.npz")
    readers: dict[Path, tuple[Callable[[], Any], Callable | None]] = {
        runs / "metrics.jsonl": (lambda: read_records(runs / "metrics.jsonl"), craft_json),
        runs / "results.json": (lambda: read_table(runs / "results.json"), craft_json),
        runs / "config.yaml": (lambda: load_cfg(str(runs / "config.yaml")).dump(), craft_yaml),
        runs / "train.csv": (lambda: Multilabel(Multilabel.open_table(runs / "train.csv")), None),
        runs / "predictions.npz": (lambda: read_npz(runs / "predictions.npz"), craft_npz),
    }
    for kind in ("jpeg", "raw"):
        place = folder / "packs" / kind
        pack(place, kind)
        readers[place / INDEX] = (lambda place=place: read_pack(place), craft_array_file)
        readers[place / "shard-00000.bin"] = (lambda place=place: read_pack(place), None)
    return [Subject(path, path.read_bytes(), *reader) for path, reader in readers.items()]


# ------------------------------------------------------------------------------------ untrusted runs


def read_report(run: Path) -> None:
    """Build the report of a run, as a page and as JSON; what is left out is named."""
    files = read_run(str(run))
    page = build_report(files)
    assert "\x1b" not in page and all(str(run) in note for note in files.history.notes)
    json.dumps(replace_nonfinite(files.figures), allow_nan=False, default=str)


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


def fuzz_archives(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage archives `number` times; return the counts of verdicts by file, and the violations."""
    return count_verdicts(run_trials(make_archive_subjects(folder), folder, number, seed))


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

    from distribuuuu.commands.export.exporter import describe_usage, write_safetensors, write_timm
    from distribuuuu.inference.loaded_run import LoadedRun
    from distribuuuu.models import build_model

    paths = []
    for arch, write in (("resnet8", write_safetensors), ("timm/test_resnet", write_timm)):
        words = ["MODEL.ARCH", arch, "MODEL.NUM_CLASSES", "3", "TRAIN.IM_SIZE", "32", "TEST.IM_SIZE", "36"]
        cfg = load_cfg(None, [*words, "DATA.MEAN", "[0.5, 0.5, 0.5]", "DATA.STD", "[0.2, 0.2, 0.2]"])
        weights = build_model(cfg).state_dict()
        (out := folder / write.__name__).mkdir(parents=True)
        run = LoadedRun("", "raw", cfg, ("a", "b", "c"), weights, given_device=torch.device("cpu"))
        write(run, out, describe_usage(run))
        paths.append(out / "config.json")
    return paths


def craft_export(whole: bytes, chance: random.Random) -> bytes:
    """Return the config of an export with one to three values replaced, removed or added, at any depth."""
    content = json.loads(whole)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if chance.random() < 0.5:
            content = change_json(content, chance)
        elif isinstance(content, dict):
            inner = [content, *(value for value in content.values() if isinstance(value, dict))]
            key = chance.choice([*ODD_OPTIONS])
            chance.choice(inner)[key] = copy.deepcopy(ODD_OPTIONS[key])
    return json.dumps(content).encode()


def fuzz_exports(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage exported models `number` times; return the counts of verdicts by file, and the violations."""
    from distribuuuu import load_run

    subjects = [
        Subject(path, path.read_bytes(), lambda path=path: load_run(path.parent, device="cpu"), craft_export, " ")
        for path in write_exports(folder)
    ]
    return count_verdicts(run_trials(subjects, folder, number, seed))


def fuzz(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage files `number` times; return the counts of verdicts by file, and the violations."""
    folder.mkdir(parents=True, exist_ok=True)
    subjects = [*make_subjects(folder), *make_report_subjects(folder / "reported")]
    return count_verdicts(run_trials(subjects, folder, number, seed))


def main() -> int:
    """Run the fuzzer, print a summary, and return the status."""
    return run_fuzzer(__doc__, fuzz, fuzz_exports, fuzz_archives)


if __name__ == "__main__":
    sys.exit(main())
