"""Fuzzer for the files that a run reads: damaged files must be rejected, repaired or ignored, never with a traceback.

It damages metrics.jsonl, results.json, config files, command-line overrides, reported numbers, a README with tables,
the folder index, packed data sets and the CSV of a multi-label data set. Required files must be read or rejected with a
ConfigError that names the file; optional files must be repaired or rebuilt.

    python benchmarks/fuzz_readback.py --number 5000 --seed 0
"""

import collections
import faulthandler
import json
import logging
import random
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutations import count_verdicts, damage, parse_fuzz_args, print_verdicts
from PIL import Image

from distribuuuu.checkpoint.locate import find_weights_file
from distribuuuu.cli.make_table import read_reported, write_block
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.datasets.folder_index import open_index
from distribuuuu.data.datasets.image_list import Multilabel
from distribuuuu.data.datasets.packed import Packed
from distribuuuu.data.datasets.shapes import draw_shapes
from distribuuuu.data.packing.pack import inspect_pack
from distribuuuu.data.packing.packed_format import INDEX
from distribuuuu.data.packing.writer import PackWriter, Record, find_conflicts
from distribuuuu.report.record_files import drop_records_after
from distribuuuu.report.results import read_results
from distribuuuu.report.tables import Run, format_table, group_runs, make_row

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


# ------------------------------------------------------------------------------------ crafted files


def change_json(value: Any, chance: random.Random) -> Any:
    """Return JSON with one of its values, at any depth, replaced or removed."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.2:
        return chance.choice(ODD_VALUES)
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
    """Return an array file with one changed header value and a valid checksum."""
    size = int.from_bytes(whole[8:16], "little")
    header = change_json(json.loads(whole[20 : 20 + size]), chance)
    text = json.dumps(header).encode().ljust(size)
    return (
        whole[:8] + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little") + text + whole[20 + size :]
    )


# ---------------------------------------------------------------------------------------- the files


def draw_images(folder: Path) -> None:
    """Write six small images in two classes."""
    for number in range(6):
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)


def pack(folder: Path, kind: str) -> None:
    """Write a packed data set of four images."""
    folder.mkdir(parents=True)
    identity = {"options": {"format": kind}, "source": {"name": "test"}}
    about = {"classes": ["a", "b"], "mean": [0.5] * 3, "std": [0.5] * 3, "crop": "resized"}
    with PackWriter(folder, identity, max_bytes=100) as writer:
        for number in range(4):
            data = bytes(range(48))
            writer.append(number, Record(data, zlib.crc32(data), number % 2, 4, 4, b"image %d" % number), (number,))
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


def read_index(root: Path) -> None:
    """Open a folder index, which must be correct for any content of its file."""
    index = open_index(root, "train", root / "cache")
    assert [Path(index.path(number)).name for number in range(len(index))] == [f"{n}.jpg" for n in (0, 2, 4, 1, 3, 5)]
    assert [index.class_bounds(number) for number in range(2)] == [(0, 3), (3, 6)]


def read_table(path: Path) -> None:
    """Format the results table of a run."""
    groups, _ = group_runs([Run(path, read_results(path)), Run(path, read_results(path))])
    format_table([make_row(group, "config", "best", {}) for group in groups], "config", "best").encode()


def read_records(path: Path) -> None:
    """Resume the records of a run; all remaining lines must be records."""
    drop_records_after(path, 3, 0)
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        assert json.loads(line)["epoch"] <= 4


def read_reported_numbers(path: Path) -> None:
    """Read the reported results and convert the values of each entry."""
    problems: list[str] = []
    reported = read_reported(path, problems)
    for entry in reported.values():
        float(entry.get("params", 0)), int(float(entry.get("global_batch", 0)))
    if problems:
        raise ConfigError(problems)


def read_shapes(root: Path) -> None:
    """Open the synthetic data set of shapes."""
    draw_shapes(root, num_train=10, num_val=10, size=8)


def make_subjects(folder: Path) -> list[Subject]:
    """Write the files; return them with their readers."""
    data, runs = folder / "data", folder / "run"
    draw_images(data / "train")
    open_index(data, "train", data / "cache")
    for kind in ("jpeg", "raw"):
        pack(folder / "packs" / kind, kind)
    runs.mkdir()
    records = [{"kind": kind, "epoch": e, "step": s} for e in (1, 2, 3) for kind, s in (("train", 5), ("eval", 10))]
    csv = runs / "train.csv"
    texts = {
        "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
        "results.json": next(iter(sorted(RESULTS.rglob("*.json")))).read_text(),
        "config.yaml": load_cfg(None, ["FINETUNE.LR_MULT.a", "2.0"]).dump(),
        "reported.yaml": (Path(__file__).parent / "reported.yaml").read_text(),
        "README.md": "# Title\n<!-- table one -->\n| a |\n<!-- /table -->\n",
        "train.csv": "image,labels\n" + "".join(f"{n}.jpg,a;b\n" for n in range(5)),
        "main": "0123abc\n",
    }
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
        runs / "reported.yaml": (lambda: read_reported_numbers(runs / "reported.yaml"), craft_yaml),
        runs / "README.md": (lambda: write_block(runs / "README.md", "one", "| b |\n"), None),
        csv: (lambda: Multilabel(csv), None),
        hub / "refs" / "main": (lambda: find_weights_file(str(hub)), None),
        data / ".distribuuuu" / "index-train.bin": (lambda: read_index(data), craft_array_file),
        folder / "shapes" / "README.txt": (lambda: read_shapes(folder / "shapes"), None),
    }
    for kind in ("jpeg", "raw"):
        place = folder / "packs" / kind
        readers[place / INDEX] = (lambda place=place: read_pack(place), craft_array_file)
        readers[place / "shard-00000.bin"] = (lambda place=place: read_pack(place), None)
    return [Subject(path, path.read_bytes(), *reader) for path, reader in readers.items()]


# ------------------------------------------------------------------------------------------ fuzzing


def read_words(chance: random.Random) -> tuple[str, str]:
    """Parse a random command-line override; return it and the verdict."""
    text = "".join(chance.choice((*ODD_YAML, "1", ",", "]", "}", "a", "(")) for _ in range(chance.randrange(1, 6)))
    key = chance.choice(
        ("OPTIM.BASE_LR", "OPTIM.STEPS", "MODEL.KWARGS.x", "TRAIN.WORKERS", "FINETUNE.FREEZE", "OUT_DIR")
    )
    return f"{key} {text!r}", verdict_of(lambda: load_cfg(None, [key, text]).dump(), key)


def verdict_of(read: Callable[[], Any], name: str) -> str:
    """Return 'read', 'refused' or 'violation: ...'."""
    try:
        read()
    except ConfigError as error:
        return "refused" if name in str(error) else f"violation: {name} is not named: {error}"
    except OSError as error:  # raised by the shapes data set for its folder
        return "refused" if "draw the data set" in str(error) else f"violation: {traceback.format_exc()}"
    except BaseException:
        return f"violation: {traceback.format_exc()}"
    return "read"


def restore(subject: Subject) -> None:
    """Restore the original file."""
    if subject.path.is_dir():
        subject.path.rmdir()
    subject.path.parent.mkdir(parents=True, exist_ok=True)
    subject.path.write_bytes(subject.whole)


def run_trials(folder: Path, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Damage and read files; yield the file, the mutation and the verdict of each trial."""
    subjects, chance = make_subjects(folder), random.Random(seed)
    for subject in subjects:
        subject.read()
    for _ in range(number):
        if chance.random() < 0.1:
            yield "words", *read_words(chance)
            continue
        subject = chance.choice(subjects)
        restore(subject)
        if subject.craft and chance.random() < 0.5:
            subject.path.write_bytes(subject.craft(subject.whole, chance))
            mutation = "crafted"
        else:
            mutation = damage(subject.path, subject.whole, [other.whole for other in subjects], chance)
        verdict = verdict_of(subject.read, str(folder))
        restore(subject)
        yield str(subject.path.relative_to(folder)), mutation, verdict


def fuzz(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage files `number` times; return the counts of verdicts by file, and the violations."""
    return count_verdicts(run_trials(folder, number, seed))


def main() -> int:
    """Run the fuzzer, print a summary, and return the status."""
    args = parse_fuzz_args(__doc__)
    faulthandler.enable()
    logging.getLogger("distribuuuu").setLevel(logging.ERROR)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts, violations = fuzz(Path(folder), args.number, args.seed)
    print_verdicts(counts, violations)
    seconds = time.perf_counter() - start
    print(f"{args.number} mutations with seed {args.seed} in {seconds:.0f} s: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
