"""Images in parquet and Arrow files: read and packed, with class names and splits."""

import re
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
from support.batches import assert_same_batches, batches_of
from support.packs import pack
from support.sources import NAMES, image_rows, to_arrow, write_parquet

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.loader import build_images

pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def root(image_folder, tmp_path_factory):
    """The images of `image_folder` in the layout data/SPLIT-NUMBER.parquet."""
    root = tmp_path_factory.mktemp("parquet")
    for split in ("train", "val"):
        write_parquet(root / "data", to_arrow(image_rows(image_folder, split)), f"{split}-{{}}.parquet")
    return root


@pytest.fixture
def cfg_of(small_cfg, root, tmp_path):
    own = "DATA.NAME", "parquet", "TRAIN.DATASET", root, "DATA.CACHE_DIR", tmp_path / "cache"
    return lambda *words: small_cfg(*own, *words)


def problems_of(cfg) -> list[str]:
    family = DATASETS.get(cfg.DATA.NAME)
    return [message for train in (True, False) for _, message in family.find_problems(cfg, train)]


def test_a_training_reads_the_files(cfg_of, small_cfg, root, tmp_path, image_folder):
    """Parquet is copied into the cache once, and again when it changes; folders of `datasets` are read as they are."""
    words = "DATA.CACHE_DIR", tmp_path / "cache"
    rows = to_arrow(image_rows(image_folder, "train")), to_arrow(image_rows(image_folder, "val"))
    for table, split in zip(rows, ("train", "val"), strict=True):
        for name in (f"disk/{split}/data-00000-of-00001.arrow", f"cached/name-{split}.arrow"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            new = pyarrow.ipc.new_file if "cached" in name else pyarrow.ipc.new_stream
            if "cached" in name:
                data = table["image"].combine_chunks().field("bytes").cast("large_binary")
                table = table.set_column(0, "image", data)
            with new(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=9)
    for folder in (root, tmp_path / "disk", tmp_path / "cached"):
        for train in (True, False):
            found = batches_of(cfg_of("TRAIN.DATASET", folder, *words), train)
            assert_same_batches(found, batches_of(small_cfg(), train))
    one = cfg_of("TRAIN.DATASET", tmp_path / "disk/train", *words)
    assert_same_batches(batches_of(one, True), batches_of(small_cfg(), True))
    assert "has one split only, the training images; fix: TEST.DATASET" in problems_of(one)[0]
    one = cfg_of("TRAIN.DATASET", tmp_path / "disk/train", "TEST.DATASET", tmp_path / "disk/val", *words)
    assert_same_batches(batches_of(one, False), batches_of(small_cfg(), False))
    copies = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
    assert len(copies) == 4
    build_images(cfg_of(*words), train=True)
    assert copies == {path: path.stat().st_mtime_ns for path in copies}
    shutil.copytree(root, tmp_path / "chang[e]d")
    words = "DATA.CACHE_DIR", tmp_path / "cache", "TRAIN.DATASET", tmp_path / "chang[e]d"
    assert len(build_images(cfg_of(*words), train=True)) == 48
    write_parquet(tmp_path / "chang[e]d/data", to_arrow(image_rows(image_folder, "train")[:25]), "train-{}.parquet")
    assert len(build_images(cfg_of(*words), train=True)) == 25


def test_the_bar_of_a_copy_names_its_size(cfg_of, monkeypatch):
    monkeypatch.setattr("tqdm.tqdm", bar := mock.Mock(side_effect=lambda numbers, **_: numbers))
    build_images(cfg_of(), train=True)
    assert bar.call_args.kwargs["desc"].endswith(".arrow, 0.0 GB")


def test_labels_may_be_names(cfg_of, small_cfg):
    cfg = cfg_of("DATA.TABLE.label", "name")
    assert problems_of(cfg) == []
    assert build_images(cfg, train=False).classes == NAMES
    assert_same_batches(batches_of(cfg), batches_of(small_cfg()))
    assert build_images(cfg_of(), train=True).describe(21) == "train-00001-of-00002.arrow:row 2"


def test_labels_without_names_are_sorted_by_value(cfg_of, image_folder, tmp_path):
    rows = [{**row, "label": 5 * row["label"]} for row in image_rows(image_folder, "train")]
    for split in ("train", "val"):
        write_parquet(tmp_path, to_arrow(rows, None), f"{split}-{{}}.parquet")
    assert build_images(cfg_of("TRAIN.DATASET", tmp_path), train=True).classes == ("0", "5", "10")


def test_a_pack_gives_the_same_batches(small_cfg, root, tmp_path):
    pack(tmp_path / "pack", "DATA.NAME", "parquet", "TRAIN.DATASET", root, split="both", workers=2)
    packed = small_cfg("DATA.NAME", "packed", "TRAIN.DATASET", tmp_path / "pack")
    for train in (True, False):
        assert_same_batches(batches_of(packed, train), batches_of(small_cfg(), train))


@pytest.mark.parametrize(("name", "value", "message"), [
    ("pyarrow.parquet.ParquetFile.read_row_group", OSError("connection reset"), "cannot be read: .*connection reset"),
    ("shutil.disk_usage", None, "needs 0.0 GB, and 0.0 GB are free; fix: DATA.CACHE_DIR FOLDER"),
])  # fmt: skip
def test_a_copy_that_fails_leaves_no_file(cfg_of, tmp_path, monkeypatch, name, value, message):
    def fail(*_, **__):
        raise value

    monkeypatch.setattr(name, fail if isinstance(value, Exception) else lambda path: SimpleNamespace(free=5))
    with pytest.raises(ConfigError, match=message):
        build_images(cfg_of("DATA.CACHE_DIR", tmp_path), train=True)
    assert not [*tmp_path.rglob("*.arrow"), *tmp_path.rglob("*.tmp")]


WRONG = {
    "has no parquet or Arrow files of the split vall; it has": ("TEST.SPLIT", "vall"),
    "has no column img; it has image, label": ("DATA.TABLE.image", "img"),
    "column name has string; expected bytes of images; fix: .* DATA.NAME list": (
        "DATA.TABLE.image", "name"),
    "column tags has .*expected one class per image; fix: .* DATA.NAME multilabel": ("DATA.TABLE.label", "tags"),
    "expected a folder; fix: hf download": ("TRAIN.DATASET", "hf://datasets/OWNER/NAME"),
    "3 classes; set MODEL.NUM_CLASSES 3": ("MODEL.NUM_CLASSES", 4),
    "has the training images too; fix: put {} for the split": ("DATA.TABLE.file", "data/train-*.parquet"),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_reported_before_the_start(cfg_of, message):
    problems = problems_of(cfg_of(*WRONG[message]))
    assert any(re.search(message, problem) for problem in problems), problems


def test_labels_that_are_no_classes(cfg_of, image_folder, tmp_path):
    rows = image_rows(image_folder, "train")
    write_parquet(tmp_path, to_arrow(rows), "train-{}.parquet")
    for wrong in (-1, 3, None):
        write_parquet(tmp_path, to_arrow([*rows[:-1], {**rows[-1], "label": wrong}]), "val-{}.parquet")
        with pytest.raises(ConfigError, match=rf"lacks: (number )?{wrong} \(val-00001-of-00002.arrow:row 28\)"):
            build_images(cfg_of("TRAIN.DATASET", tmp_path), train=False)


def test_rows_without_bytes_tables_without_rows_and_compressed_files_are_named(cfg_of, image_folder, tmp_path):
    rows = image_rows(image_folder, "val")
    nothing = {**rows[0], "image": {"bytes": None, "path": "a.jpg"}}
    write_parquet(tmp_path, to_arrow([nothing, *rows]), "train-{}.parquet")
    images = build_images(cfg_of("TRAIN.DATASET", tmp_path), train=True)
    with pytest.raises(ValueError, match="has no bytes; a path in the file is not followed"):
        images.read(0)
    assert images.read(1) == rows[0]["image"]["bytes"]
    table, options = to_arrow(rows), pyarrow.ipc.IpcWriteOptions(compression="lz4")
    with pyarrow.ipc.new_file(str(tmp_path / "train.arrow"), table.schema, options=options) as writer:
        writer.write_table(table)
    write_parquet(tmp_path, table[:0], "train.parquet")
    for kind, said in (("arrow", "train.arrow cannot be read: .*: it is compressed"), ("parquet", "has no images")):
        with pytest.raises(ConfigError, match=said):
            build_images(cfg_of("TRAIN.DATASET", tmp_path, "DATA.TABLE.file", f"{{}}.{kind}"), train=True)


def test_several_configurations_are_named(cfg_of, root, tmp_path):
    for name in "ab":
        shutil.copytree(root / "data", tmp_path / name)
    with pytest.raises(ConfigError, match="configurations with the split train; fix: DATA.TABLE.file 'a/{}[*].parq"):
        build_images(cfg_of("TRAIN.DATASET", tmp_path), train=True)


def test_damaged_tables_are_read_or_refused_by_name(tmp_path):
    import fuzz_tables

    counts, violations = fuzz_tables.fuzz(tmp_path, 50, 1)
    assert not violations, "\n".join(violations)
    assert len(counts) == 4 and sum(verdicts["refused"] for verdicts in counts.values()) > 15
