"""Images in parquet and Arrow files: batches, class names, splits, several targets, packing, URLs, damaged files."""

import json
import pickle
import re

import pytest
from bench_support.mutations import count_verdicts
from support.batches import assert_same_batches, batches_of
from support.packs import pack
from support.sources import NAMES, image_rows, save_to_disk, to_arrow, write_parquet
from support.tables import each_row

from distribuuuu.config import ConfigError
from distribuuuu.config.config_node import changed
from distribuuuu.data.datasets import parquet_file
from distribuuuu.data.datasets.base import get_dataset
from distribuuuu.data.datasets.parquet_file import ColumnFiles
from distribuuuu.data.loader import build_images
from distribuuuu.data.packed.format import is_valid_targets
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes

pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def root(image_folder, tmp_path_factory):
    """The images of `image_folder` in the layouts hub/data/SPLIT-NUMBER.parquet and disk/SPLIT/."""
    root = tmp_path_factory.mktemp("parquet")
    for split in ("train", "val"):
        table = to_arrow(image_rows(image_folder, split))
        write_parquet(root / "hub" / "data", table, f"{split}-{{}}.parquet")
        save_to_disk(root / "disk" / split, table)
    return root


@pytest.fixture
def cfg_of(small_cfg, root):
    return lambda *words: small_cfg("DATA.NAME", "parquet", "TRAIN.DATASET", root / "hub", *words)


def test_arrow_and_names_and_one_file_with_a_column_of_the_split(cfg_of, small_cfg, image_folder, root, tmp_path):
    rows = [*image_rows(image_folder, "train"), *image_rows(image_folder, "val")]
    write_parquet(tmp_path, to_arrow(rows, None), "all-{}.parquet")
    for words in (("TRAIN.DATASET", root / "disk"), ("DATA.TABLE.label", "name"),
                  ("TRAIN.DATASET", tmp_path, "DATA.TABLE", "{file: all-*.parquet, label: name, split: fold}"),
                  ("TRAIN.DATASET", tmp_path, "DATA.TABLE.split", "fold", "DATA.TABLE.label", "name")):  # fmt: skip
        cfg = cfg_of(*words)
        assert find_run_problems(cfg, train=True) == []
        assert build_images(cfg, train=False).classes == NAMES
        assert_same_batches(batches_of(cfg), batches_of(small_cfg()))
    assert resolve_num_classes(cfg_of("MODEL.NUM_CLASSES", 0)).MODEL.NUM_CLASSES == 3
    slow = build_images(cfg_of(), train=True)
    assert (
        "a row group of up to 10 images is read for each image, which is slow; fix: distribuuuu pack" in slow.notes()[0]
    )
    assert build_images(cfg_of("TRAIN.DATASET", root / "disk"), train=True).notes() == []
    assert slow.describe(21) == "train-00001-of-00002.parquet, row 2"
    assert pickle.loads(pickle.dumps(slow)).read(30) == slow.read(30)


def test_labels_without_names_are_sorted_by_value(cfg_of, image_folder, tmp_path):
    rows = [{**row, "label": 5 * row["label"]} for row in image_rows(image_folder, "train")]
    for split in ("train", "val"):
        write_parquet(tmp_path, to_arrow(rows, None), f"{split}-{{}}.parquet")
    assert build_images(cfg_of("TRAIN.DATASET", tmp_path), train=True).classes == ("0", "5", "10")


def test_several_labels_and_targets(cfg_of):
    cfg = cfg_of("DATA.NAME", "parquet_multilabel", "DATA.TABLE.labels", "tags", "LOSS.NAME", "bce")
    assert find_run_problems(cfg, train=True) == []
    images = build_images(cfg, train=False)
    assert images.classes == NAMES and [images.label(index).tolist() for index in (0, 1)] == [[0, 0, 0], [1, 0, 1]]
    options = {"DATA.NAME": "parquet_structured", "DATA.TABLE.targets": ("label", "box", "kind")}
    cfg = changed(cfg_of(), options)
    images = build_images(cfg, train=True)
    assert images.classes == NAMES and images.label(0)["kind"] in (0, 1)
    target = images.label(7)
    assert (target["label"], target["box"].tolist(), target["kind"]) == (0, [0.875, 1.0], 0)
    assert batches_of(cfg)[0].targets["box"].shape == (12, 2)


@pytest.mark.parametrize("folder", ["hub", "disk"])
def test_a_pack_gives_the_same_batches(small_cfg, root, tmp_path, folder):
    pack(tmp_path / "pack", "DATA.NAME", "parquet", "TRAIN.DATASET", root / folder, split="both", workers=2)
    packed = small_cfg("DATA.NAME", "packed", "TRAIN.DATASET", tmp_path / "pack")
    for train in (True, False):
        assert_same_batches(batches_of(packed, train), batches_of(small_cfg(), train))


def test_a_url_is_packed_and_not_read_for_each_image(cfg_of, small_cfg, root, tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in (root / "hub" / "data").iterdir():
        memory.pipe(f"/owner/name/data/{path.name}", path.read_bytes())
    url = "memory://owner/name"
    problems = list(map(str, find_run_problems(cfg_of("TRAIN.DATASET", url), train=True)))
    assert any(f"fix: distribuuuu pack OUT DATA.NAME parquet TRAIN.DATASET {url}" in problem for problem in problems)
    pack(tmp_path / "pack", "DATA.NAME", "parquet", "TRAIN.DATASET", url, split="both")
    packed = small_cfg("DATA.NAME", "packed", "TRAIN.DATASET", tmp_path / "pack")
    assert_same_batches(batches_of(packed), batches_of(small_cfg()))
    # A network failure is no broken image, which would be left out.
    monkeypatch.setattr(parquet_file, "_PAUSE_S", 0)
    monkeypatch.setattr(parquet_file.ColumnFile, "read", fail_to_read)
    options = ("DATA.NAME", "parquet", "TRAIN.DATASET", url, "DATA.ON_BAD_IMAGE", "skip")
    with pytest.raises(ConfigError, match="cannot be read in 5 attempts: connection reset"):
        pack(tmp_path / "other", *options)


def test_a_url_that_cannot_be_listed_is_one_error(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")

    def refuse(self, path, **options):
        raise Exception("[Errno -2] Name or service not known")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "find", refuse)
    with pytest.raises(ConfigError, match="cannot be listed: .Errno -2. Name or service not known; fix: check the URL"):
        pack(tmp_path / "pack", "DATA.NAME", "parquet", "TRAIN.DATASET", "memory://nobody/none")


def fail_to_read(self, group, columns):
    if "image" in columns:
        raise Exception("connection reset")  # that of an HTTP client is no OSError
    return read_columns(self, group, columns)


read_columns = parquet_file.ColumnFile.read
WRONG = {
    "has no parquet or Arrow files of the split vall; it has train, val; fix: set TEST.SPLIT "
    "val": ("TEST.SPLIT", "vall"),
    "has no parquet or Arrow files of the split test; it has train, val; fix: set TEST.SPLIT "
    "val": ("TEST.SPLIT", "test"),
    "has no column img; it has image, label": ("DATA.TABLE.image", "img"),
    "parquet: column name has string; expected bytes of images; fix: .* DATA.NAME list": (
        "DATA.TABLE.image", "name"),
    "has no column is_ant, is_bee; it has": ("DATA.TABLE.label", "[is_ant, is_bee]"),
    "3 classes; set MODEL.NUM_CLASSES 3": ("MODEL.NUM_CLASSES", 4),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_reported_before_the_start(cfg_of, message):
    problems = [str(problem) for problem in find_run_problems(cfg_of(*WRONG[message]), train=True)]
    assert any(re.search(message, problem) for problem in problems), problems


def test_training_files_are_not_evaluated_as_another_split(cfg_of, root):
    cases = {
        f"fix: set TRAIN.DATASET {re.escape(str(root / 'disk'))}$": ("TRAIN.DATASET", root / "disk" / "train"),
        "fix: DATA.TABLE.split COLUMN, or put {} for the split": ("DATA.TABLE.file", "data/train-*.parquet"),
    }
    for message, words in cases.items():
        problems = [str(problem) for problem in find_run_problems(cfg_of(*words), train=True)]
        assert len(problems) == 1 and re.search(f"has the training images too; {message}", problems[0]), problems
        assert find_run_problems(cfg_of(*words, "TEST.SPLIT", "train"), train=True) == []


def test_labels_that_are_no_classes(cfg_of, image_folder, tmp_path):
    rows = image_rows(image_folder, "train")
    write_parquet(tmp_path, to_arrow(rows), "train-{}.parquet")
    for wrong in (-1, 3, None):
        write_parquet(tmp_path, to_arrow([*rows[:-1], {**rows[-1], "label": wrong}]), "val-{}.parquet")
        with pytest.raises(ConfigError, match=rf"lacks: (number )?{wrong} \(val-00001-of-00002.parquet, row 28\)"):
            build_images(cfg_of("TRAIN.DATASET", tmp_path), train=False)


def test_damaged_files_are_one_error(cfg_of, root, image_folder, tmp_path):
    whole = (root / "hub/data/train-00000-of-00002.parquet").read_bytes()
    for content in (b"", whole[:-9], b"PAR1" * 3, whole[: len(whole) // 2] + whole[-8:]):
        (tmp_path / "train.parquet").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{tmp_path}/train.parquet cannot be read: "):
            get_dataset("parquet").from_cfg(cfg_of("TRAIN.DATASET", tmp_path), train=True)
    table = to_arrow(image_rows(image_folder, "train"))
    save_to_disk(tmp_path / "train", table)
    (tmp_path / "train.parquet").unlink()
    for names in (["../train.parquet"], [], "x", [3]):
        (tmp_path / "train/state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        with pytest.raises(ConfigError, match="state.json"):
            get_dataset("parquet").from_cfg(cfg_of("TRAIN.DATASET", tmp_path), train=True)


def test_a_missing_package_is_named(root, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install 'distribuuuu\\[parquet\\]'"):
        ColumnFiles([str(root / "hub/data/train-00000-of-00002.parquet")], ["image"])


def test_a_pack_of_several_targets(cfg_of, root, tmp_path):
    words = "DATA.NAME", "parquet_structured", "TRAIN.DATASET", root / "hub", "DATA.TABLE.targets", "[label, box, kind]"
    task = "TASK.NAME", "own", "PLUGINS", tmp_path / "own.py"
    (tmp_path / "own.py").write_text(
        "from distribuuuu.config.registry import TASKS\nfrom distribuuuu.tasks.base import Task\n"
        "TASKS.register('own')(type('Own', (Task,), {'__module__': __name__}))\n"
    )
    pack(tmp_path / "pack", *words, *task, "--shard-mb", 0.01, split="both", workers=2)
    found = changed(cfg_of(), {"DATA.NAME": "parquet_structured", "DATA.TABLE.targets": ("label", "box", "kind")})
    packed = changed(cfg_of(), {"DATA.NAME": "packed_structured", "TRAIN.DATASET": str(tmp_path / "pack"),
                                "TEST.DATASET": str(tmp_path / "pack")})  # fmt: skip
    for train in (True, False):
        assert_same_batches(batches_of(packed, train), batches_of(found, train))
    assert build_images(packed, True).label(3)["box"].tolist() == [0.375, 1.0]


FORMS = ({"array": 0, "shape": [2], "float": True}, {"dict": {"a": {"array": 0, "shape": [], "float": False}}})


@each_row(
    "targets, is_valid",
    [(None, True), ({"kind": "labels"}, True), *(({"kind": "structured", "form": form}, True) for form in FORMS),
     ({"kind": "labels", "form": 1}, False), ([], False), ({"kind": "structured", "form": {"array": 1, "shape": [],
     "float": True}}, False), ({"kind": "structured", "form": {"array": 0, "shape": [-1], "float": True}}, False),
     ({"kind": "structured", "form": {"tuple": {}}}, False)],
)  # fmt: skip
def test_targets_in_the_header_of_a_pack_are_checked(targets, is_valid):
    form = {"array": 0, "shape": [], "float": True}
    assert is_valid_targets(targets) is is_valid
    for _ in range(30):
        form = {"tuple": [form]}
    assert not is_valid_targets({"kind": "structured", "form": form})


def test_damaged_tables_are_read_or_refused_by_name(tmp_path):
    import fuzz_tables

    counts, violations = count_verdicts(fuzz_tables.run_trials(tmp_path, 150, 1))
    assert not violations, "\n".join(violations)
    assert len(counts) == 9 and sum(verdicts["refused"] for verdicts in counts.values()) > 50
