"""Before the first step: problems found without torch, the dry run, trial runs, and the log."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.failing_models import Idle
from support.images import draw_folder
from support.processes import on_processes
from support.runs import assert_close, newest, small_options

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.config.registry import MODELS, dataset_class
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.loader import build_images
from distribuuuu.data.seeding import seed_cpu
from distribuuuu.engine.build import check_warmup
from distribuuuu.engine.dry_run import dry_run_training
from distribuuuu.engine.preflight import find_run_problems, resolve_cfg, resolve_num_classes
from distribuuuu.engine.run import begin_epoch
from distribuuuu.engine.trial_run import trial_run
from distribuuuu.launch.detect import detect_launch
from distribuuuu.models import build_model, preprocessing
from distribuuuu.tasks.classification import Classification
from distribuuuu.trainer import evaluate_weights, train_model


def test_initial_weights_depend_on_the_seed_whichever_generator_a_model_draws_from():
    def draw(seed: int) -> list[float]:
        seed_cpu(seed)
        return [torch.rand(()).item(), float(np.random.rand()), random.random()]

    first, other = draw(2**40 + 5), draw(6)
    assert draw(2**40 + 5) == first and all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("words", ["OPTIM.MAX_EPOCH 2", "OPTIM.MAX_EPOCH 5 OPTIM.LR_POLICY tri"])
def test_a_new_run_is_longer_than_its_warmup(words, small_cfg):
    with pytest.raises(ConfigError, match=r"OPTIM.WARMUP_EPOCHS: got 5; expected at most OPTIM.MAX_EPOCH"):
        check_warmup(load_cfg(None, words.split()))
    check_warmup(load_cfg(None, ["OPTIM.MAX_EPOCH", "5"]))
    with pytest.raises(ConfigError, match="to reach OPTIM.BASE_LR"):
        train_model(small_cfg("OPTIM.WARMUP_EPOCHS", 5, *words.split()))


def log_of(cfg, name: str = "train.log") -> str:
    return (Path(cfg.OUT_DIR) / name).read_text()


def test_the_start_logs_what_reaches_the_model(small_cfg):
    options = ("DATA.CROP", "pad", "DATA.FLIP", 0, "DATA.MEAN", "[0.5,0.5,0.5]", "DATA.SAMPLING", "sqrt",
               "TEST.INTERPOLATION", "bicubic", "AUG.ERASING", 0.1, "TRAIN.IM_SIZE_START", 8,
               "TRAIN.IM_SIZE_EPOCHS", "[0,1]", "TRAIN.IM_SIZE_MULTIPLE", 8)  # fmt: skip
    lines = ["training: shorter side 16 px, padding 4 px, random crop 16 px, flip 0; from 8 px on",
             "validation: shorter side 18 px, center crop 16 px, bicubic",
             "mean 0.5 0.5 0.5, std 0.229 0.224 0.225; sampling: sqrt"]  # fmt: skip
    cfg = small_cfg("OPTIM.MAX_EPOCH", 1, "OPTIM.WARMUP_EPOCHS", 0, *options)
    train_model(cfg)
    for line in lines:
        assert f" {line}\n" in log_of(cfg)
    evaluate_weights(cfg)
    assert f" {lines[1]}\n" in log_of(cfg, "test.log")
    assert f" {lines[2].partition(';')[0]}\n" in log_of(cfg, "test.log") and "training:" not in log_of(cfg, "test.log")


# What an evaluation needs beside data: weights.
EVALUATED = ("MODEL.PRETRAINED", "True")


def run_problems(*args, **options) -> list[str]:
    return [str(problem) for problem in find_run_problems(*args, **options)]


def ask_the_data(*words, train=True):
    words = (*words, *(() if train else EVALUATED))
    cfg = load_cfg(None, ["MODEL.NUM_CLASSES", "0", *(str(word) for word in words)])
    assert run_problems(cfg, train) == []
    resolved = resolve_num_classes(cfg)
    assert resolved.is_frozen() and resolved.origins["MODEL.NUM_CLASSES"] == "the data"
    assert cfg.MODEL.NUM_CLASSES == 0 and cfg.origins["MODEL.NUM_CLASSES"] == "command line"
    return resolved


def test_folders_are_counted_and_a_number_that_is_set_is_left_alone(image_folder):
    resolved = ask_the_data("TRAIN.DATASET", image_folder, "OPTIM.STEPS", "[1, 2]", "MODEL.KWARGS.width", "8")
    expected = load_cfg(None, ["MODEL.NUM_CLASSES", "3", "TRAIN.DATASET", str(image_folder), "OPTIM.STEPS", "[1, 2]",
                               "MODEL.KWARGS.width", "8"])  # fmt: skip
    assert resolved == expected and len(build_images(resolved, train=True).classes) == 3
    cfg = load_cfg(None, ["MODEL.NUM_CLASSES", "7"])
    assert resolve_num_classes(cfg) is cfg


def test_an_evaluation_counts_the_training_classes_else_its_own(tmp_path):
    draw_folder(tmp_path, "train", {"a": 1, "b": 1, "c": 1})
    draw_folder(tmp_path, "val", {"a": 1, "b": 1})
    assert ask_the_data("TRAIN.DATASET", tmp_path, train=False).MODEL.NUM_CLASSES == 3
    words = ("TRAIN.DATASET", "/no/such", "TEST.DATASET", tmp_path)
    assert ask_the_data(*words, train=False).MODEL.NUM_CLASSES == 2


def test_a_run_is_trained_and_evaluated_without_a_given_number_of_classes(small_cfg, tmp_path):
    train_model(cfg := small_cfg("MODEL.NUM_CLASSES", 0, "OPTIM.MAX_EPOCH", 1))
    assert load_cfg(str(tmp_path / "out" / "config.yaml")).MODEL.NUM_CLASSES == 3
    assert evaluate_weights(cfg)["count"] == 37


def test_a_conflict_with_the_number_found_is_reported(image_folder):
    words = ["MODEL.NUM_CLASSES", "0", "TRAIN.DATASET", str(image_folder), "LOSS.CLASS_WEIGHTS", "[1, 2]"]
    cfg = load_cfg(None, words)
    (problem,) = run_problems(cfg, train=True)
    assert problem.startswith("LOSS.CLASS_WEIGHTS (command line): got [1, 2]; expected 3 numbers")
    with pytest.raises(ConfigError, match="expected 3 numbers"):
        resolve_num_classes(cfg)
    assert run_problems(load_cfg(None, [*words[:-1], "[1, 2, 3]"]), train=True) == []


REPLAYED = ("TRAIN.BATCH_SIZE", 12, "TRAIN.GLOBAL_BATCH_SIZE", 24, "MODEL.COMPILE")
MIXED = ("AUG.MIXUP", 0.2, "TRAIN.BATCH_SIZE", 6, "TRAIN.GLOBAL_BATCH_SIZE", 18)
TAUGHT = ("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", "/no/such")
SEVERAL_STARTS = ("FINETUNE.WEIGHTS", "pretrained", "MODEL.PRETRAINED", True)


@pytest.fixture
def problems(image_folder, tmp_path):
    """Return a function from overrides to the problems of a run; FILE, FOLDER and RUN in them are such paths."""
    own = ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3, "OUT_DIR", tmp_path / "run")
    (tmp_path / "weights.pth").write_bytes(b"any")
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "best.pth.tar").write_bytes(b"any")
    paths = {"FILE": tmp_path / "weights.pth", "FOLDER": image_folder, "RUN": tmp_path / "teacher"}

    def find(*words, train=True, nproc=None) -> list[str]:
        return run_problems(load_cfg(None, [str(paths.get(word, word)) for word in (*own, *words)]), train, nproc)

    return find


def test_problems_of_a_training_are_reported_before_it_starts(problems):
    for words, nproc, parts in [
        (("FINETUNE.WEIGHTS", "/no/such"), 1, ["FINETUNE.WEIGHTS (command line): no such file or folder: /no/such"]),
        (SEVERAL_STARTS, 1, ["set MODEL.PRETRAINED False, or leave this option empty"]),
        (("MODEL.WEIGHTS", "FILE", *SEVERAL_STARTS[:2]), 1, ["set MODEL.WEIGHTS null, or leave this option empty"]),
        (("MODEL.WEIGHTS", "FOLDER"), 1, ["MODEL.WEIGHTS (command line): ", "is a folder without best.pth"]),
        (TAUGHT, 1, ["/no/such; fix: restore it, as every training"]),
        ((*TAUGHT[:3], "RUN"), 1, []),
        # Gradients do not accumulate over replays of a graph.
        ((*REPLAYED, "reduce-overhead"), 2, []),
        ((*REPLAYED, "default"), 1, []),
        ((*REPLAYED, "reduce-overhead"), 1,
         ["MODEL.COMPILE (command line): got reduce-overhead, which replays", "default, or TRAIN.BATCH_SIZE to 24"]),
        (("MODEL.COMPILE", "step"), 2, ["MODEL.COMPILE (command line): got step with 2 processes; expected one"]),
        # Images are mixed in pairs.
        (MIXED, 3, []),
        (MIXED, 2, ["AUG.MIXUP (command line): got micro-batches of 3 images"]),
        # Steps of more images than there are.
        (("TRAIN.BATCH_SIZE", 24), 2, []),
        (("TRAIN.BATCH_SIZE", 25), 2, ["TRAIN.BATCH_SIZE (command line): got 50 images per step (global batch 50 = ",
                                       "expected at most 48, the size of the training set; fix: lower it"]),
        # Also root may not write to a file system that is read-only.
        (("OUT_DIR", "/proc/out"), 1, ["OUT_DIR (command line): /proc cannot be written to: "]),
    ]:  # fmt: skip
        found = problems(*words, nproc=nproc)
        assert len(found) == bool(parts) and all(part in found[0] for part in parts), found


def test_a_resumed_run_needs_its_teacher_but_no_initial_weights(problems, tmp_path):
    name, run = "local-dir:/no/such", tmp_path / "run"
    gone = ("FINETUNE.WEIGHTS", "/no/such"), ("MODEL.WEIGHTS", "/no/such"), ("MODEL.ARCH", name)
    assert all("/no/such" in str(problems(*words)) for words in gone)
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "ckpt_ep_001.pth.tar").touch()
    assert [problems(*words) for words in gone] == [[], [], []]
    for words in (*(("TRAIN.AUTO_RESUME", "False", *each) for each in gone), TAUGHT):
        assert "/no/such" in str(problems(*words))
    trained = ("MODEL.ARCH", "resnet8", "MODEL.KWARGS.width", "8", "MODEL.NUM_CLASSES", "3", "FINETUNE.WEIGHTS", name)
    (run / "config.yaml").write_text(load_cfg(None, trained).dump())
    kept = resolve_cfg(load_cfg(None, ["OUT_DIR", str(run), "MODEL.ARCH", name, "MODEL.NUM_CLASSES", "3"]))
    assert (kept.MODEL.ARCH, kept.MODEL.KWARGS, kept.FINETUNE.WEIGHTS) == ("resnet8", {"width": 8}, name)


def test_a_run_that_goes_on_with_its_own_preprocessing_does_not_search_for_it(copied_run, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(preprocessing, "resolve_preprocessing", lambda cfg, weights, *_: asked.append(weights) or cfg)
    cfg, own = load_cfg(str(copied_run / "config.yaml"), ["OUT_DIR", str(copied_run)]), str(copied_run / "best.pth.tar")
    for weights in ("", own):
        resolve_cfg(cfg, weights)
    assert not asked
    for options in ({"DATA.MEAN": (0.1, 0.1, 0.1)}, {"TEST.CROP": "squash"}, {"MODEL.LICENSE": "mit"}):
        resolve_cfg(changed(cfg, options), own)
    resolve_cfg(changed(cfg, {"MODEL.WEIGHTS": own}))
    assert asked == [own, own, own, ""]


def test_problems_of_a_training_do_not_concern_an_evaluation(problems, tmp_path):
    for words in (("FINETUNE.WEIGHTS", "/no/such"), SEVERAL_STARTS, MIXED, TAUGHT):
        assert problems(*words, *EVALUATED, train=False) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    (problem,) = problems()
    assert problem.endswith(f"{tmp_path}/run/checkpoints is a file, not a folder")


def test_a_folder_of_the_trained_classes_is_a_test_set(problems, image_folder, tmp_path, monkeypatch):
    words = ("TEST.DATASET", shutil.copytree(image_folder / "val", tmp_path / "photos"), *EVALUATED)
    cfg = load_cfg(None, list(map(str, ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3, *words))))
    images, expected = (dataset_class(cfg).from_cfg(each, False) for each in (cfg, load_cfg(None, [
        "TRAIN.DATASET", str(image_folder), "MODEL.NUM_CLASSES", "3"])))  # fmt: skip
    assert images.labels.tolist() == expected.labels.tolist() and images.classes == expected.classes
    assert images.describe(0).startswith(f"{tmp_path}/photos/ant/")
    of_a_split = dataset_class(cfg).from_cfg(changed(cfg, {"TEST.DATASET": str(image_folder / "val")}), False)
    assert of_a_split.labels.tolist() == expected.labels.tolist(), "the folder has the name of TEST.SPLIT"
    assert problems(*words, train=False) == []
    monkeypatch.chdir(tmp_path / "photos")
    here = dataset_class(cfg).from_cfg(changed(cfg, {"TEST.DATASET": "."}), False)
    assert here.describe(0) == images.describe(0) and problems("TEST.DATASET", ".", *EVALUATED, train=False) == []
    assert "no folder 'val'" in str(problems(*words, "TEST.SPLIT", "val", train=False))
    (tmp_path / "photos" / "wasp").mkdir()
    assert "no folder 'val'" in str(problems(*words, train=False))


def test_an_evaluation_without_weights_is_reported(problems, tmp_path):
    (problem,) = problems(train=False)
    assert problem.startswith(f"MODEL.WEIGHTS: is not set, and {tmp_path}/run/best.pth.tar does not exist; fix: ")
    assert problems() == problems(*EVALUATED, train=False) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best_ema.pth.tar").touch()
    assert problems(train=False) != [] == problems("EMA.HALF_LIFE", 9, train=False)
    (tmp_path / "run" / "best.pth.tar").touch()
    assert problems(train=False) == []


def test_without_a_compiler_a_compiled_model_is_refused_before_the_start(image_folder, tmp_path, monkeypatch):
    compiled = load_cfg(None, small_options(image_folder, tmp_path / "out", "MODEL.COMPILE", "default"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    (problem,) = run_problems(compiled, train=True)
    assert "MODEL.COMPILE (command line): got default, but there is no C++ compiler" in problem
    assert run_problems(load_cfg(None, small_options(image_folder, tmp_path / "out")), train=True) == []


class Skipping(Idle):
    num_passes = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        if self.training and self.num_passes % 2 == 0:
            return self.used(images)
        return self.used(images) + self.idle(torch.ones(1, 5)).mean()


class TwoHeads(Idle):
    def forward(self, images: torch.Tensor):
        return (self.used(images), 0) if self.training else self.used(images)


@pytest.fixture(autouse=True)
def registered_models(monkeypatch):
    assert "resnet8" in MODELS  # so that the table is filled
    for name, model in (("idle", Idle), ("skipping", Skipping), ("two_heads", TwoHeads)):
        monkeypatch.setitem(MODELS._table, name, lambda num_classes, model=model: model(num_classes))


def test_a_dry_run_restores_the_model(small_cfg):
    model = build_model(small_cfg())
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert dry_run_training(small_cfg(), model, torch.randn(12, 3, 16, 16), 3) == ([], False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("words, num, px, said", [
    (("MODEL.ARCH", "resnet18"), 1, 32,
     r"MODEL.ARCH \(command line\).*: resnet18 fails on an input of shape \(1, 3, 32, 32\)"),
    (("MODEL.ARCH", "torchvision/inception_v3"), 2, 40,
     r"torchvision/inception_v3 fails .* shape \(2, 3, 40, 40\).*\(torchvision/models/inception.py:\d+\)$"),
    (("MODEL.ARCH", "two_heads"), 2, 16, r"two_heads: model output is a tuple; expected logits \(2, 3\); fix: turn"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_errors_of_a_step_are_reported(small_cfg, words, num, px, said):
    cfg = small_cfg(*words)
    with pytest.raises(ConfigError, match=said):
        dry_run_training(cfg, build_model(cfg), torch.zeros(num, 3, px, px), 3)


@pytest.mark.parametrize("words, said", [
    (("MODEL.ARCH", "timm/vit_tiny_patch16_224", "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 64, "TEST.CROP_SIZE", 48),
     r"TEST.CROP_SIZE \(command line\), .* timm/vit_tiny.*fails .*\(1, 3, 48, 48\)"),
    (("MODEL.ARCH", "torchvision/alexnet", "TRAIN.IM_SIZE", 64, "TEST.IM_SIZE", 64, "TRAIN.IM_SIZE_MULTIPLE", 1,
      "TRAIN.IM_SIZE_START", 4, "TRAIN.IM_SIZE_EPOCHS", "[0, 5]"),
     r"TRAIN.IM_SIZE_START \(command line\), TRAIN.BATCH_SIZE .* torchvision/alexnet fails on .*\(2, 3, 4, 4\)"),
])  # fmt: skip
def test_errors_of_an_evaluation_and_of_the_first_image_size_are_reported_early(small_cfg, words, said):
    with pytest.raises(ConfigError, match=said):
        train_model(small_cfg(*words))


def test_unused_parameters_are_logged_and_do_not_change_a_run(small_cfg, tmp_path):
    words = ("MODEL.ARCH", "idle", "TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.BATCH_SIZE", 3, "OPTIM.MAX_EPOCH", 1)
    for num in (1, 2):
        cfg = small_cfg(*words, "OUT_DIR", tmp_path / f"{num}")
        on_processes(num, train_model, cfg) if num > 1 else train_model(cfg)
        log = (tmp_path / f"{num}" / "train.log").read_text()
        assert "2 parameters without a gradient, not trained: idle.weight, idle.bias" in log
    one, two = newest(tmp_path / "1"), newest(tmp_path / "2")
    assert_close(one, two, 1e-5)
    assert len(two["optimizer"]["state"]) == len(one["optimizer"]["state"]) == 4


@pytest.mark.slow
def test_layers_that_some_steps_skip_are_trained(small_cfg, tmp_path):
    """DDP waits for all gradients in each step unless it looks for unused parameters."""
    words = ("MODEL.ARCH", "skipping", "LOSS.LABEL_SMOOTHING", 0.1, "OPTIM.MAX_EPOCH", 1, "TRAIN.BATCH_SIZE", 6)
    cfg = small_cfg(*words)
    assert dry_run_training(cfg, Skipping(3), torch.zeros(2, 3, 16, 16), 3) == ([], False)
    skipping = Skipping(3)
    skipping.num_passes = 1
    assert dry_run_training(cfg, skipping, torch.zeros(2, 3, 16, 16), 3) == ([], True)
    on_processes(2, train_model, cfg)
    assert len(newest(tmp_path / "out")["optimizer"]["state"]) == 6


def test_a_trial_prepares_the_task_and_starts_no_tracker(small_cfg, tmp_path, monkeypatch):
    begun: list[int] = []
    (tmp_path / "trial").mkdir()
    monkeypatch.setattr(Classification, "begin_epoch", lambda self, epoch: begun.append(epoch))
    plan = plan_batches(4, 4, 1)
    cfg = small_cfg("LOG.TRACKERS", "[wandb]")
    with trial_run(cfg, detect_launch(), plan, str(tmp_path / "trial")) as run:
        assert run.cfg.LOG.TRACKERS == ()
        begin_epoch(run)
    assert begun == [0]
