"""The images of a folder in the form of each source, and the class folders with the same images."""

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.archives import archive_folder, write_imagenet

ARCHIVES = ("tar", "pax", "tars", "zip", "deflated", "shards", "one zip")
IMAGENET = ("tars", "kaggle", "flat")
TABLES = ("csv", "tsv", "txt")
SOURCES = (*(f"archive {kind}" for kind in ARCHIVES), *(f"imagenet {layout}" for layout in IMAGENET),
           *(f"list {kind}" for kind in TABLES), "torchvision")  # fmt: skip
NAMES = ("ant", "bee", "cat")
DELIMITERS = {"csv": ",", "tsv": "\t", "txt": ";"}
IMAGENETTE = ("n01440764", "n02102040", "n02979186", "n03000684", "n03028079", "n03394916", "n03417042", "n03425413",
              "n03445777", "n03888257")  # fmt: skip


def write_source(source: str, image_folder: Path, root: Path) -> tuple[list[Any], list[Any]]:
    """Write the images of a folder in the form of a source; return the words of a config, and those of its equal."""
    family, _, kind = source.partition(" ")
    plain, num_classes = image_folder, len(NAMES)
    words: list[Any] = ["DATA.NAME", family]
    if family == "archive":
        root = archive_folder(image_folder, root, kind)
    elif family == "imagenet":
        root, plain = write_imagenet(image_folder, root, kind)
    elif family == "list":
        for split in ("train", "val"):
            write_rows(root / f"{split}.{kind}", list_rows(image_folder, split), DELIMITERS.get(kind, ","))
        table = "{file: '{}.txt', delimiter: ;, label: breed}" if kind == "txt" else "{label: breed}"
        words += ["DATA.TABLE", table]
    else:
        words, plain, num_classes = ["DATA.NAME", "torchvision/Imagenette"], root / "imagenette2", len(IMAGENETTE)
        for split in ("train", "val"):
            for name, synset in zip((*NAMES, *NAMES, *NAMES, "ant"), IMAGENETTE, strict=True):
                shutil.copytree(image_folder / split / name, plain / split / synset)
                for path in (plain / split / synset).iterdir():
                    path.rename(path.with_suffix(".JPEG"))
    both = ["MODEL.NUM_CLASSES", num_classes]
    return [*words, "TRAIN.DATASET", root, *both], ["TRAIN.DATASET", plain, *both]


def list_rows(image_folder: Path, split: str) -> list[dict]:
    """Return for each image its name and its class in several forms, and a split."""
    rows = []
    for path in sorted((image_folder / split).rglob("*.jpg")):
        name = path.parent.name
        row = {"path": str(path), "id": f"{name}/{path.stem}", "label": name, "breed": name, "fold": split}
        rows.append(row | {f"is_{other}": int(other == name) for other in NAMES})
    return rows


def write_rows(path: Path, rows: list[dict], delimiter: str = ",") -> None:
    """Write a table of texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def image_rows(image_folder: Path, split: str) -> list[dict]:
    """Return for each image its file, its class as number and name, and several labels."""
    return [
        {"image": {"bytes": path.read_bytes(), "path": path.name}, "label": NAMES.index(path.parent.name),
         "name": path.parent.name, "tags": [0, 2]}
        for path in sorted((image_folder / split).rglob("*.jpg"))
    ]  # fmt: skip


def to_arrow(rows: list[dict], names: Sequence[str] | None = NAMES) -> Any:
    """Return an Arrow table with the names of the classes in its metadata, as the package `datasets` writes it."""
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    class_label = {"names": list(names or ()), "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": class_label}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if names else None
    return table.replace_schema_metadata(metadata)


def write_parquet(folder: Path, table: Any, name: str, group: int = 10) -> None:
    """Write a table as two parquet files of row groups of `group` images."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate((table.slice(0, 20), table.slice(20))):
        path = folder / name.format(f"{number:05d}-of-00002")
        pytest.importorskip("pyarrow.parquet").write_table(part, path, row_group_size=group)
