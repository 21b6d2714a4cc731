"""Tables with any columns: the words of DATA.TABLE, one-hot columns, splits by a column, several labels."""

import re
from dataclasses import replace

import pytest
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
    assert "its columns are id, breed" in problem and "fix: DATA.TABLE.path COLUMN DATA.TABLE.label COLUMN" in problem
    words = "MODEL.NUM_CLASSES", 1, "DATA.TABLE.path", "id", "DATA.TABLE.label", "breed"
    assert "fix: DATA.TABLE.template, e.g. 'images/{}.jpg'" in str(find_run_problems(cfg_of(*words), train=True)[0])
    cfg = cfg_of(*words, "DATA.TABLE.template", "train_images/{}.jpg")
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


WRONG = {
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
    ("A|B;B;A|B|C;C;A", replace(SEVERAL, separator="|"), "A B C", ""),
    ("A|B;B|C;A|C", replace(SEVERAL, separator=";"), "A|B A|C B|C", ""),
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


@each_row(("labels", "separator"), [
    ("A|B;B;A|B|C;C;A", "'|'"), ("A|B;B|C;A|C", "'|'"), ('"A,B";B;A;C', "','"), ("A/B;B;A;C", "'/'"),
    ("A B;B;A", "' '"),
])  # fmt: skip
def test_labels_that_are_several_names_need_a_separator(tmp_path, labels, separator):
    rows = [f"{name}.jpg,{label}\n" for name, label in zip("abcdef", labels.split(";"), strict=False)]
    message = f"has labels that are several names; fix: set DATA.TABLE.separator {separator}, or ';' if each is one"
    with pytest.raises(ConfigError, match=re.escape(message)):
        scan_text(tmp_path, "path,label\n" + "".join(rows), SEVERAL)


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


def test_a_text_without_a_header_needs_the_words_that_the_message_names(cfg_of, small_cfg, image_folder, tmp_path):
    for split in ("train", "val"):
        rows = list_rows(image_folder, split)
        (tmp_path / f"{split}.txt").write_text("".join(f"{row['path']}, {row['breed']}, 0\n" for row in rows))
    (problem, _) = map(str, find_run_problems(cfg_of(), train=True))
    assert f"{tmp_path / 'train.txt'} has no column path" in problem
    assert "DATA.TABLE.columns of a text without a header" in problem
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
    write_rows(tmp_path / "classes.csv", names[:2])
    assert "has labels without a name in classes.csv" in str([*map(str, find_run_problems(cfg, train=True))])
