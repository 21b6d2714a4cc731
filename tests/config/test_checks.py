"""Checks that do not import torch: names of models and optimizers, and options that have no effect."""

import os
import re
import sys

import pytest
import torch
import yaml
from support.original_configs import ORIGINAL, ORIGINAL_FILES
from support.recipe_measures import FILES
from support.runs import ROOT, message_of, problems_of, run_tool, small_options
from support.tables import each_row

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.conflicts import find_unused_options
from distribuuuu.config.derived import CONDITIONS
from distribuuuu.config.model_names import SOURCES, find_model_problems, load_names
from distribuuuu.config.options import OPTIONS
from distribuuuu.config.registry import BUILT_IN_TASKS, TASKS
from distribuuuu.engine.feature_preflight import find_compiler
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.models.find_architecture import find_architecture
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.tasks.classification import Classification
from distribuuuu.trainer import train_model


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "distribuuuu" / "names"


def keep_all() -> None:
    with pytest.raises(ConfigError, match="unknown model 'nothing'"):
        find_architecture("nothing")


def problem_of(arch: str, **kwargs) -> str:
    return "".join(message for _, message in find_model_problems("MODEL.ARCH", arch, "MODEL.KWARGS", kwargs))


# Also deprecated names, as tv_resnet50, which timm knows but does not list.
KNOWN = ("resnet14", "resnet50", "timm/resnet50", "resnet50.a1_in1k", "timm/resnet50.a1_in1k", "torchvision/resnet50",
         "alexnet", "timm/tv_resnet50", "distribuuuu/resnet8")  # fmt: skip
UNKNOWN = ("resnet5O", "resnet50.a1_in1x", "timm/resnet5O", "timm/resnet50.a1_in1x", "timm/nothing_like_it",
           "torchvision/resnt50", "torchvision/maskrcnn_resnet50_fpn", "tim/resnet50", "a/b/resnet50", "",
           "distribuuuu/vit")  # fmt: skip


def test_the_cached_names_give_the_answer_of_the_packages():
    keep_all()
    for arch in (*KNOWN, *UNKNOWN):
        expected = ""
        try:
            find_architecture(arch)
        except ConfigError as error:
            expected = str(error).removeprefix("MODEL.ARCH: ")
        assert problem_of(arch) == expected and bool(expected) == (arch in UNKNOWN)


@pytest.mark.parametrize("section", ["MODEL", "DISTILL"])
def test_keywords_that_name_weights_are_refused(tmp_path, section):
    file = tmp_path / "a.yaml"
    for name in ("pretrained_cfg_overlay", "cache_dir", "checkpoint_path", "pretrained", "weights"):
        file.write_text(yaml.safe_dump({section: {"KWARGS": {name: "x", "width": 8}}}))
        for given in ((str(file),), (None, [f"{section}.KWARGS", str({name: "x"})])):
            with pytest.raises(ConfigError) as caught:
                load_cfg(*given)
            refused = [str(each) for each in caught.value.problems if each.key.startswith(f"{section}.KWARGS.{name}")]
            assert len(refused) == 1 and "instead" in refused[0]


def test_a_cache_that_cannot_be_read_is_made_again(cache):
    keep_all()
    for content in (b"\xff", b'{"a": 3}'):
        for file in cache.iterdir():
            file.write_bytes(content)
        assert not any(map(load_names, SOURCES)) and not problem_of("resnet5O")
    keep_all()
    assert len(list(cache.iterdir())) == 3 and problem_of("resnet5O")


def test_wrong_names_and_keywords_are_reported_without_torch_and_all_at_once(image_folder, tmp_path):
    keep_all()
    with pytest.raises(ConfigError, match="unknown optimizer 'adamv'"):
        model = find_architecture("resnet8").constructor(num_classes=3)
        build_optimizer(load_cfg(None, ["OPTIM.NAME", "adamv"]), model)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path / "none"), str(ROOT)])
    words = ["MODEL.KWARGS.widht", 3, "OPTIM.NAME", "adamv", "TRAIN.BATCH_SIZE", 999, "DISTILL.TEACHER", "resnet5O",
             "DISTILL.WEIGHTS", "pretrained", "MODEL.KWARGS.pretrained_cfg_overlay", "{file: x.pth.tar}"]  # fmt: skip
    done = run_tool("train_net.py", *small_options(image_folder, "/proc/out", *words), PYTHONPATH=path)
    assert done.returncode == 2 and done.stderr.startswith("6 problems to solve first:"), done.stderr
    for said in (
        "MODEL.KWARGS.widht (command line): resnet8 has no such parameter; did you mean width?",
        "MODEL.KWARGS.pretrained_cfg_overlay (command line): set MODEL.PRETRAINED or FINETUNE.WEIGHTS instead",
        "OPTIM.NAME (command line): unknown optimizer 'adamv'; did you mean adam",
        "TRAIN.BATCH_SIZE (command line): got 999 images per step",
        "DISTILL.TEACHER (command line): unknown model 'resnet5O' of distribuuuu/NAME, timm/NAME, torchvision/NAME; "
        "did you mean resnet56, resnet50",
        "OUT_DIR (command line): /proc cannot be written to",
    ):
        assert said in done.stderr
    words = ["DATA.NAME", "imagenet", "TRAIN.DATASET", "none", "MODEL.ARCH", "docs"]
    done = run_tool("train_net.py", *words, PYTHONPATH=path)  # a plug-in that does not import torch
    assert done.stderr.startswith("2 problems") and "model 'docs'" in done.stderr and "fix: ./docs" in done.stderr


TEACHER, STEPS = "DISTILL.TEACHER resnet18 DISTILL.WEIGHTS pretrained", "OPTIM.LR_POLICY steps OPTIM.STEPS [30]"
# Words that set an option without effect -> words that give it one.
CASES = {
    "AUG.MIX_PROB 0.5": "AUG.MIXUP 1", "AUG.MIX_BY step": "AUG.CUTMIX 1", "AUG.MIX_GROUP 8": "AUG.CUTMIX 1",
    "AUG.CUTMIX_SHARE 0.2": "AUG.CUTMIX 1 AUG.MIXUP 1", "AUG.ERASING_MODE pixel": "AUG.ERASING 0.1",
    "DATA.CROP_SCALE [0.5,1] DATA.NAME cifar10": "DATA.CROP resized", "DATA.CROP_PADDING 2": "DATA.NAME cifar10",
    "DATA.CROP_RATIO [1,1] DATA.CROP pad": "DATA.CROP auto", "DATA.CROP_PADDING_MODE reflect": "DATA.CROP pad",
    "DATA.FLIP_MODE alternating DATA.FLIP 0": "DATA.FLIP 0.5",
    "DATA.TIMEOUT_S 9 DATA.NAME packed": "TEST.DATASET https://host/pack",
    "DISTILL.KIND hard": TEACHER,
    "DISTILL.ALPHA 0.2": TEACHER, "DISTILL.KWARGS.width 3": TEACHER, "DISTILL.TEMPERATURE 2": TEACHER,
    **{f"EMA.{words}": "EMA.HALF_LIFE 10" for words in ("RAMP_UP 0", "EVERY_STEPS 2", "START_EPOCH 1")},
    "LOSS.POSITIVE_WEIGHT [2]": "LOSS.NAME bce", "LOSS.BCE_TARGET_THRESHOLD 0": "LOSS.NAME bce",
    "OPTIM.BETAS [0.9,0.9]": "OPTIM.NAME adamw", "OPTIM.EPS 1e-6": "OPTIM.NAME adamw",
    "TEST.FLIP True TASK.NAME predictor": "TASK.NAME auto", "TEST.SHIFT 1 TASK.NAME predictor": "TASK.NAME auto",
    "MODEL.INIT fan_out MODEL.PRETRAINED True": "MODEL.PRETRAINED False",
    "LOG.NUM_IMAGES 3 LOG.TENSORBOARD False": "LOG.TRACKERS [tensorboard]",
    "LOSS.FOCAL_GAMMA 3": "LOSS.NAME focal",
    "OPTIM.STEPS [30]": "OPTIM.LR_POLICY steps", "OPTIM.LR_MULT 0.2": STEPS,
    f"OPTIM.MIN_LR 0.1 {STEPS}": "OPTIM.LR_POLICY lin OPTIM.STEPS []",
    "OPTIM.LR_SCALE_BATCH 512": "OPTIM.LR_SCALE linear",
    "OPTIM.WARMUP_FACTOR 0.5 OPTIM.WARMUP_EPOCHS 0": "OPTIM.WARMUP_EPOCHS 1",
    "OPTIM.DAMPENING 0.5 OPTIM.NESTEROV False OPTIM.NAME adamw": "OPTIM.NAME SGD",
    "TRAIN.IM_SIZE_EPOCHS [0,8]": "TRAIN.IM_SIZE_START 128", "TRAIN.LOAD_OPT False": "MODEL.WEIGHTS a.pth",
    "TRAIN.IM_SIZE_MULTIPLE 16": "TRAIN.IM_SIZE_START 128 TRAIN.IM_SIZE_EPOCHS [0,8]",
    "TRAIN.SPLIT train2 DATA.NAME cifar10": "DATA.NAME imagefolder",
    "TEST.SPLIT train DATA.NAME shapes": "DATA.NAME packed", "TEST.IM_SIZE 300 TEST.CROP squash": "TEST.CROP center",
}  # fmt: skip


@TASKS.register("predictor")
class OwnScores(Classification):
    def predict_step(self, model, images):
        return model(images)


def test_an_option_without_effect_is_named_with_what_it_needs_and_each_condition_has_a_case():
    for unused, more in CASES.items():
        (problem,) = find_unused_options(load_cfg(None, unused.split()))
        assert unused.startswith(problem.key) and "has no effect; it needs " in problem.message
        assert find_unused_options(load_cfg(None, f"{unused} {more}".split())) == [], unused
    needs = {key: option.needs for key, option in OPTIONS.items() if option.needs}
    assert len(needs) == len(CASES) and all(any(case.startswith(key) for case in CASES) for key in needs)
    assert set(needs.values()) == set(CONDITIONS)


@each_row(("words", "key"), [
    ("OPTIM.LR_POLICY steps OPTIM.STEPS [1,30,60]", "OPTIM.STEPS: epoch 60"),
    ("OPTIM.LR_LAG 3", "OPTIM.LR_LAG: epoch 3"),
    ("EMA.HALF_LIFE 9 EMA.START_EPOCH 9", "EMA.START_EPOCH: epoch 9"), ("TRAIN.PATIENCE 3", ""),
    ("TRAIN.IM_SIZE_START 64 TRAIN.IM_SIZE_EPOCHS [0,9]", "TRAIN.IM_SIZE_EPOCHS: epoch 9"),
    ("OPTIM.LR_POLICY steps OPTIM.STEPS [1,2]", ""), ("OPTIM.LR_LAG 2", ""), ("OPTIM.LR_LAG 3 OPTIM.MAX_EPOCH 0", ""),
])  # fmt: skip
def test_an_epoch_after_the_end_of_the_run_is_named(words, key):
    found = find_unused_options(load_cfg(None, ["OPTIM.MAX_EPOCH", "3", *words.split()]))
    texts = [str(problem).replace(" (command line)", "") for problem in found]
    assert texts == ([f"{key} is not reached; it needs OPTIM.MAX_EPOCH above {key.split()[-1]}"] if key else [])


MIXED = "AUG.MIXUP 0.2 AUG.CUTMIX 1"


@each_row(("words", "key"), [
    ("AUG.MIXUP 0.2 AUG.MIX_PROB 0", "AUG.MIX_PROB"), ("AUG.CUTMIX 1 AUG.MIX_PROB 0", "AUG.MIX_PROB"),
    (f"{MIXED} AUG.CUTMIX_SHARE 0", "AUG.CUTMIX_SHARE"), (f"{MIXED} AUG.CUTMIX_SHARE 1", "AUG.CUTMIX_SHARE"),
    ("AUG.MIXUP 1 AUG.MIX_BY step AUG.MIX_GROUP 2", "AUG.MIX_BY"),
    ("TRAIN.IM_SIZE_START 1 TRAIN.IM_SIZE_EPOCHS [0,2]", "TRAIN.IM_SIZE_START"),
    ("DISTILL.WEIGHTS pretrained", "DISTILL.WEIGHTS"), ("FINETUNE.HEAD probe", "FINETUNE.HEAD"),
    ("FINETUNE.HEAD_RESET True", "FINETUNE.HEAD_RESET"),
    (f"{TEACHER} TASK.NAME lookahead", "DISTILL.TEACHER"), (f"{TEACHER} TASK.NAME classification", "DISTILL.TEACHER"),
    ("TASK.MIXINS unknown TASK.KWARGS.rank 3", "TASK.MIXINS"),
    *((f"TASK.NAME {name} DATA.VIEWS 3", "DATA.VIEWS") for name in BUILT_IN_TASKS if name != "distillation"),
    *((f"TASK.NAME {name} DATA.NAME multilabel LOSS.NAME bce", "TASK.NAME") for name in ("airbench", "lookahead")),
])  # fmt: skip
def test_a_run_without_what_was_asked_for_does_not_start(words, key):
    problems = [text.partition(" ")[0] for text in problems_of(load_cfg, None, words.split())]
    assert problems in ([key], ["TASK.NAME", key])


def test_every_task_of_the_package_is_checked_as_built_in():
    own = {name for name in TASKS.names() if TASKS.get(name).__module__.startswith("distribuuuu.")}
    assert {*BUILT_IN_TASKS} == own | {"airbench", "lookahead"}, "the latter are those of a shipped recipe"


@each_row(("name", "kwargs", "said"), [
    ("adamw", "{amsgrad: abc}", "OPTIM.KWARGS.amsgrad: got abc; expected True or False"),
    ("adamw", "{amsgrad: 1}", "got 1; expected True or False"), ("sgd", "{maximize: x}", "expected True or False"),
    ("lamb", "{max_grad_norm: x}", "OPTIM.KWARGS.max_grad_norm: got x; expected a finite number"),
    ("muon", "{ns_coefficients: [1]}", "OPTIM.KWARGS: got {'ns_coefficients': (1,)}; muon fails in its first step: "),
    ("muon", "{ns_steps: 5}", ""), ("adamw", "{amsgrad: true}", ""), ("sgd", "{maximize: true}", ""),
])  # fmt: skip
def test_arguments_of_an_optimizer_are_tried_before_the_data_is_opened(name, kwargs, said):
    words = ["OPTIM.NAME", name, "OPTIM.KWARGS", kwargs, "MODEL.ARCH", "resnet8", "MODEL.NUM_CLASSES", "2"]
    cfg = load_cfg(None, words)
    before = torch.random.get_rng_state()
    if said:
        assert said in message_of(resolve_cfg, cfg).replace(" (command line)", "")
    else:
        resolve_cfg(cfg)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("tools, found", [("gcc", False), ("g++", True), ("cc c++ clang++ clang", False)])
def test_the_compiler_is_the_one_that_torch_calls(tmp_path, monkeypatch, tools, found):
    for name in tools.split():
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    for key in ("CC", "CXX"):
        monkeypatch.delenv(key, raising=False)
    assert bool(find_compiler()) == found
    monkeypatch.setenv("CXX", f"{tmp_path / tools.split()[0]} -O2")
    assert find_compiler()


@pytest.mark.project
def test_configs_that_are_there_have_no_such_option(tmp_path):
    words = ["DATA.NAME", "packed", "DATA.CROP_PADDING", "2", "DATA.CROP_SCALE", "[0.5, 1]"]
    assert find_unused_options(load_cfg(None, words)) == [], "a pack tells its crop only when it is opened"
    for arch, (lr, wd, batch) in ORIGINAL_FILES.items():
        (tmp_path / f"{arch}.yaml").write_text(ORIGINAL.format(arch=arch, lr=lr, wd=wd, batch=batch))
    for path in [*FILES, *tmp_path.iterdir()]:
        assert find_unused_options(cfg := load_cfg(str(path))) == [], path
    (tmp_path / "dump.yaml").write_text(cfg.dump())  # which sets every option
    assert find_unused_options(load_cfg(str(tmp_path / "dump.yaml"))) == [], path


def test_the_log_names_such_options_and_the_folders(small_cfg, finished_run, tmp_path, image_folder):
    words = ("DATA.REPEATS", 2, "TRAIN.BATCH_SIZE", 9, "TRAIN.GLOBAL_BATCH_SIZE", 10, "OPTIM.WARMUP_EPOCHS", 0)
    train_model(small_cfg("OPTIM.STEPS", "[1]", "OPTIM.MAX_EPOCH", 1, "TEST.DATASET", f"{image_folder}/.", *words))
    log = (tmp_path / "out" / "train.log").read_text()
    assert "OPTIM.STEPS (command line): [1] has no effect; it needs OPTIM.LR_POLICY steps" in log
    assert log.count("has no effect") == 1
    plan = "global batch 10 = 5 images x 2 micro-batches x 1 process (TRAIN.BATCH_SIZE 9 rounded down)"
    assert f"step: {plan}; 4 steps per epoch, with 20 of the 48 images" in log, "5 images a step, each twice"
    assert "images" not in re.search("step: (.*)", (finished_run / "train.log").read_text())[1].partition("epoch")[2]
    assert f"validation data: {image_folder}/. (TEST.DATASET), training data: {image_folder}" in log
