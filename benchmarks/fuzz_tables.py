"""Fuzzer for tables and for parquet files: each is read, or rejected with a ConfigError that names the file.

A case of more than 20 s, and growth of the memory by more than 512 MiB, are violations. The cases run in one process,
so a crash of pyarrow ends the program with its stack.

    python benchmarks/fuzz_tables.py --number 300 --seed 0
"""

import contextlib
import faulthandler
import json
import logging
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench_support.mutations import count_verdicts, damage, parse_fuzz_args, print_verdicts
from fuzz_readback import MAX_GROWTH, Subject, draw_images, restore, verdict_of

from distribuuuu.config import Config, ConfigError, load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.data.datasets.base import get_dataset

ODD_TEXT = ['"', '""', "\0", ",,", ";", "\t", "\r", "\n\n", "\ufeff", "../../x", "/etc/passwd", "nan", "1e999",
            "9" * 5000, "x" * 200_000, "{}", "a,b,c\n", "\u202e", "-1", " "]  # fmt: skip


def craft_text(whole: bytes, chance: random.Random) -> bytes:
    """Return a table with odd text inserted at random positions."""
    text = whole.decode()
    for _ in range(chance.choice((1, 1, 3))):
        place = chance.randrange(len(text) + 1)
        text = text[:place] + chance.choice(ODD_TEXT) + text[place:]
    return text.encode(errors="surrogatepass")


def write_sources(folder: Path) -> dict[Path, tuple[Config, Callable | None]]:
    """Write six images in each form; return each file with the config that reads it, and what crafts it."""
    import pyarrow
    import pyarrow.parquet

    draw_images(folder / "images")
    paths = sorted((folder / "images").rglob("*.jpg"))
    rows = [
        {"image": {"bytes": path.read_bytes(), "path": path.name}, "path": str(path), "label": number % 2,
         "name": path.parent.name, "tags": [number % 2], "value": number / 2}
        for number, path in enumerate(paths)
    ]  # fmt: skip
    table = pyarrow.Table.from_pylist(rows)
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for name in ("one", "several", "targets"):
        (folder / name).mkdir()
        pyarrow.parquet.write_table(table, folder / name / "train.parquet", row_group_size=2)
    lines = [f"{row['path']},{row['name']},{row['value']},{row['label']},{1 - row['label']}" for row in rows]
    header = "path,label,value,x,y"
    (folder / "train.csv").write_text("\n".join([header, *lines, ""]))
    (folder / "hot.csv").write_text("\n".join([header, *lines, ""]))
    (folder / "train.tsv").write_text("\n".join([header, *lines, ""]).replace(",", "\t"))

    def cfg_of(name: str, root: Path, **table: Any) -> Config:
        cfg = load_cfg(None, ["DATA.NAME", "list", "TRAIN.DATASET", str(root), "MODEL.NUM_CLASSES", "2"])
        return changed(cfg, {"DATA.NAME": name, **{f"DATA.TABLE.{key}": value for key, value in table.items()}})

    return {
        folder / "one/train.parquet": (cfg_of("parquet", folder / "one"), None),
        folder / "several/train.parquet": (cfg_of("parquet_multilabel", folder / "several", labels="tags"), None),
        folder / "targets/train.parquet":
            (cfg_of("parquet_structured", folder / "targets", targets=("name", "value")), None),
        folder / "train.csv": (cfg_of("structured", folder, file="train.csv", targets=("label", "value")), craft_text),
        folder / "hot.csv": (cfg_of("list", folder, file="hot.csv", label=("x", "y")), craft_text),
        folder / "train.tsv":
            (cfg_of("multilabel", folder, file="train.tsv", path="path", labels=("label",)), craft_text),
    }  # fmt: skip


def read_set(cfg: Config) -> None:
    """Check and open the training set of a config, and read it; a broken image may raise anything."""
    family = get_dataset(cfg.DATA.NAME)
    find = getattr(family, "find_pack_problems", family.find_problems)
    problems = [str(problem) for _, problem in find(cfg, train=True)]
    try:
        images = family.from_cfg(cfg, train=True)
    except ConfigError:
        if not problems:
            raise AssertionError("the start does not report what opening does") from None
        raise
    for index in range(min(len(images), 20)):
        images.label(index), images.describe(index)
        with contextlib.suppress(Exception):  # counted as a broken image by the loader
            images.read(index)


def run_trials(folder: Path, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Damage and read files; yield the file, the mutation and the verdict of each trial."""
    chance = random.Random(seed)
    subjects = []
    for path, (cfg, craft) in write_sources(folder).items():
        subjects.append(Subject(path, path.read_bytes(), lambda cfg=cfg: read_set(cfg), craft))
    for subject in subjects:
        subject.read()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(number):
        subject = chance.choice(subjects)
        restore(subject)
        if subject.craft and chance.random() < 0.5:
            subject.path.write_bytes(subject.craft(subject.whole, chance))
            mutation = "crafted"
        else:
            mutation = damage(subject.path, subject.whole, [other.whole for other in subjects], chance)
        verdict = verdict_of(subject.read, str(folder))
        restore(subject)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        if grown > MAX_GROWTH:
            verdict = f"violation: the memory has grown by {grown} MiB"
        yield str(subject.path.relative_to(folder)), mutation, verdict


def main() -> int:
    """Run the fuzzer, print a summary, and return the status."""
    args = parse_fuzz_args(__doc__)
    faulthandler.enable()
    logging.getLogger("distribuuuu").setLevel(logging.ERROR)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts, violations = count_verdicts(run_trials(Path(folder), args.number, args.seed))
    print_verdicts(counts, violations)
    seconds = time.perf_counter() - start
    print(f"{args.number} mutations with seed {args.seed} in {seconds:.0f} s: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
