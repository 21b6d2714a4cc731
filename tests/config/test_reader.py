"""Reading, checking and writing of configs: values in any spelling, and all problems with their remedies at once."""

import copy
import pickle
import re

import pytest
from support.original_configs import ORIGINAL, ORIGINAL_FILES
from support.runs import problems_of

from distribuuuu.config import ConfigError, check_cfg, get_cfg, load_cfg
from distribuuuu.config.config_node import changed, get_value
from distribuuuu.config.explain import dump_with_origins
from distribuuuu.config.options import DECLARED, OPTIONS
from distribuuuu.config.registry import SCHEDULES
from distribuuuu.models import check_model


@pytest.fixture
def write(tmp_path):
    numbers = iter(range(100))

    def write_file(text: str) -> str:
        (path := tmp_path / f"{next(numbers)}.yaml").write_text(text)
        return str(path)

    return write_file


# ------------------------------------------------------------------------------- files of the 2021 distribuuuu


@pytest.mark.parametrize("arch", ORIGINAL_FILES)
def test_the_original_files_load_unchanged(arch, write):
    lr, wd, batch = ORIGINAL_FILES[arch]
    text = ORIGINAL.format(arch=arch, lr=lr, wd=wd, batch=batch)
    cfg = load_cfg(write(text))
    assert (cfg.MODEL.ARCH, cfg.OUT_DIR) == (arch, f"./{arch}") and len(text.splitlines()) == 43
    assert (cfg.OPTIM.BASE_LR, cfg.OPTIM.WEIGHT_DECAY, cfg.TRAIN.BATCH_SIZE) == (float(lr), float(wd), batch)
    assert cfg.RNG_SEED is None and cfg.MODEL.WEIGHTS is None and cfg.OPTIM.STEPS == ()
    assert len(cfg.origins) == len([line for line in text.splitlines() if line.split(":")[1].strip()])


def test_the_defaults_are_those_of_the_original(write):
    file = write(ORIGINAL.format(arch="resnet18", lr="0.2", wd="5.0e-05", batch=32))
    assert load_cfg(file, ["OUT_DIR", "./exp"]) == load_cfg(None, ["MODEL.NUM_CLASSES", "1000"])
    assert load_cfg(file, ["TRAIN.DATASET", "/a"]).TEST.DATASET == "/a"


# ----------------------------------------------------------------------------------------------------- values

# The text of an option on the command line and in a file -> its value.
VALUES = [
    *(("MODEL.SYNCBN", word, True) for word in ("true", "True", "TRUE")),
    *(("TRAIN.LOAD_OPT", word, False) for word in ("false", "FALSE")),
    *(("OPTIM.BASE_LR", word, number) for word, number in (("1", 1.0), ("5e-4", 5e-4), ("1e-1", 0.1))),
    *(("OPTIM.STEPS", word, (30, 60)) for word in ("[30, 60]", "(30, 60)", "30,60", "30, 60")),
    ("DATA.CROP_SCALE", "[1, 1]", (1.0, 1.0)), ("OPTIM.STEPS", "30", (30,)),
    ("OUT_DIR", "007", "007"), ("MODEL.WEIGHTS", "None", None), ("MODEL.WEIGHTS", "null", None), ("RNG_SEED", "0", 0),
    ("OUT_DIR", "exp/lr=0.1", "exp/lr=0.1"),
    *(("FINETUNE.FREEZE", word, ("conv1", "layer1.*"))
      for word in ("['conv1', 'layer1.*']", "[conv1, layer1.*]", "conv1,layer1.*", " conv1 , layer1.*,")),
    ("FINETUNE.FREEZE", "[!f]*", ("[!f]*",)), ("FINETUNE.FREEZE", "*", ("*",)), ("FINETUNE.FREEZE", "", ()),
    ("FINETUNE.FREEZE", "0,7.net.0", ("0", "7.net.0")), ("FINETUNE.FREEZE", "1.10", ("1.10",)),
    ("MODEL.KWARGS.sizes", "[1, 2]", (1, 2)), ("MODEL.KWARGS.rate", "0.5", 0.5), ("MODEL.KWARGS.on", "true", True),
    ("MODEL.KWARGS.name", "gelu", "gelu"), ("FINETUNE.LR_MULT.fc", "1e1", 10.0), ("MODEL.KWARGS.name", "|", "|"),
]  # fmt: skip


def test_a_value_of_the_command_line_in_any_spelling():
    for key, text, value in VALUES:
        found = get_value(load_cfg(None, [key, text]), key)
        assert found == value and type(found) is type(value), (key, text)
        items = found if isinstance(found, tuple) else ()
        assert [*map(type, items)] == [*map(type, value if isinstance(value, tuple) else ())], (key, text)


def test_a_value_of_a_file(write):
    for text, key, value in [
        ("OPTIM: {WEIGHT_DECAY: 5e-4}", "OPTIM.WEIGHT_DECAY", 5e-4), ("OPTIM: {BASE_LR: 1}", "OPTIM.BASE_LR", 1.0),
        ("DATA: {CROP_SCALE: [8e-2, 1]}", "DATA.CROP_SCALE", (0.08, 1.0)), ("TRAIN: {TOPK: 010}", "TRAIN.TOPK", 10),
        ("MODEL: {KWARGS: {init_values: 1e-4}}", "MODEL.KWARGS", {"init_values": 1e-4}),
        ("MODEL: {KWARGS: {sizes: [1e1, .5]}}", "MODEL.KWARGS", {"sizes": (10.0, 0.5)}),
        ("FINETUNE: {FREEZE: [0, conv1]}", "FINETUNE.FREEZE", ("0", "conv1")),
        ("FINETUNE: {FREEZE: 'conv1, layer1.*'}", "FINETUNE.FREEZE", ("conv1", "layer1.*")),
        ("MODEL: {KWARGS: {depth: 3, sizes: [1, 2]}}", "MODEL.KWARGS", {"depth": 3, "sizes": (1, 2)}),
        ("TRAIN:\nMODEL:\n  KWARGS:\n", "MODEL.KWARGS", {}), ("", "TRAIN.WORKERS", 4),
    ]:  # fmt: skip
        cfg = load_cfg(write(text))
        assert get_value(cfg, key) == value and type(get_value(cfg, key)) in (type(value), type(cfg)), text


def test_open_sections_are_given_whole_or_by_key_and_keep_their_order(write):
    file = write("MODEL: {KWARGS: {width: 8, depth: 3}}\nFINETUNE:\n  LR_MULT: {'layer4.*': 2, fc: 1e1, '*': 0.5}\n")
    words = ["MODEL.KWARGS", "{width: 32, sizes: [1, 2], more: {a: b}}", "DISTILL.KWARGS", "{'rate': 0.5}"]
    words += ["FINETUNE.LR_MULT", "{layer4.*: 3, 0: 3}", "FINETUNE.LR_MULT.a.b", "1e-1"]
    cfg = load_cfg(file, words)
    assert cfg.MODEL.KWARGS == {"width": 32, "depth": 3, "sizes": (1, 2), "more": {"a": "b"}}
    assert dict(cfg.DISTILL.KWARGS) == {"rate": 0.5}
    factors = [("layer4.*", 3.0), ("fc", 10.0), ("*", 0.5), ("0", 3.0), ("a.b", 0.1)]
    assert cfg.origins["MODEL.KWARGS.width"] == cfg.origins["FINETUNE.LR_MULT.a.b"] == "command line"
    for again in (cfg, load_cfg(write(cfg.dump())), load_cfg(write(dump_with_origins(cfg)))):
        assert again == cfg and list(again.FINETUNE.LR_MULT.items()) == factors


MAPPINGS = """
MODEL: {ARCH: resnet8, KWARGS: {width: 32, norm: group}}
DISTILL: {TEACHER: resnet14, WEIGHTS: pretrained, KWARGS: {width: 64}}
FINETUNE: {LR_MULT: {fc: 10}}
"""


def test_an_empty_mapping_removes_those_of_the_file(write):
    path = write(MAPPINGS)
    cfg = load_cfg(path, ["MODEL.KWARGS", "{}", "FINETUNE.LR_MULT", "{}", "MODEL.KWARGS.width", "8"])
    assert cfg.MODEL.KWARGS == {"width": 8} and cfg.FINETUNE.LR_MULT == {} and cfg.DISTILL.KWARGS == {"width": 64}
    assert "MODEL.KWARGS.norm" not in cfg.origins and cfg.origins["MODEL.KWARGS.width"] == "command line"
    assert load_cfg(path, ["MODEL.KWARGS.width", "8", "MODEL.KWARGS", "{}"]).MODEL.KWARGS == {}
    assert load_cfg(write(cfg.dump())) == cfg
    assert load_cfg(cfg, ["MODEL.KWARGS", "{}"]).MODEL.KWARGS == {}, "a tree that was set in Python too"


def test_arguments_of_a_file_are_those_of_the_model_of_the_command_line_too(write):
    """Its signature decides whether it has them."""
    path = write(MAPPINGS)
    assert load_cfg(path, ["MODEL.ARCH", "resnet14"]).MODEL.KWARGS == {"width": 32, "norm": "group"}
    said = problems_of(check_model, load_cfg(path, ["MODEL.ARCH", "resnet50"]))
    assert said[0].startswith(f"MODEL.KWARGS.width ({path}:2): resnet50 has no such parameter") and len(said) == 2


# --------------------------------------------------------------------------------------------------- problems


def test_all_problems_are_reported_at_once_with_origin_and_nearest_key(write):
    file = write("TRAIN:\n  BATCHSIZE: 3\n  WORKERS: many\nFOO: 1\nOPTIM:\n  LR_POLICY: cosine\n")
    assert problems_of(load_cfg, file, ["BASE_LR", "1", "TEST.BATCH_SIZE", "0"]) == [
        f"TRAIN.BATCHSIZE ({file}:2): no such key; did you mean TRAIN.BATCH_SIZE, TEST.BATCH_SIZE?",
        f"TRAIN.WORKERS ({file}:3): got 'many'; expected an integer (default 4)",
        f"FOO ({file}:4): no such key; --help-config lists all",
        "BASE_LR (command line): no such key; did you mean OPTIM.BASE_LR?",
        "TEST.BATCH_SIZE (command line): got 0; expected 1 or more",
        f"OPTIM.LR_POLICY ({file}:6): got 'cosine'; expected one of {', '.join(SCHEDULES.names())}; did you mean cos?",
    ]


# Arguments, of which the first names the key of the problem unless `KEY: ` does -> words of the problem.
WRONG = [
    ("TRAIN.BATCH_SIZE 1.5", "expected an integer"), ("TRAIN.BATCH_SIZE True", "expected an integer"),
    ("MODEL.CHANNELS_LAST Auto", "true or false or auto ("), ("MODEL.SYNCBN 1", "true or false"),
    ("OPTIM.BASE_LR fast", "got 'fast'; expected a number"), ("OPTIM.BASE_LR nan", "finite"),
    ("OPTIM.BASE_LR null", "expected a number"), ("OPTIM.STEPS [1,a]", "list of numbers"),
    ("OPTIM.STEPS [60,30]", "ascend"), ("RNG_SEED -1", "expected 0 to"), ("RNG_SEED x", "or null"),
    ("RNG_SEED 99999999999999999999", "64 bits"), ("TRAIN 3", "section"), ("DATA.NAME cifar", "did you mean cifar10"),
    ("DATA.NAME x", "packed, "), ("DATA.NAME x", "torchvision/NAME; fix"),
    ("AUG.OPERATIONS grayscale,grayscale", "each name once"), ("TRAIN.METRICS top2", "did you mean topk, top1"),
    ("LOG.TRACKERS mlfow", "did you mean mlflow"),
    ("OPTIM.CLIP agc", "got agc, but this option no longer exists; fix: remove it; clip in"),
    ("MODEL.NUM_CLASSES 3 LOSS.CLASS_WEIGHTS [1,2]", "LOSS.CLASS_WEIGHTS: 3 numbers, MODEL.NUM_CLASSES"),
    ("LOSS.CLASS_WEIGHTS {cat:x}", "numbers by the names of"), ('LOSS.CLASS_WEIGHTS {"cat":-1}', "0 or more"),
    ("LOSS.POSITIVE_WEIGHT {} LOSS.NAME bce", "expected auto, one"), ("LOSS.CLASS_WEIGHTS [1,2,-1]", "0 or more"),
    ("LOSS.CLASS_WEIGHTS auto:1", "list of numbers, e.g. [30, 60], or auto"),
    ("LOSS.BCE_TARGET_THRESHOLD 0.02 MODEL.NUM_CLASSES 3 LOSS.NAME bce LOSS.LABEL_SMOOTHING 0.3", "0.1 and 0.8"),
    # Every target would be 1.
    ("LOSS.BCE_TARGET_THRESHOLD 0 MODEL.NUM_CLASSES 3 LOSS.NAME bce LOSS.LABEL_SMOOTHING 0.1", "expected null, or"),
    ("OPTIM.LR_POLICY steps", "OPTIM.STEPS: expects the epochs"),
    ("OPTIM.MOMENTUM 0", "OPTIM.NESTEROV: MOMENTUM"), ("OPTIM.MOMENTUM 1.5", "expected 0 to 1"),
    ("TRAIN.IM_SIZE 1", "got 1; expected 2 or more"), ("TEST.IM_SIZE 1 TEST.CROP_SIZE 1", "got 1; expected 2 or more"),
    ("TRAIN.IM_SIZE 299", "TEST.IM_SIZE: 299"),
    ("DATA.STD [0,1,1]", "above 0"),
    ("DATA.MEAN [123.675,116.28,103.53]", "pixel values 0 to 1; fix: set it to [0.485, 0.456, 0.406]"),
    ("DATA.MEAN [0.5]", "3 numbers"), ("DATA.CROP_SCALE [0.5,0.2]", "min <= max"),
    ("CFG_DEST ../x.yaml", "plain file name"), ("CFG_DEST checkpoints", "file of the run"),
    ("OUT_DIR http://me/run", "expected a local path"), ("OUT_DIR /", "root of the file system"),
    ("OUT_DIR ", "empty"), ("DATA.CACHE_DIR gs://bucket", "expected a local path"),
    *((f"MODEL.KWARGS {word}", "set MODEL.KWARGS.NAME, or {NAME: VALUE}") for word in ("{width:32}", "32", "{")),
    ("FINETUNE.LR_MULT {fc:_much}", "FINETUNE.LR_MULT.fc: got 'much'; expected a number"),
    ("FINETUNE.LR_MULT.fc 0", "FINETUNE.FREEZE"), ("FINETUNE.LR_MULT.layer4.* -1", "got -1; expected a number above 0"),
    ("FINETUNE.LR_MULT 3", "is a section, not an option; set FINETUNE.LR_MULT.NAME"),
    ("OUT_DIR", "command line: 'OUT_DIR' has no value"),
    ("TASK.NAME multilabel", "got multilabel; the data has one label per image"),
    ("TASK.NAME classification DATA.NAME multilabel LOSS.NAME bce", "the data has several labels"),
    ("TASK.NAME distillation", "there is no teacher"),
    ("TASK.KWARGS.temperature 0.2", "TASK.KWARGS: got temperature, but TASK.NAME auto has no settings"),
    *((f"{key} 1", f"no such key; {hint}") for key, hint in {
        "train.patience": "did you mean TRAIN.PATIENCE?",
        "BATCH_SIZE": "did you mean TRAIN.BATCH_SIZE, TEST.BATCH_SIZE?",
        "train.workrs": "did you mean TRAIN.WORKERS?",
        **dict.fromkeys(("MODEL.WIDTH", "BN.USE_PRECISE_STATS", "X", "TRAIN."), "--help-config lists all"),
    }.items()),
]  # fmt: skip


def test_a_wrong_argument_says_what_is_allowed():
    for words, expected in WRONG:
        overrides = [word.replace("_much", " much") for word in words.split(" ")]
        match = re.match(r"([A-Z][\w.*]+|command line): (.*)", expected)
        key, said = match.groups() if match else (overrides[0], expected)
        (problem,) = problems_of(load_cfg, None, overrides)
        assert problem.startswith(key) and said in problem, words


def test_an_option_that_no_longer_exists_may_have_its_old_default():
    words = [f"{key}={option.default}" for key, option in DECLARED.items() if option.removed]
    assert load_cfg(None, words) == load_cfg() and "OPTIM.CLIP=norm" in words
    assert re.search("DATA.SHUFFLE .*no longer exists", *problems_of(load_cfg, None, ["DATA.SHUFFLE", "blocks"]))


def test_a_wrong_file_says_what_is_expected(write):
    for text, said in [
        ("a: [1", "not a valid YAML"), ("- 1\n", "SECTION"), ("\t:", "not a valid YAML"),
        ("TRAIN:\n  WORKERS: 1\n  WORKERS: 2\n", "TRAIN.WORKERS (FILE:3): already set in line 2; remove one of them"),
        ("TRAIN: {TOPK: 1:30}\n", "TRAIN.TOPK (FILE:1): got '1:30'; expected an integer"),
        *((f"FINETUNE:\n  FREEZE: {value}\n", "FINETUNE.FREEZE (FILE:2): ")
          for value in ("[1.10]", "true", "null", "[[a]]")),
    ]:  # fmt: skip
        file = write(text)
        (problem,) = problems_of(load_cfg, file)
        assert said.replace("FILE", file) in problem and ("FREEZE" not in text or "expected a list of texts" in problem)


@pytest.mark.parametrize("key", [key for key, option in OPTIONS.items() if option.path])
def test_every_path_expands_the_home_folder_and_variables(key, write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    needs = {"DISTILL.WEIGHTS": ["DISTILL.TEACHER", "resnet8"], "FINETUNE.HEAD": ["MODEL.PRETRAINED", "True"]}
    more = needs.get(key, [])
    for text in ("~/x", "$HOME/x", "${HOME}/x"):
        assert get_value(load_cfg(None, [key, text, *more]), key) == "/home/me/x"
        section, _, name = key.rpartition(".")
        of_file = f"{section}: {{{name}: '{text}'}}" if section else f"{name}: '{text}'"
        assert get_value(load_cfg(write(of_file), more), key) == "/home/me/x"
    for text, said in (("$NO_SUCH_NAME/x", "$NO_SUCH_NAME is not set"), ("~no_such_user/x", "no such home folder")):
        (problem,) = problems_of(load_cfg, None, [key, text, *more])[:1]
        assert problem.startswith(key) and said in problem


def test_a_missing_or_unreadable_file_names_its_neighbours(tmp_path):
    (tmp_path / "resnet50.yaml").touch()
    assert f"did you mean {tmp_path}/resnet50.yaml" in problems_of(load_cfg, str(tmp_path / "resnet5O.yaml"))[0]
    said = f"cannot be read: Is a directory; did you mean {tmp_path}/resnet50.yaml?"
    assert said in problems_of(load_cfg, str(tmp_path))[0]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml" in problems_of(load_cfg, str(tmp_path / "binary.yaml"))[0]


# --------------------------------------------------------------------------------------------------- the tree


def test_a_frozen_tree_cannot_be_changed_in_any_way():
    cfg = load_cfg()
    for change in (lambda: setattr(cfg, "OUT_DIR", "x"), lambda: cfg.__setitem__("OUT_DIR", "x"),
                   lambda: cfg.TRAIN.update(WORKERS=1), lambda: cfg.OPTIM.pop("STEPS"),
                   lambda: cfg.OPTIM.__delitem__("STEPS"), lambda: cfg.OPTIM.STEPS.append(1)):  # fmt: skip
        with pytest.raises(AttributeError):
            change()
    assert cfg == load_cfg()


def test_copies_are_equal_and_frozen_and_may_be_changed():
    cfg = load_cfg(None, ["OPTIM.STEPS", "[1, 2]", "MODEL.KWARGS.width", "3"])
    for other in (copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg)), cfg.clone(), changed(cfg, {})):
        assert other == cfg and other.is_frozen() and other.origins == cfg.origins
    other = changed(cfg, {"OPTIM.BASE_LR": 3.0, "OUT_DIR": "x"}, "a test")
    assert (other.OPTIM.BASE_LR, other.OUT_DIR, other.origins["OUT_DIR"]) == (3.0, "x", "a test") and other.is_frozen()
    assert (cfg.OPTIM.BASE_LR, cfg.OUT_DIR) == (0.2, "./exp") and "OUT_DIR" not in cfg.origins


def test_get_cfg_gives_a_fresh_unfrozen_tree():
    first = get_cfg()
    first.TRAIN.TOPK, first.MODEL.KWARGS["width"] = 0, 3
    assert not get_cfg().MODEL.KWARGS
    check_cfg(get_cfg())
    with pytest.raises(ConfigError, match="TRAIN.TOPK"):
        check_cfg(first)


def test_what_is_dumped_loads_back_and_tells_where_each_value_came_from(write):
    words = ["OPTIM.STEPS", "[1, 2]", "OPTIM.WEIGHT_DECAY", "1e-5", "MODEL.KWARGS.a", "[1, x]", "DATA.MEAN", "[0,0,1]"]
    words += ["MODEL.KWARGS.b", "[{d: [{e: 1}], c: {}}]"]
    cfg = load_cfg(None, [*words, "OUT_DIR", "a: b # c", "RNG_SEED", "7"])
    assert load_cfg(write(cfg.dump())) == load_cfg(write(dump_with_origins(cfg))) == cfg
    file = write("TRAIN:\n  WORKERS: 2\n  TOPK: 5\n")
    lines = dump_with_origins(load_cfg(file, ["OPTIM.BASE_LR", "1"])).splitlines()
    marked = [line.strip() for line in lines if "#" in line]
    assert marked == [f"WORKERS: 2  # {file}:2", f"TOPK: 5  # {file}:3", "BASE_LR: 1.0  # command line"]


@pytest.mark.parametrize("of_file, of_words, expected", [
    # TRAIN.DATASET and TEST.DATASET of the file and of the command line; None: not set.
    ((None, None), (None, None), "./data/ILSVRC/"), ((None, None), ("a", None), "a"), ((None, None), ("a", "b"), "b"),
    (("x", None), (None, None), "x"), (("x", None), ("a", None), "a"), (("x", "x/"), ("a", None), "a"),
    (("x", "x"), ("a", "x"), "x"), (("x", "y"), ("a", None), "y"), (("x", "y"), ("a", ""), "a"),
    (("x", "./data/ILSVRC"), ("a", None), "a"), (("x", None), (None, "./data/ILSVRC"), "./data/ILSVRC"),
])  # fmt: skip
def test_the_evaluation_folder_follows_the_training_folder_unless_it_is_set(of_file, of_words, expected, write):
    sections = ("TRAIN", "TEST")
    lines = [f"{name}: {{DATASET: {path}}}" for name, path in zip(sections, of_file, strict=True) if path]
    words = [(f"{name}.DATASET", path) for name, path in zip(sections, of_words, strict=True) if path is not None]
    cfg = load_cfg(write("\n".join(lines)), [word for pair in words for word in pair])
    assert cfg.TEST.DATASET == expected and load_cfg(write(cfg.dump())) == cfg
