"""Fuzzer for tables and for parquet files: each is read, or rejected with a ConfigError that names the file.

The cases run in one process, so a crash of pyarrow ends the program with its stack.

    python benchmarks/fuzz_tables.py --number 300 --seed 0
"""

import collections
import contextlib
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench_support.mutations import Subject, count_verdicts, run_fuzzer, run_trials
from fuzz_readback import draw_images

from distribuuuu.config import Config, ConfigError, load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.config.registry import DATASETS

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
         "name": path.parent.name, "value": number / 2}
        for number, path in enumerate(paths)
    ]  # fmt: skip
    table = pyarrow.Table.from_pylist(rows)
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for name in ("numbers", "names"):
        (folder / name).mkdir()
        pyarrow.parquet.write_table(table, folder / name / "train.parquet", row_group_size=2)
    lines = [f"{row['path']},{row['name']},{row['value']},{row['label']},{1 - row['label']}" for row in rows]
    header = "path,label,value,x,y"
    (folder / "hot.csv").write_text("\n".join([header, *lines, ""]))
    (folder / "train.tsv").write_text("\n".join([header, *lines, ""]).replace(",", "\t"))

    def cfg_of(name: str, root: Path, **table: Any) -> Config:
        cfg = load_cfg(None, ["DATA.NAME", "list", "TRAIN.DATASET", str(root), "MODEL.NUM_CLASSES", "2"])
        cfg = changed(cfg, {"DATA.CACHE_DIR": str(folder / "cache")})
        return changed(cfg, {"DATA.NAME": name, **{f"DATA.TABLE.{key}": value for key, value in table.items()}})

    return {
        folder / "numbers/train.parquet": (cfg_of("parquet", folder / "numbers"), None),
        folder / "names/train.parquet": (cfg_of("parquet", folder / "names", label="name"), None),
        folder / "hot.csv": (cfg_of("list", folder, file="hot.csv", label=("x", "y")), craft_text),
        folder / "train.tsv":
            (cfg_of("multilabel", folder, file="train.tsv", path="path", labels=("label",)), craft_text),
    }  # fmt: skip


def read_set(cfg: Config) -> None:
    """Check and open the training set of a config, and read it; a broken image may raise anything."""
    family = DATASETS.get(cfg.DATA.NAME)
    problems = [str(problem) for _, problem in family.find_problems(cfg, train=True)]
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


def fuzz(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage tables `number` times; return the counts of verdicts by file, and the violations."""
    folder.mkdir(parents=True, exist_ok=True)
    subjects = [Subject(path, path.read_bytes(), partial(read_set, cfg), craft)
                for path, (cfg, craft) in write_sources(folder).items()]  # fmt: skip
    return count_verdicts(run_trials(subjects, folder, number, seed))


def main() -> int:
    """Run the fuzzer, print a summary, and return the status."""
    return run_fuzzer(__doc__, fuzz)


if __name__ == "__main__":
    sys.exit(main())
