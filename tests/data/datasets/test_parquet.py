"""Images in parquet files: imported by the command pack, with class names, splits, several targets, from URLs."""

import re

import pytest
from support.batches import assert_same_batches, batches_of
from support.packs import pack
from support.sources import NAMES, image_rows, to_arrow, write_parquet

from distribuuuu.config import ConfigError
from distribuuuu.config.config_node import changed
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.parquet_set import ParquetRows
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems

pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def root(image_folder, tmp_path_factory):
    """The images of `image_folder` in the layout data/SPLIT-NUMBER.parquet."""
    root = tmp_path_factory.mktemp("parquet")
    for split in ("train", "val"):
        write_parquet(root / "data", to_arrow(image_rows(image_folder, split)), f"{split}-{{}}.parquet")
    return root


@pytest.fixture
def cfg_of(small_cfg, root):
    return lambda *words: small_cfg("DATA.NAME", "parquet", "TRAIN.DATASET", root, *words)


def problems_of(cfg) -> list[str]:
    family = DATASETS.get(cfg.DATA.NAME)
    return [message for train in (True, False) for _, message in family.find_pack_problems(cfg, train)]


def test_a_training_names_the_command_that_packs(cfg_of, root):
    (problem,) = map(str, find_run_problems(cfg_of(), train=True))
    assert f"fix: distribuuuu pack OUT DATA.NAME parquet TRAIN.DATASET {root}, then DATA.NAME packed" in problem


def test_names_and_one_file_with_a_column_of_the_split(cfg_of, small_cfg, image_folder, tmp_path):
    rows = [*image_rows(image_folder, "train"), *image_rows(image_folder, "val")]
    write_parquet(tmp_path, to_arrow(rows, None), "all-{}.parquet")
    for words in (("DATA.TABLE.label", "name"),
                  ("TRAIN.DATASET", tmp_path, "DATA.TABLE", "{file: all-*.parquet, label: name, split: fold}"),
                  ("TRAIN.DATASET", tmp_path, "DATA.TABLE.split", "fold", "DATA.TABLE.label", "name")):  # fmt: skip
        cfg = cfg_of(*words)
        assert problems_of(cfg) == []
        assert build_images(cfg, train=False).classes == NAMES
        assert_same_batches(batches_of(cfg), batches_of(small_cfg()))
    assert build_images(cfg_of(), train=True).describe(21) == "train-00001-of-00002.parquet, row 2"


def test_labels_without_names_are_sorted_by_value(cfg_of, image_folder, tmp_path):
    rows = [{**row, "label": 5 * row["label"]} for row in image_rows(image_folder, "train")]
    for split in ("train", "val"):
        write_parquet(tmp_path, to_arrow(rows, None), f"{split}-{{}}.parquet")
    assert build_images(cfg_of("TRAIN.DATASET", tmp_path), train=True).classes == ("0", "5", "10")


@pytest.mark.parametrize("url", [False, True])
def test_a_pack_gives_the_same_batches(small_cfg, root, tmp_path, url):
    if url:
        memory = pytest.importorskip("fsspec").filesystem("memory")
        for path in (root / "data").iterdir():
            memory.pipe(f"/owner/name/data/{path.name}", path.read_bytes())
    source = "memory://owner/name" if url else root
    pack(tmp_path / "pack", "DATA.NAME", "parquet", "TRAIN.DATASET", source, split="both", workers=2)
    packed = small_cfg("DATA.NAME", "packed", "TRAIN.DATASET", tmp_path / "pack")
    for train in (True, False):
        assert_same_batches(batches_of(packed, train), batches_of(small_cfg(), train))


def test_a_network_failure_is_no_broken_image_which_would_be_left_out(root, tmp_path, monkeypatch):
    def fail(self, group, column):
        if column == "image":
            raise OSError("connection reset")
        return read_group(self, group, column)

    read_group = ParquetRows._read_group
    monkeypatch.setattr(ParquetRows, "_read_group", fail)
    with pytest.raises(ConfigError, match="cannot be read: connection reset"):
        pack(tmp_path, "DATA.NAME", "parquet", "TRAIN.DATASET", root, "DATA.ON_BAD_IMAGE", "skip")


def test_several_labels_and_targets(cfg_of, root, tmp_path):
    cfg = cfg_of("DATA.NAME", "parquet_multilabel", "DATA.TABLE.labels", "tags", "LOSS.NAME", "bce")
    assert problems_of(cfg) == []
    images = build_images(cfg, train=False)
    assert images.classes == NAMES and [images.label(index).tolist() for index in (0, 1)] == [[0, 0, 0], [1, 0, 1]]
    words = "DATA.NAME", "parquet_structured", "TRAIN.DATASET", root, "DATA.TABLE.targets", "[label, weight, kind]"
    task = "TASK.NAME", "own", "PLUGINS", tmp_path / "own.py"
    (tmp_path / "own.py").write_text(
        "from distribuuuu.config.registry import TASKS\nfrom distribuuuu.tasks.base import Task\n"
        "TASKS.register('own')(type('Own', (Task,), {'__module__': __name__}))\n"
    )
    pack(tmp_path / "pack", *words, *task, "--shard-mb", 0.01, split="both", workers=2)
    found = changed(cfg_of(), {"DATA.NAME": "parquet_structured", "DATA.TABLE.targets": ("label", "weight", "kind")})
    assert build_images(found, True).label(7) == {"label": 0, "weight": 0.875, "kind": 0}
    packed = changed(cfg_of(), {"DATA.NAME": "packed_structured", "TRAIN.DATASET": str(tmp_path / "pack"),
                                "TEST.DATASET": str(tmp_path / "pack")})  # fmt: skip
    for train in (True, False):
        assert_same_batches(batches_of(packed, train), batches_of(found, train))


WRONG = {
    "has no Parquet files of the split vall; it has": ("TEST.SPLIT", "vall"),
    "has no column img; it has image, label": ("DATA.TABLE.image", "img"),
    "parquet: column name has string; expected bytes of images; fix: .* DATA.NAME list": (
        "DATA.TABLE.image", "name"),
    "has no column is_ant, is_bee; it has": ("DATA.TABLE.label", "[is_ant, is_bee]"),
    "3 classes; set MODEL.NUM_CLASSES 3": ("MODEL.NUM_CLASSES", 4),
    "has the training images too; fix: DATA.TABLE.split COLUMN": ("DATA.TABLE.file", "data/train-*.parquet"),
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
        with pytest.raises(ConfigError, match=rf"lacks: (number )?{wrong} \(val-00001-of-00002.parquet, row 28\)"):
            build_images(cfg_of("TRAIN.DATASET", tmp_path), train=False)


def test_damaged_tables_are_read_or_refused_by_name(tmp_path):
    import fuzz_tables

    counts, violations = fuzz_tables.fuzz(tmp_path, 50, 1)
    assert not violations, "\n".join(violations)
    assert len(counts) == 6 and sum(verdicts["refused"] for verdicts in counts.values()) > 15
