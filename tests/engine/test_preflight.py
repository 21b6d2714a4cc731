"""Checks before torch is imported: the number of classes, initial weights, batch sizes, OUT_DIR."""

import pytest
from support.images import draw_folder
from support.runs import small_options

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.trainer import evaluate_weights, train_model

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
SHARDED = ("TRAIN.BATCH_SIZE", "auto", "TRAIN.GLOBAL_BATCH_SIZE", 24, "DIST.SHARD")
MIXED = ("AUG.MIXUP", 0.2, "TRAIN.BATCH_SIZE", 6, "TRAIN.GLOBAL_BATCH_SIZE", 18)
SEVERAL_STARTS = ("FINETUNE.WEIGHTS", "pretrained", "MODEL.PRETRAINED", True)


@pytest.fixture
def problems(image_folder, tmp_path):
    """Return a function from overrides to the problems of a run; FILE in them is a file, and FOLDER a folder."""
    own = ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3, "OUT_DIR", tmp_path / "run")
    (tmp_path / "weights.pth").write_bytes(b"any")
    paths = {"FILE": tmp_path / "weights.pth", "FOLDER": image_folder}

    def find(*words, train=True, nproc=None) -> list[str]:
        return run_problems(load_cfg(None, [str(paths.get(word, word)) for word in (*own, *words)]), train, nproc)

    return find


def test_problems_of_a_training_are_reported_before_it_starts(problems):
    for words, nproc, parts in [
        (("FINETUNE.WEIGHTS", "/no/such"), 1, ["FINETUNE.WEIGHTS (command line): no such file or folder: /no/such"]),
        (SEVERAL_STARTS, 1, ["set MODEL.PRETRAINED False, or leave this option empty"]),
        (("MODEL.WEIGHTS", "FILE", *SEVERAL_STARTS[:2]), 1, ["set MODEL.WEIGHTS null, or leave this option empty"]),
        (("MODEL.WEIGHTS", "FOLDER"), 1, ["MODEL.WEIGHTS (command line): not a file: "]),
        # Gradients do not accumulate over replays of a graph.
        ((*REPLAYED, "reduce-overhead"), 2, []),
        ((*REPLAYED, "default"), 1, []),
        ((*REPLAYED, "reduce-overhead"), 1,
         ["MODEL.COMPILE (command line): got reduce-overhead, which replays CUDA graphs",
          "set it to default, or TRAIN.BATCH_SIZE to 24"]),
        # The memory of a model that is sharded depends on the number of processes.
        ((*SHARDED, "zero1"), 2, []),
        ((*SHARDED, "fsdp"), 1, []),
        ((*SHARDED, "fsdp"), 2, ["TRAIN.BATCH_SIZE (command line): got auto with DIST.SHARD fsdp, whose memory depends",
                                 "fix: set the images per process"]),
        # Images are mixed in pairs.
        (MIXED, 3, []),
        (MIXED, 2, ["AUG.MIXUP (command line): got micro-batches of 3 images"]),
        # Steps of more images than there are.
        (("TRAIN.BATCH_SIZE", 24), 2, []),
        (("TRAIN.BATCH_SIZE", 25), 2, ["TRAIN.BATCH_SIZE (command line): got 50 images per step (global batch 50 = ",
                                       "expected at most 48, the size of the training set; fix: lower it"]),
        (("DATA.NAME", "shapes", "MODEL.NUM_CLASSES", 10, "TRAIN.BATCH_SIZE", 1001), 2, ["at most 2000, the"]),
        # Also root may not write to a file system that is read-only.
        (("OUT_DIR", "/proc/out"), 1, ["OUT_DIR (command line): /proc cannot be written to: "]),
    ]:  # fmt: skip
        found = problems(*words, nproc=nproc)
        assert len(found) == bool(parts) and all(part in found[0] for part in parts), found


def test_problems_of_a_training_do_not_concern_an_evaluation(problems, tmp_path):
    for words in (("FINETUNE.WEIGHTS", "/no/such"), SEVERAL_STARTS, MIXED):
        assert problems(*words, *EVALUATED, train=False) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    (problem,) = problems()
    assert problem.endswith(f"{tmp_path}/run/checkpoints is a file, not a folder")


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
