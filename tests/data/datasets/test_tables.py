"""Tables with any columns: the words of DATA.TABLE, one-hot columns, splits by a column, several targets."""

import pickle
import re
from dataclasses import replace

import pytest
import torch
from support.batches import assert_same_batches, batches_of
from support.sources import DELIMITERS, NAMES, list_rows, write_rows
from support.tables import each_row

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.data.datasets.table_file import TableSpec, scan_table
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems


@pytest.fixture
def cfg_of(small_cfg, tmp_path):
    return lambda *words: small_cfg("DATA.NAME", "list", "TRAIN.DATASET", tmp_path, *words)


@pytest.fixture
def tables(image_folder, tmp_path):
    """Return write(ending): train.ENDING and val.ENDING."""

    def write(ending: str) -> None:
        for split in ("train", "val"):
            write_rows(tmp_path / f"{split}.{ending}", list_rows(image_folder, split), DELIMITERS.get(ending, ","))

    return write


def test_kaggle_needs_the_words_that_the_message_names(cfg_of, image_folder, tmp_path):
    for split in ("train", "val"):
        rows = [{"id": path.stem, "breed": path.parent.name} for path in (image_folder / split / "ant").glob("*.jpg")]
        write_rows(tmp_path / f"{split}.csv", rows)
        (tmp_path / f"{split}_images").symlink_to(image_folder / split / "ant")
    (problem, _) = map(str, find_run_problems(cfg_of("MODEL.NUM_CLASSES", 1), train=True))
    fix = re.search("fix: add (DATA.TABLE.path id DATA.TABLE.label breed)", problem)
    assert fix and "its columns are id, breed" in problem
    problems = find_run_problems(cfg_of("MODEL.NUM_CLASSES", 1, *fix[1].split()), train=True)
    template = re.search("fix: DATA.TABLE.template '(.*?)'", str(problems[0]))
    assert template and template[1] == "train_images/{}.jpg"
    cfg = cfg_of("MODEL.NUM_CLASSES", 1, *fix[1].split(), "DATA.TABLE.template", "train_images/{}.jpg")
    assert find_run_problems(cfg, train=True) == []
    assert build_images(cfg, train=True).describe(0).startswith(str(tmp_path / "train_images/"))


ONE_HOT = ", ".join(f"is_{name}" for name in NAMES)


def test_one_hot_columns_and_a_column_of_the_split(cfg_of, small_cfg, image_folder, tmp_path):
    write_rows(tmp_path / "all.csv", [*list_rows(image_folder, "train"), *list_rows(image_folder, "val")])
    words = ("DATA.TABLE", f"{{label: [{ONE_HOT}], split: fold}}")
    cfg = cfg_of(*words)
    assert find_run_problems(cfg, train=True) == []
    train, val = (build_images(cfg, train) for train in (True, False))
    assert train.classes == val.classes == tuple(f"is_{name}" for name in NAMES) and (len(train), len(val)) == (48, 37)
    for part in (True, False):
        assert_same_batches(batches_of(cfg, part), batches_of(small_cfg(), part))
    several = small_cfg("DATA.NAME", "multilabel", "LOSS.NAME", "bce", "TRAIN.DATASET", tmp_path, "DATA.TABLE",
                        f"{{path: path, labels: [{ONE_HOT}], split: fold}}")  # fmt: skip
    assert build_images(several, True).label(20).tolist() == [0, 1, 0] and find_run_problems(several, True) == []


def test_several_targets(small_cfg, image_folder, tmp_path):
    class_of = {}
    for split in ("train", "val"):
        rows = list_rows(image_folder, split)
        class_of[split] = rows
        write_rows(tmp_path / f"{split}.csv", rows if split == "train" else [row for row in rows if row["kind"] == "y"])
    words = ("DATA.NAME", "structured", "TASK.NAME", "own", "TRAIN.DATASET", tmp_path, "DATA.TABLE.targets",
             "[number, weight, kind, breed]")  # fmt: skip
    with pytest.raises(ConfigError, match="TASK.NAME"):
        small_cfg(*words[:2], "TRAIN.DATASET", tmp_path)
    options = {"DATA.NAME": "structured", "TRAIN.DATASET": str(tmp_path), "TEST.DATASET": str(tmp_path),
               "DATA.TABLE.targets": ("number", "weight", "kind", "breed"), "MODEL.NUM_CLASSES": 2}  # fmt: skip
    cfg = changed(small_cfg(), options)
    train, val = (build_images(cfg, train) for train in (True, False))
    assert train.classes == ("x", "y") and train.label(20)["breed"] == 1
    assert train.label(7) == {"number": 2, "weight": 1.75, "kind": 1, "breed": 0}
    assert {name: str(value.dtype) for name, value in train.label(7).items()} == {
        "number": "int64", "weight": "float32", "kind": "int64", "breed": "int64"}  # fmt: skip
    assert val.label(0)["kind"] == 1 and val.label(0)["number"] == class_of["val"][1]["number"]
    assert list(type(train).find_problems(cfg, True)) == list(type(train).find_problems(cfg, False)) == []
    batch = batches_of(cfg)[0]
    assert batch.targets["weight"].dtype == torch.float32 and batch.targets["kind"].shape == (12,)
    assert pickle.loads(pickle.dumps(val)).label(3) == val.label(3)
    write_rows(tmp_path / "val.csv", [{**class_of["val"][0], "kind": "z", "weight": "heavy", "number": 1.5}])
    text = " ".join(text for _, text in type(train).find_problems(cfg, False))
    assert "values of kind that the training data lacks: z" in text and "values of weight" in text and "heavy" in text
    assert "values of number that the training data lacks: 1.5" in text


WRONG = {
    "has no column label; its columns are path, labl; fix: add DATA.TABLE.label labl": ("path,labl\n", ()),
    "its columns are id, file, label; fix: add DATA.TABLE.path file": (
        "id,file,label\na,a.jpg,x\n", ("DATA.TABLE.path", "fil")),
    "its columns are path/label; fix: add": ("path/label\na.jpg/x\n", ()),
    "fix: add DATA.TABLE.delimiter ' ' DATA.TABLE.columns '[path, label]', as it has no header": ("a.jpg 1\n", ()),
    "fix: add DATA.TABLE.columns '[label, path]', as it has no header": ("x,a.jpg\n", ()),
    "has images without exactly one 1: line 2, 'a.jpg'; line 3, 'b.jpg'": (
        "path,x,y\na.jpg,1,1\nb.jpg,0,0\n", ("DATA.TABLE.label", "[x, y]")),
    "has values other than 0 and 1 in columns of one class each: line 2, 'a.jpg'": (
        "path,x,y\na.jpg,1,2\n", ("DATA.TABLE.label", "[x, y]")),
    "has no row with fold train; the column has: 0; 1": (
        "path,label,fold\na.jpg,x,0\nb.jpg,x,1\n", ("DATA.TABLE.split", "fold")),
    "has no column fold; its columns are path, label": ("path,label\na.jpg,x\n", ("DATA.TABLE.split", "fold")),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_reported_before_the_start(cfg_of, tmp_path, message):
    text, words = WRONG[message]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jpg").touch()
    (tmp_path / "train.csv").write_text(text)
    problems = [str(problem) for problem in find_run_problems(cfg_of("TEST.SPLIT", "train", *words), train=True)]
    assert any(f"{tmp_path / 'train.csv'} " in problem and message in problem for problem in problems), problems
    assert not any(problem.endswith(": line 1") for problem in problems)


def scan_text(folder, text: str, spec: TableSpec) -> dict:
    for name in "abcdef":
        (folder / f"{name}.jpg").touch()
    (folder / "t.csv").write_text(text)
    return scan_table(str(folder / "t.csv"), spec)[0]


SEVERAL = TableSpec(key="labels")


@each_row(("labels", "spec", "classes", "note"), [
    ("A|B;B;A|B|C;C;A", SEVERAL, "A B C", "separated by '|'"),
    ("A|B;B|C;A|C", SEVERAL, "A B C", "separated by '|'"),
    ('"A,B";B;A;C', SEVERAL, "A B C", "separated by ','"),
    ("A/B;B;A;C", SEVERAL, "A B C", "separated by '/'"),
    ("dog/poodle;dog/pug;cat", SEVERAL, "cat dog/poodle dog/pug", ""),
    ("A B;B;C", replace(SEVERAL, separator=" "), "A B C", ""),
    ("A|B;A;B", replace(SEVERAL, separator="/"), "A A|B B", ""),
    ("A|B;B;A", TableSpec(), "A A|B B", "DATA.NAME multilabel"),
    ("10;2;1", TableSpec(), "1 2 10", ""),
    ("10;2;x", TableSpec(), "10 2 x", ""),
    ("Cat;cat;dog", TableSpec(), "Cat cat dog", "'Cat' and 'cat'"),
])  # fmt: skip
def test_labels_are_separated_sorted_and_compared(tmp_path, labels, spec, classes, note):
    rows = [f"{name}.jpg,{label}\n" for name, label in zip("abcdef", labels.split(";"), strict=False)]
    meta = scan_text(tmp_path, "path,label\n" + "".join(rows), spec)
    assert meta["classes"] == classes.split() and note in " ".join(meta["notes"]) and bool(meta["notes"]) == bool(note)


def test_the_evaluation_table_has_the_separator_of_the_training_table(small_cfg, image_folder, tmp_path):
    files = sorted((image_folder / "train" / "ant").glob("*.jpg"))
    for split, labels in (("train", ["x|y", "x", "y"]), ("val", ["x|y"])):
        write_rows(
            tmp_path / f"{split}.csv",
            [{"image": file, "labels": label} for file, label in zip(files, labels, strict=False)],
        )
    cfg = small_cfg("DATA.NAME", "multilabel", "LOSS.NAME", "bce", "TRAIN.DATASET", tmp_path, "MODEL.NUM_CLASSES", 2)
    assert build_images(cfg, train=False).label(0).tolist() == [1, 1]


def test_one_hot_tables_may_have_empty_fields_and_with_an_option_minus_one(tmp_path):
    text = "path,x,y\na.jpg,,1.0\nb.jpg,-1.0,\n"
    spec = TableSpec(key="labels", columns=("x", "y"))
    with pytest.raises(ConfigError, match="has -1 for an uncertain label; fix: set DATA.TABLE.uncertain 0, or 1"):
        scan_text(tmp_path, text, spec)
    for value, labels in ((0, [1]), (1, [1, 0])):
        scan_text(tmp_path, text, replace(spec, uncertain=value))
        assert scan_table(str(tmp_path / "t.csv"), replace(spec, uncertain=value))[1]["label"].tolist() == labels
    words = ["DATA.NAME", "multilabel", "LOSS.NAME", "bce", "DATA.TABLE", "{uncertain: 1, separator: '|'}"]
    assert load_cfg(None, words).DATA.TABLE.uncertain == 1


@each_row("table, message", [
    ("{lable: a}", "DATA.TABLE.lable .*no such setting; did you mean label"),
    ("{file: ../a.csv}", "DATA.TABLE: .*below the folder of the data"),
    ("{delimiter: ab}", "DATA.TABLE: .*expected one character"),
    ("{columns: [path, path]}", "DATA.TABLE: .*a different name for each column"),
])  # fmt: skip
def test_wrong_words(table, message):
    with pytest.raises(ConfigError, match=message):
        load_cfg(None, ["DATA.NAME", "list", "DATA.TABLE", table])


def test_one_table_without_a_split_is_not_both(cfg_of, tables):
    tables("csv")
    (problem,) = find_run_problems(cfg_of("DATA.TABLE.file", "train.csv", "MODEL.NUM_CLASSES", 3), train=True)
    assert problem.key == "TEST.SPLIT" and "is the training table too; fix: DATA.TABLE.split COLUMN" in str(problem)


NO_HEADER = "fix: add DATA.TABLE.columns '[path, label, column_3]', as it has no header"


def test_a_text_without_a_header_needs_the_words_that_the_message_names(cfg_of, small_cfg, image_folder, tmp_path):
    for split in ("train", "val"):
        rows = list_rows(image_folder, split)
        (tmp_path / f"{split}.txt").write_text("".join(f"{row['path']}, {row['breed']}, 0\n" for row in rows))
    (problem, _) = map(str, find_run_problems(cfg_of(), train=True))
    assert f"{tmp_path / 'train.txt'} has no column path" in problem and NO_HEADER in problem
    cfg = cfg_of("DATA.TABLE.columns", "[path, label, column_3]")
    assert find_run_problems(cfg, train=True) == []
    for part in (True, False):
        assert_same_batches(batches_of(cfg, part), batches_of(small_cfg(), part))
    (problem, _) = map(str, find_run_problems(cfg_of("DATA.TABLE.columns", "[path, label]"), train=True))
    assert "number of fields than DATA.TABLE.columns' 2" in problem and "line 1 has 3" in problem


def test_numbers_get_the_names_of_another_table(cfg_of, small_cfg, image_folder, tmp_path):
    for split in ("train", "val"):
        rows = list_rows(image_folder, split)
        write_rows(tmp_path / f"{split}.csv", [{**row, "label": NAMES.index(row["breed"])} for row in rows])
    names = [{"id": number, "shade": "dark", "class": name} for number, name in enumerate(NAMES)]
    write_rows(tmp_path / "classes.csv", names)
    cfg = cfg_of("DATA.TABLE.names", "[classes.csv, id, class]")
    assert find_run_problems(cfg, train=True) == [] and build_images(cfg, train=True).classes == NAMES
    for part in (True, False):
        assert_same_batches(batches_of(cfg, part), batches_of(small_cfg(), part))
    # A table that changes is read again, and several labels may have one name.
    write_rows(tmp_path / "classes.csv", [*names[:2], {**names[2], "class": names[1]["class"]}])
    assert build_images(changed(cfg, {"MODEL.NUM_CLASSES": 2}), train=True).classes == NAMES[:2]
    rows = [{"path": row["path"], "left": "1", "right": "2"} for row in list_rows(image_folder, "train")]
    write_rows(tmp_path / "pairs.csv", rows)
    spec = TableSpec(key="targets", columns=("left", "right"), names=("classes.csv", "id", "class"))
    assert scan_table(str(tmp_path / "pairs.csv"), spec)[1]["target1"].tolist() == [0] * len(rows)
