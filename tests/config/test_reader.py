"""Reading, checking and writing configs: every trap of yacs closed, every problem reported at once."""

import copy
import pickle
import re
from pathlib import Path

import pytest
from support.original_configs import ORIGINAL, ORIGINAL_FILES
from support.runs import ROOT

from distribuuuu.commands.arguments import dump_with_origins
from distribuuuu.config import ConfigError, check_cfg, get_cfg, load_cfg
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.explain import read_comments
from distribuuuu.config.options import OPEN_SECTIONS


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def problems_of(cfg_file=None, overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_cfg(cfg_file, overrides)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("arch", ORIGINAL_FILES)
def test_the_original_files_load_unchanged(arch, tmp_path):
    lr, wd, batch = ORIGINAL_FILES[arch]
    text = ORIGINAL.format(arch=arch, lr=lr, wd=wd, batch=batch)
    assert len(text.splitlines()) == 43
    cfg = load_cfg(write(tmp_path / "original.yaml", text))
    assert (cfg.MODEL.ARCH, cfg.OUT_DIR) == (arch, f"./{arch}")
    assert (cfg.OPTIM.BASE_LR, cfg.OPTIM.WEIGHT_DECAY, cfg.TRAIN.BATCH_SIZE) == (float(lr), float(wd), batch)
    assert cfg.RNG_SEED is None and cfg.MODEL.WEIGHTS is None and cfg.OPTIM.STEPS == ()
    set_keys = [line for line in text.splitlines() if line.split(":")[1].strip()]
    assert len(cfg.origins) == len(set_keys)


def test_the_defaults_are_those_of_the_original(tmp_path):
    text = ORIGINAL.format(arch="resnet18", lr="0.2", wd="5.0e-05", batch=32)
    assert load_cfg(write(tmp_path / "a.yaml", text), ["OUT_DIR", "./exp"]) == get_cfg()


def test_an_integer_serves_as_a_float_from_file_and_command_line(tmp_path):
    file = write(tmp_path / "a.yaml", "OPTIM: {BASE_LR: 1, WEIGHT_DECAY: 5e-4}")
    cfg = load_cfg(file, ["OPTIM.MIN_LR", "1", "OPTIM.MOMENTUM", "1e-1"])
    assert [cfg.OPTIM.BASE_LR, cfg.OPTIM.WEIGHT_DECAY, cfg.OPTIM.MIN_LR, cfg.OPTIM.MOMENTUM] == [1.0, 5e-4, 1.0, 0.1]
    assert type(cfg.OPTIM.BASE_LR) is float


@pytest.mark.parametrize("word, value", [("true", True), ("True", True), ("FALSE", False), ("false", False)])
def test_the_command_line_takes_any_case_of_true_and_false(word, value):
    assert load_cfg(None, ["MODEL.SYNCBN", word]).MODEL.SYNCBN is value


@pytest.mark.parametrize("word", ["[30, 60]", "(30, 60)", "30,60", "30, 60"])
def test_a_list_of_numbers_in_any_spelling(word):
    assert load_cfg(None, ["OPTIM.STEPS", word]).OPTIM.STEPS == (30, 60)


def test_text_stays_text():
    assert load_cfg(None, ["OUT_DIR", "007"]).OUT_DIR == "007"
    assert load_cfg(None, ["MODEL.WEIGHTS", "None"]).MODEL.WEIGHTS is None
    assert load_cfg(None, ["RNG_SEED", "0"]).RNG_SEED == 0


def test_all_problems_are_reported_at_once_with_origin_and_nearest_key(tmp_path):
    text = "TRAIN:\n  BATCHSIZE: 3\n  WORKERS: many\nFOO: 1\nOPTIM:\n  LR_POLICY: cosine\n"
    file = write(tmp_path / "a.yaml", text)
    problems = problems_of(file, ["BASE_LR", "1", "TEST.BATCH_SIZE", "0"])
    assert problems == [
        f"TRAIN.BATCHSIZE ({file}:2): no such key; did you mean TRAIN.BATCH_SIZE, TEST.BATCH_SIZE?",
        f"TRAIN.WORKERS ({file}:3): got 'many'; expected an integer (default 4)",
        f"FOO ({file}:4): no such key; --help-config lists all",
        "BASE_LR (command line): no such key; did you mean OPTIM.BASE_LR?",
        f"OPTIM.LR_POLICY ({file}:6): got 'cosine'; expected one of cos, cos_after_warmup, cos_timm, exp, lin, steps, "
        "tri; did you mean cos?",
        "TEST.BATCH_SIZE (command line): got 0; expected 1 or more",
    ]


@pytest.mark.parametrize(
    "overrides, key, said",
    [
        (["TRAIN.BATCH_SIZE", "1.5"], "TRAIN.BATCH_SIZE", "expected an integer"),
        (["TRAIN.BATCH_SIZE", "True"], "TRAIN.BATCH_SIZE", "expected an integer"),
        (["MODEL.SYNCBN", "1"], "MODEL.SYNCBN", "true or false"),
        (["OPTIM.BASE_LR", "fast"], "OPTIM.BASE_LR", "got 'fast'; expected a number"),
        (["OPTIM.BASE_LR", "nan"], "OPTIM.BASE_LR", "finite"),
        (["OPTIM.STEPS", "[1, a]"], "OPTIM.STEPS", "list of numbers"),
        (["OPTIM.STEPS", "[60, 30]"], "OPTIM.STEPS", "ascend"),
        (["RNG_SEED", "-1"], "RNG_SEED", "expected 0 to"),
        (["RNG_SEED", "x"], "RNG_SEED", "or null"),
        (["TRAIN", "3"], "TRAIN", "section"),
        (["DATA.NAME", "cifar"], "DATA.NAME", "did you mean cifar10"),
        (["OPTIM.LR_POLICY", "steps"], "OPTIM.STEPS", "is empty"),
        (["OPTIM.LR_POLICY", "exp"], "OPTIM.MIN_LR", "above 0"),
        (["OPTIM.MOMENTUM", "0"], "OPTIM.NESTEROV", "MOMENTUM"),
        (["TRAIN.IM_SIZE", "1"], "TRAIN.IM_SIZE", "got 1; expected 2 or more"),
        (["TEST.IM_SIZE", "1", "TEST.CROP_SIZE", "1"], "TEST.IM_SIZE", "got 1; expected 2 or more"),
        (["TRAIN.IM_SIZE_START", "1", "TRAIN.IM_SIZE_EPOCHS", "[0, 8]"], "TRAIN.IM_SIZE_START", "0, or 2 or more"),
        (["OPTIM.BETAS", "[0.9, 0.99]"], "OPTIM.BETAS", "sgd has no betas"),
        (["OPTIM.EPS", "1e-6"], "OPTIM.EPS", "sgd has no eps"),
        (["TRAIN.IM_SIZE", "299"], "TEST.IM_SIZE", "set it to 299"),
        (["DATA.STD", "[0, 1, 1]"], "DATA.STD", "above 0"),
        (["DATA.MEAN", "[0.5]"], "DATA.MEAN", "three"),
        (["DATA.CROP_SCALE", "[0.5, 0.2]"], "DATA.CROP_SCALE", "min <= max"),
        (["CFG_DEST", "../x.yaml"], "CFG_DEST", "plain file name"),
        (["CFG_DEST", "checkpoints"], "CFG_DEST", "file of the run"),
        (["OUT_DIR", "s3://bucket/run"], "OUT_DIR", "expected a local path"),
        (["OUT_DIR", "/"], "OUT_DIR", "root of the file system"),
        (["DATA.CACHE_DIR", "gs://bucket"], "DATA.CACHE_DIR", "expected a local path"),
        (["OUT_DIR", ""], "OUT_DIR", "empty"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(overrides, key, said):
    problems = problems_of(None, overrides)
    assert len(problems) == 1 and problems[0].startswith(key) and said in problems[0]


def test_odd_words_and_glued_words():
    assert "'OUT_DIR' has no value" in problems_of(None, ["OUT_DIR"])[0]
    assert "write `OPTIM.BASE_LR 0.1` without the =" in problems_of(None, ["OPTIM.BASE_LR=0.1"])[0]
    words = ["OPTIM.BASE_LR=0.1", "TRAIN.WORKERS", "many", "OUT_DIR=a b", "FINETUNE.LR_MULT.layer[12].*=2"]
    first, second = problems_of(None, words)
    assert "write `OPTIM.BASE_LR 0.1 OUT_DIR 'a b' 'FINETUNE.LR_MULT.layer[12].*' 2` without the =" in first
    assert second.startswith("TRAIN.WORKERS (command line): got 'many'; expected an integer")
    assert load_cfg(None, ["OUT_DIR", "exp/lr=0.1"]).OUT_DIR == "exp/lr=0.1"


def test_a_key_given_twice_in_a_file_is_an_error(tmp_path):
    file = write(tmp_path / "a.yaml", "TRAIN:\n  WORKERS: 1\n  WORKERS: 2\n")
    assert problems_of(file) == [f"TRAIN.WORKERS ({file}:3): already set in line 2; remove one of them"]


@pytest.mark.parametrize(
    "text, said", [("a: [1", "not a valid YAML"), ("- 1\n", "SECTION"), ("\t:", "not a valid YAML")]
)
def test_a_file_that_is_no_config(text, said, tmp_path):
    assert said in problems_of(write(tmp_path / "a.yaml", text))[0]


def test_a_missing_or_unreadable_file_names_its_neighbours(tmp_path):
    write(tmp_path / "resnet50.yaml", "")
    assert f"did you mean {tmp_path}/resnet50.yaml" in problems_of(str(tmp_path / "resnet5O.yaml"))[0]
    assert f"cannot be read: it is a folder; did you mean {tmp_path}/resnet50.yaml?" in problems_of(str(tmp_path))[0]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml" in problems_of(str(tmp_path / "binary.yaml"))[0]


@pytest.mark.parametrize(
    "path, meant",
    [
        ("configs/shape/resnet14.yaml", "configs/shapes/resnet14.yaml, "),
        ("resnet50_a1", "configs/imagenet/resnet50_a1.yaml?"),
        ("config/resnet18.yaml", "configs/imagenet/resnet18.yaml?"),
        ("imagenet/botnet5O", "configs/imagenet/botnet50.yaml"),
        ("configs/shapes", "configs/shapes/resnet14.yaml?"),
    ],
)
def test_a_file_is_found_by_parts_of_its_path(path, meant, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert f"did you mean {meant}" in problems_of(path)[0]
    monkeypatch.chdir(tmp_path)  # without ./configs the shipped ones are meant
    if not path.startswith("configs"):
        assert f"did you mean {meant.removeprefix('configs/')}" in problems_of(path)[0]
    assert "did you mean" not in problems_of("no_config_has_this_name")[0]


def test_an_empty_file_and_empty_sections_are_the_defaults(tmp_path):
    assert load_cfg(write(tmp_path / "a.yaml", "")) == get_cfg()
    assert load_cfg(write(tmp_path / "b.yaml", "TRAIN:\nMODEL:\n  KWARGS:\n")) == get_cfg()


def test_kwargs_are_open_and_keep_their_types(tmp_path):
    file = write(tmp_path / "a.yaml", "MODEL:\n  KWARGS:\n    depth: 3\n    sizes: [1, 2]\n")
    cfg = load_cfg(file, ["MODEL.KWARGS.rate", "0.5", "MODEL.KWARGS.name", "gelu", "MODEL.KWARGS.on", "true"])
    assert dict(cfg.MODEL.KWARGS) == {"depth": 3, "sizes": (1, 2), "rate": 0.5, "name": "gelu", "on": True}


def test_an_open_section_is_given_whole_on_the_command_line(tmp_path):
    file = write(tmp_path / "a.yaml", "MODEL: {KWARGS: {width: 8, depth: 3}}")
    words = ["MODEL.KWARGS", "{width: 32, sizes: [1, 2], more: {a: b}}", "DISTILL.KWARGS", "{'rate': 0.5}"]
    cfg = load_cfg(file, [*words, "FINETUNE.LR_MULT", "{fc: 1e1, 'layer4.*': 2, 0: 3}"])
    assert cfg.MODEL.KWARGS == {"width": 32, "depth": 3, "sizes": (1, 2), "more": {"a": "b"}}
    assert dict(cfg.DISTILL.KWARGS) == {"rate": 0.5}
    assert list(cfg.FINETUNE.LR_MULT.items()) == [("fc", 10.0), ("layer4.*", 2.0), ("0", 3.0)]
    assert cfg.origins["MODEL.KWARGS.width"] == cfg.origins["FINETUNE.LR_MULT.fc"] == "command line"
    assert load_cfg(write(tmp_path / "b.yaml", cfg.dump())) == cfg
    for word in ("{width:32}", "32", "{"):
        assert "set MODEL.KWARGS.NAME, or {NAME: VALUE}" in problems_of(None, ["MODEL.KWARGS", word])[0]
    assert "FINETUNE.LR_MULT.fc (command line): got 'much'" in problems_of(None, ["FINETUNE.LR_MULT", "{fc: much}"])[0]


@pytest.mark.parametrize("word", ["['conv1', 'layer1.*']", "[conv1, layer1.*]", "conv1,layer1.*", " conv1 , layer1.*,"])
def test_a_list_of_texts_in_any_spelling(word, tmp_path):
    assert load_cfg(None, ["FINETUNE.FREEZE", word]).FINETUNE.FREEZE == ("conv1", "layer1.*")
    file = write(tmp_path / "a.yaml", f"FINETUNE:\n  FREEZE: {word}\n")
    assert load_cfg(file).FINETUNE.FREEZE == ("conv1", "layer1.*")


def test_patterns_and_numbers_are_texts_too(tmp_path):
    for word, expected in (("[!f]*", ("[!f]*",)), ("*", ("*",)), ("0,7.net.0", ("0", "7.net.0")), ("1.10", ("1.10",))):
        assert load_cfg(None, ["FINETUNE.FREEZE", word]).FINETUNE.FREEZE == expected
    assert load_cfg(None, ["FINETUNE.FREEZE", ""]).FINETUNE.FREEZE == ()
    file = write(tmp_path / "a.yaml", "FINETUNE:\n  FREEZE: [0, conv1]\n")
    assert load_cfg(file).FINETUNE.FREEZE == ("0", "conv1")
    for text in ("[1.10]", "true", "null", "[[a]]"):
        file = write(tmp_path / "b.yaml", f"FINETUNE:\n  FREEZE: {text}\n")
        (problem,) = problems_of(file)
        assert problem.startswith(f"FINETUNE.FREEZE ({file}:2): ") and "expected a list of texts" in problem


def test_patterns_with_dots_are_keys_of_a_section_and_keep_their_order(tmp_path):
    file = write(tmp_path / "a.yaml", "FINETUNE:\n  LR_MULT: {'layer4.*': 2, fc: 1e1, '*': 0.5}\n")
    cfg = load_cfg(file, ["FINETUNE.LR_MULT.layer4.*", "3", "FINETUNE.LR_MULT.a.b", "1e-1"])
    expected = [("layer4.*", 3.0), ("fc", 10.0), ("*", 0.5), ("a.b", 0.1)]
    assert list(cfg.FINETUNE.LR_MULT.items()) == expected
    for number, text in enumerate((cfg.dump(), dump_with_origins(cfg))):
        again = load_cfg(write(tmp_path / f"{number}.yaml", text))
        assert list(again.FINETUNE.LR_MULT.items()) == expected


@pytest.mark.parametrize(
    "words, said",
    [
        (["FINETUNE.LR_MULT.fc", "0"], "FINETUNE.LR_MULT.fc .*FINETUNE.FREEZE"),
        (["FINETUNE.LR_MULT.layer4.*", "-1"], r"FINETUNE.LR_MULT.layer4.\* .*got -1; expected a number above 0"),
        (["FINETUNE.LR_MULT.fc", "much"], "FINETUNE.LR_MULT.fc .*got 'much'; expected a number"),
        (["FINETUNE.LR_MULT.fc", "nan"], "FINETUNE.LR_MULT.fc .*finite"),
        (["FINETUNE.LR_MULT", "3"], "FINETUNE.LR_MULT .*a section, not an option; set FINETUNE.LR_MULT.NAME"),
        (["FINETUNE.HEAD_RESET", "true"], "FINETUNE.HEAD_RESET .*without FINETUNE.WEIGHTS"),
    ],
)
def test_wrong_factors_are_refused(words, said):
    (problem,) = problems_of(None, words)
    assert re.match(said, problem)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_buckets_that_the_compiler_cannot_cut_by_are_refused(mode):
    """torch's DDPOptimizer asserts that a bucket is no smaller than the first, which has 1 MiB."""
    words = ["MODEL.COMPILE", mode, "DIST.BUCKET_MB"]
    (problem,) = problems_of(None, [*words, "0.999"])
    assert re.match(r"DIST.BUCKET_MB .*got 0.999; .*MODEL.COMPILE .*expected 1 or more; set it to 1 or more", problem)
    for sound in ([*words, "1"], ["DIST.BUCKET_MB", "0.5"]):
        load_cfg(None, sound)
    if mode == "default":  # fsdp works with no other one
        load_cfg(None, [*words, "0.5", "DIST.SHARD", "fsdp"])


def test_a_frozen_tree_cannot_be_changed_in_any_way():
    cfg = load_cfg()
    changes = [
        lambda: setattr(cfg, "OUT_DIR", "x"),
        lambda: cfg.__setitem__("OUT_DIR", "x"),
        lambda: cfg.TRAIN.update(WORKERS=1),
        lambda: cfg.OPTIM.pop("STEPS"),
        lambda: cfg.OPTIM.__delitem__("STEPS"),
        lambda: cfg.OPTIM.STEPS.append(1),
    ]
    for change in changes:
        with pytest.raises(AttributeError):
            change()
    assert cfg == get_cfg()


def test_copies_and_pickles_are_equal_and_stay_frozen():
    cfg = load_cfg(None, ["OPTIM.STEPS", "[1, 2]", "MODEL.KWARGS.width", "3"])
    for other in (copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg)), cfg.clone()):
        assert other == cfg and other.is_frozen() and other.origins == cfg.origins
    clone = cfg.clone()
    clone.defrost()
    clone.OPTIM.BASE_LR = 3.0
    assert cfg.OPTIM.BASE_LR == 0.2


def test_get_cfg_gives_a_fresh_unfrozen_tree():
    first = get_cfg()
    first.TRAIN.WORKERS = 99
    first.MODEL.KWARGS["width"] = 3
    assert get_cfg().TRAIN.WORKERS == 4 and not get_cfg().MODEL.KWARGS


def test_what_is_dumped_loads_back_to_the_same_tree(tmp_path):
    words = ["OPTIM.STEPS", "[1, 2]", "OPTIM.WEIGHT_DECAY", "1e-5", "MODEL.KWARGS.a", "[1, x]", "DATA.MEAN", "[0,0,1]"]
    cfg = load_cfg(None, [*words, "OUT_DIR", "a: b # c", "RNG_SEED", "7"])
    assert load_cfg(write(tmp_path / "a.yaml", cfg.dump())) == cfg
    assert load_cfg(write(tmp_path / "b.yaml", dump_with_origins(cfg))) == cfg


def test_the_dump_tells_where_each_value_came_from(tmp_path):
    file = write(tmp_path / "a.yaml", "TRAIN:\n  WORKERS: 2\n  TOPK: 5\n")
    lines = dump_with_origins(load_cfg(file, ["OPTIM.BASE_LR", "1"])).splitlines()
    marked = [line.strip() for line in lines if "#" in line]
    assert marked == [f"WORKERS: 2  # {file}:2", "BASE_LR: 1.0  # command line"]


DEFAULT_FOLDER = "./data/ILSVRC/"


@pytest.mark.parametrize(
    "of_file, of_words, expected",
    [
        # Of the file and of the command line: TRAIN.DATASET and TEST.DATASET, None: not set.
        ((None, None), ("/a", None), "/a"),
        ((None, None), ("/a", "/b"), "/b"),
        ((None, None), ("/a", DEFAULT_FOLDER), "./data/ILSVRC"),
        ((None, None), (None, "/b"), "/b"),
        ((DEFAULT_FOLDER, DEFAULT_FOLDER), (None, None), DEFAULT_FOLDER),
        ((DEFAULT_FOLDER, DEFAULT_FOLDER), ("/a", None), "/a"),
        ((DEFAULT_FOLDER, DEFAULT_FOLDER), ("/a", "/b"), "/b"),
        ((DEFAULT_FOLDER, DEFAULT_FOLDER), (None, "/b"), "/b"),
        (("/x", None), (None, None), "/x"),
        (("/x", None), ("/a", None), "/a"),
        (("/x", DEFAULT_FOLDER), (None, None), "/x"),
        (("/x", DEFAULT_FOLDER), ("/a", None), "/a"),
        (("/x", "/x"), ("/a", None), "/a"),
        (("/x", "/x/"), ("/a", None), "/a"),
        (("/x", "/x"), ("/a", "/x"), "/x"),
        (("/x", "/y"), (None, None), "/y"),
        (("/x", "/y"), ("/a", None), "/y"),
        ((None, "/y"), ("/a", None), "/y"),
        ((None, "data/ILSVRC"), (None, None), "data/ILSVRC"),
        ((None, "data/ILSVRC"), ("/a", None), "/a"),
    ],
)
def test_the_evaluation_folder_follows_the_training_folder_unless_it_is_set(of_file, of_words, expected, tmp_path):
    sections = ("TRAIN", "TEST")
    lines = [f"{name}: {{DATASET: {path}}}" for name, path in zip(sections, of_file, strict=True) if path]
    words = [(f"{name}.DATASET", path) for name, path in zip(sections, of_words, strict=True) if path]
    cfg = load_cfg(write(tmp_path / "a.yaml", "\n".join(lines)), [word for pair in words for word in pair])
    assert cfg.TEST.DATASET == expected
    assert load_cfg(write(tmp_path / "b.yaml", cfg.dump())) == cfg


def test_the_original_files_evaluate_the_folder_of_the_command_line(tmp_path):
    file = write(tmp_path / "a.yaml", ORIGINAL.format(arch="resnet18", lr="0.2", wd="5.0e-05", batch=32))
    cfg = load_cfg(file, ["TRAIN.DATASET", "/a"])
    assert cfg.TEST.DATASET == "/a" and cfg.origins["TEST.DATASET"] == "TRAIN.DATASET, command line"
    file = write(tmp_path / "b.yaml", f"TEST: {{DATASET: {DEFAULT_FOLDER}}}\nTRAIN: {{DATASET: /x}}")
    assert list(load_cfg(file).origins)[0] == "TRAIN.DATASET", "the first origin names the config's file"


def test_check_cfg_checks_a_tree_made_by_hand():
    cfg = get_cfg()
    check_cfg(cfg)
    cfg.TRAIN.TOPK = 0
    with pytest.raises(ConfigError, match="TRAIN.TOPK"):
        check_cfg(cfg)


def test_every_option_is_documented_once():
    assert sorted(read_comments()) == sorted([*(key for key, _ in iter_options(get_cfg())), *OPEN_SECTIONS])


MAPPINGS = """
MODEL: {ARCH: resnet8, KWARGS: {width: 32, norm: group}}
DISTILL: {TEACHER: resnet14, WEIGHTS: pretrained, KWARGS: {width: 64}}
FINETUNE: {LR_MULT: {fc: 10}}
"""


def test_mappings_are_merged_by_key_and_an_empty_one_removes_those_of_the_file(tmp_path):
    path = write(tmp_path / "a.yaml", MAPPINGS)
    cfg = load_cfg(path, ["MODEL.KWARGS", "{width: 8}", "FINETUNE.LR_MULT", "{layer1: 2}"])
    assert cfg.MODEL.KWARGS == {"width": 8, "norm": "group"} and cfg.FINETUNE.LR_MULT == {"fc": 10.0, "layer1": 2.0}
    cfg = load_cfg(path, ["MODEL.KWARGS", "{}", "FINETUNE.LR_MULT", "{}", "MODEL.KWARGS.width", "8"])
    assert cfg.MODEL.KWARGS == {"width": 8} and cfg.FINETUNE.LR_MULT == {} and cfg.DISTILL.KWARGS == {"width": 64}
    assert "MODEL.KWARGS.norm" not in cfg.origins and cfg.origins["MODEL.KWARGS.width"] == "command line"
    assert load_cfg(path, ["MODEL.KWARGS.width", "8", "MODEL.KWARGS", "{}"]).MODEL.KWARGS == {}
    assert load_cfg(write(tmp_path / "b.yaml", cfg.dump())) == cfg
    assert load_cfg(cfg, ["MODEL.KWARGS", "{}"]).MODEL.KWARGS == {}, "a tree that was set in Python too"


@pytest.mark.parametrize(
    "section, name, other",
    [("MODEL.KWARGS", "MODEL.ARCH", "resnet14"), ("DISTILL.KWARGS", "DISTILL.TEACHER", "resnet8")],
)
def test_arguments_of_the_files_model_do_not_reach_another_one(tmp_path, section, name, other):
    path = write(tmp_path / "a.yaml", MAPPINGS)
    (problem,) = problems_of(path, [name, other])
    assert problem.startswith(f"{section} ({path}:") and f"add {section} '{{}}' to leave them out" in problem
    assert "got width" in problem and f"with {name} {other}" in problem
    load_cfg(path, [name, other, section, "{}"])
    keys = {"MODEL.KWARGS": ["MODEL.KWARGS.width", "32", "MODEL.KWARGS.norm", "group"],
            "DISTILL.KWARGS": ["DISTILL.KWARGS.width", "64"]}  # fmt: skip
    load_cfg(path, [name, other, *keys[section]])
    load_cfg(path, [name, "resnet8" if name == "MODEL.ARCH" else "resnet14"])
    load_cfg(path, ["DISTILL.TEACHER", "", "DISTILL.WEIGHTS", ""])


@pytest.mark.parametrize(
    "key, said",
    [
        ("TRAIN.EARLY_STOPPING", "no such key; there is no early stopping"),
        ("EARLY_STOPPING.PATIENCE", "no such key; there is no early stopping"),
        ("train.patience", "no such key; there is no early stopping"),
        ("WANDB.PROJECT", "no such key; there is no logger for it; OUT_DIR/metrics.jsonl"),
        ("LOG.MLFLOW", "no such key; there is no logger for it"),
        ("_BASE_", "no such key; configs do not include others"),
        ("SOLVER.MAX_ITER", "no such key; the length of a run is in epochs; set OPTIM.MAX_EPOCH"),
        ("trainer.max_epochs", "no such key; did you mean OPTIM.MAX_EPOCH?"),
        ("EPOCHS", "no such key; did you mean OPTIM.MAX_EPOCH?"),
        ("OPTIM.LR", "no such key; did you mean OPTIM.BASE_LR?"),
        ("BATCH_SIZE", "no such key; did you mean TRAIN.BATCH_SIZE, TEST.BATCH_SIZE?"),
        ("DATALOADER.NUM_WORKERS", "no such key; did you mean TRAIN.WORKERS?"),
        ("NUM_GPUS", "no such key; did you mean --nproc?"),
        ("train.workrs", "no such key; did you mean TRAIN.WORKERS?"),
        ("TRAIN_BATCH_SIZE", "no such key; did you mean TRAIN.BATCH_SIZE?"),
        *((key, "no such key; --help-config lists all")
          for key in ("MODEL.WIDTH", "TRAIN.CHECKPOINT_PERIOD", "BN.USE_PRECISE_STATS", "X", "TRAIN.")),
    ],
)  # fmt: skip
def test_a_hint_is_an_equivalent_or_similar_or_left_out(key, said):
    (problem,) = problems_of(None, [key, "1"])
    assert problem.startswith(f"{key} (command line): {said}"), problem


def test_a_foreign_name_in_a_file_has_its_hint_and_every_equivalent_names_an_option(tmp_path):
    from distribuuuu.config.foreign_names import BY_NAME, MISSING

    problems = problems_of(write(tmp_path / "a.yaml", "_BASE_: b.yaml\nWANDB: {PROJECT: x}\n"))
    assert "configs do not include others" in problems[0] and "no logger for it" in problems[1]
    keys = {word.split()[0] for word in BY_NAME.values()} - {"--cfg", "--nproc", "distribuuuu"}
    known = dict(iter_options(get_cfg()))
    assert {key for key in keys if key not in known and not key.startswith("MODEL.KWARGS.")} == set()
    assert not set(BY_NAME) & {name for names in MISSING for name in names.split()}
