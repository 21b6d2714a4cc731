"""Checks before torch is imported: the number of classes, initial weights, batch sizes, OUT_DIR."""

from pathlib import Path

import pytest
from support.images import draw_folder
from support.runs import run_tool, small_options

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets import imagefolder
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes

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


def test_a_number_that_is_set_is_left_alone():
    cfg = load_cfg(None, ["MODEL.NUM_CLASSES", "7"])
    assert resolve_num_classes(cfg) is cfg


def test_folders_are_counted_and_the_rest_of_the_config_stays(image_folder):
    resolved = ask_the_data("TRAIN.DATASET", image_folder, "OPTIM.STEPS", "[1, 2]", "MODEL.KWARGS.width", "8")
    expected = load_cfg(None, ["MODEL.NUM_CLASSES", "3", "TRAIN.DATASET", str(image_folder), "OPTIM.STEPS", "[1, 2]",
                               "MODEL.KWARGS.width", "8"])  # fmt: skip
    assert resolved == expected and len(build_images(resolved, train=True).classes) == 3


def test_an_evaluation_counts_the_training_classes_else_its_own(tmp_path):
    draw_folder(tmp_path, "train", {"a": 1, "b": 1, "c": 1})
    draw_folder(tmp_path, "val", {"a": 1, "b": 1})
    assert ask_the_data("TRAIN.DATASET", tmp_path, train=False).MODEL.NUM_CLASSES == 3
    words = ("TRAIN.DATASET", "/no/such", "TEST.DATASET", tmp_path)
    assert ask_the_data(*words, train=False).MODEL.NUM_CLASSES == 2


@pytest.mark.slow
def test_packs_are_counted(image_folder, tmp_path):
    done = run_tool("pack_dataset.py", tmp_path / "pack", "TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3)
    assert done.returncode == 0, done.stderr
    assert ask_the_data("DATA.NAME", "packed", "TRAIN.DATASET", tmp_path / "pack").MODEL.NUM_CLASSES == 3


def test_sets_of_a_known_number_are_not_opened(tmp_path):
    words = ("TRAIN.DATASET", tmp_path / "no", "DATA.NAME", "cifar100")
    assert ask_the_data(*words).MODEL.NUM_CLASSES == 100
    assert ask_the_data("DATA.NAME", "shapes", "DATA.CACHE_DIR", tmp_path / "no").MODEL.NUM_CLASSES == 10
    assert not (tmp_path / "no").exists()


def test_where_only_the_images_tell_they_are_read(monkeypatch):
    class Counted(ImageDataset):
        @classmethod
        def from_cfg(cls, cfg, train):
            images = cls()
            images.classes = ("a", "b", "c", "d") if train else ("a",)
            return images

    DATASETS.get("dummy")
    monkeypatch.setitem(DATASETS._table, "counted", Counted)
    assert ask_the_data("DATA.NAME", "counted").MODEL.NUM_CLASSES == 4


@pytest.mark.parametrize("words", [["DATA.NAME", "dummy"], ["MODEL.DUMMY_INPUT", "True"]])
def test_dummy_images_have_no_classes_of_their_own(words):
    with pytest.raises(ConfigError, match=r"MODEL.NUM_CLASSES \(command line\): got 0, .*; dummy images have none"):
        resolve_num_classes(load_cfg(None, ["MODEL.NUM_CLASSES", "0", *words]))


def test_a_conflict_with_the_number_found_is_reported(image_folder):
    words = ["MODEL.NUM_CLASSES", "0", "TRAIN.DATASET", str(image_folder), "LOSS.CLASS_WEIGHTS", "[1, 2]"]
    cfg = load_cfg(None, words)
    (problem,) = run_problems(cfg, train=True)
    assert problem.startswith("LOSS.CLASS_WEIGHTS (command line): has 2 numbers, but MODEL.NUM_CLASSES is 3")
    with pytest.raises(ConfigError, match="MODEL.NUM_CLASSES is 3"):
        resolve_num_classes(cfg)
    assert run_problems(load_cfg(None, [*words[:-1], "[1, 2, 3]"]), train=True) == []


def test_a_missing_folder_is_reported_as_before(tmp_path):
    words = ["MODEL.NUM_CLASSES", "0", "TRAIN.DATASET", str(tmp_path / "no")]
    problems = run_problems(load_cfg(None, words), train=True)
    assert [problem.partition(" ")[0] for problem in problems] == ["TRAIN.DATASET", "TEST.DATASET"]


@pytest.mark.slow
def test_the_tools_train_and_evaluate_without_a_given_number_of_classes(image_folder, tmp_path):
    words = small_options(image_folder, tmp_path / "out", "MODEL.NUM_CLASSES", 0, "OPTIM.MAX_EPOCH", 1)
    done = run_tool("train_net.py", *words)
    assert done.returncode == 0, done.stderr
    assert load_cfg(str(tmp_path / "out" / "config.yaml")).MODEL.NUM_CLASSES == 3
    done = run_tool("test_net.py", *words)
    assert done.returncode == 0 and "of 37 images" in done.stderr, done.stderr


# ------------------------------------------------------------------------------------ fine-tuning


def finetune_problems(image_folder: Path, *words, train=True) -> list[str]:
    words = ["MODEL.NUM_CLASSES", "3", "TRAIN.DATASET", image_folder, *words, *(() if train else EVALUATED)]
    return run_problems(load_cfg(None, [str(word) for word in words]), train)


def test_weights_to_fine_tune_from_must_be_there(image_folder, tmp_path):
    weights = tmp_path / "a.pth"
    (problem,) = finetune_problems(image_folder, "FINETUNE.WEIGHTS", weights)
    assert problem == f"FINETUNE.WEIGHTS (command line): no such file or folder: {weights}"
    assert finetune_problems(image_folder, "FINETUNE.WEIGHTS", weights, train=False) == []
    weights.write_bytes(b"any")
    assert finetune_problems(image_folder, "FINETUNE.WEIGHTS", weights) == []
    assert finetune_problems(image_folder, "FINETUNE.WEIGHTS", "pretrained") == []


def test_two_things_to_start_from_are_one_too_many(image_folder, tmp_path):
    (tmp_path / "b.pth").write_bytes(b"any")
    both = ("FINETUNE.WEIGHTS", "pretrained", "MODEL.PRETRAINED", "True", "MODEL.WEIGHTS", tmp_path / "b.pth")
    first, second = finetune_problems(image_folder, *both)
    assert "set MODEL.WEIGHTS null, or leave this option empty" in first
    assert "set MODEL.PRETRAINED False, or leave this option empty" in second
    assert finetune_problems(image_folder, *both, train=False) == []


def test_gradients_do_not_accumulate_over_replays_of_a_graph(image_folder, tmp_path):
    words = ("TRAIN.GLOBAL_BATCH_SIZE", 24, "MODEL.COMPILE", "reduce-overhead")
    cfg = load_cfg(None, small_options(image_folder, tmp_path / "out", *words))
    assert run_problems(cfg, train=True, nproc=2) == []
    [problem] = run_problems(cfg, train=True, nproc=1)
    assert problem.startswith("MODEL.COMPILE (command line): got reduce-overhead, which replays CUDA graphs")
    assert problem.endswith("set it to default, or TRAIN.BATCH_SIZE to 24")
    cfg = load_cfg(None, small_options(image_folder, tmp_path / "out", *words[:3], "default"))
    assert run_problems(cfg, train=True, nproc=1) == []


def test_auto_does_not_measure_a_model_that_will_be_sharded(image_folder, tmp_path):
    words = ("TRAIN.BATCH_SIZE", "auto", "TRAIN.GLOBAL_BATCH_SIZE", 24, "DIST.SHARD")
    sharded, others = (load_cfg(None, small_options(image_folder, tmp_path / "out", *words, kind))
                       for kind in ("fsdp", "zero1"))  # fmt: skip
    [problem] = run_problems(sharded, train=True, nproc=2)
    assert problem.startswith("TRAIN.BATCH_SIZE (command line): got auto with DIST.SHARD fsdp, whose memory depends")
    assert problem.endswith("fix: set the images per process")
    assert run_problems(sharded, train=True, nproc=1) == run_problems(others, train=True, nproc=2) == []


def test_an_odd_number_to_mix_in_pairs_is_reported_before_the_start(image_folder, tmp_path):
    words = ["TRAIN.DATASET", str(image_folder), "MODEL.NUM_CLASSES", "3", "OUT_DIR", str(tmp_path / "run")]
    cfg = load_cfg(None, [*words, "AUG.MIXUP", "0.2", "TRAIN.BATCH_SIZE", "6", "TRAIN.GLOBAL_BATCH_SIZE", "18"])
    assert run_problems(cfg, train=True, nproc=3) == []
    assert run_problems(load_cfg(None, [*words, *EVALUATED, "AUG.MIXUP", "0.2"]), train=False) == []
    [problem] = run_problems(cfg, train=True, nproc=2)
    assert problem.startswith("AUG.MIXUP (command line): got micro-batches of 3 images")


@pytest.mark.parametrize("key, others", [("MODEL.WEIGHTS", ()), ("DISTILL.WEIGHTS", ("DISTILL.TEACHER", "resnet18"))])
def test_a_folder_is_not_a_file_of_weights(image_folder, tmp_path, key, others):
    words = ["TRAIN.DATASET", str(image_folder), "MODEL.NUM_CLASSES", "3", "OUT_DIR", str(tmp_path / "run")]
    cfg = load_cfg(None, [*words, *others, key, str(image_folder)])
    [problem] = run_problems(cfg, train=True)
    assert problem == f"{key} (command line): not a file: {image_folder}"


def problems_of(*words, train=True, nproc=None) -> list[str]:
    return run_problems(load_cfg(None, [str(word) for word in words]), train, nproc)


def test_a_folder_that_takes_no_file_is_reported_to_any_user(image_folder):
    """Also root, who may write anywhere but into a file system that is read-only."""
    words = ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3)
    (problem,) = problems_of(*words, "OUT_DIR", "/proc/out")
    assert problem.startswith("OUT_DIR (command line): /proc cannot be written to: ")


def test_a_file_in_the_place_of_the_checkpoints_is_reported_before_training(image_folder, tmp_path):
    (tmp_path / "checkpoints").touch()
    words = ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3, "OUT_DIR", tmp_path)
    (problem,) = problems_of(*words)
    assert problem.endswith(f"{tmp_path}/checkpoints is a file, not a folder")


def test_an_evaluation_without_weights_is_reported(image_folder, tmp_path):
    words = ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3, "OUT_DIR", tmp_path)
    (problem,) = problems_of(*words, train=False)
    assert problem.startswith(f"MODEL.WEIGHTS: is not set, and {tmp_path}/best.pth.tar does not exist; fix: ")
    assert problems_of(*words) == problems_of(*words, *EVALUATED, train=False) == []
    (tmp_path / "best_ema.pth.tar").touch()
    assert problems_of(*words, train=False) != [] == problems_of(*words, "EMA.HALF_LIFE", 9, train=False)
    (tmp_path / "best.pth.tar").touch()
    assert problems_of(*words, train=False) == []


def test_a_step_of_more_images_than_there_are_is_reported(image_folder, tmp_path):
    own = ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3, "OUT_DIR", tmp_path)
    (problem,) = problems_of(*own, "TRAIN.BATCH_SIZE", 25, nproc=2)
    assert problem.startswith("TRAIN.BATCH_SIZE (command line): got 50 images per step (global batch 50 = ")
    assert problem.endswith("expected at most 48, the size of the training set; fix: lower it")
    assert problems_of(*own, "TRAIN.BATCH_SIZE", 24, nproc=2) == []
    (problem,) = problems_of("MODEL.DUMMY_INPUT", True, "TRAIN.GLOBAL_BATCH_SIZE", 1024)
    assert problem.startswith("TRAIN.GLOBAL_BATCH_SIZE (command line): got 1024 images per step")
    assert "at most 1000" in problem
    shapes = ("DATA.NAME", "shapes", "MODEL.NUM_CLASSES", 10, "TRAIN.BATCH_SIZE", 1001)
    assert problems_of(*shapes) == [] and "at most 2000, the" in problems_of(*shapes, nproc=2)[0]
    (tmp_path / "train.csv").write_text("image,labels\n1.jpg,a\n2.jpg,b\n")
    for number in (1, 2):
        (tmp_path / f"{number}.jpg").touch()
    several = ("DATA.NAME", "multilabel", "LOSS.NAME", "bce", "MODEL.NUM_CLASSES", 2, "TEST.SPLIT", "train")
    assert "at most 2, the" in problems_of(*several, "TRAIN.DATASET", tmp_path, "TRAIN.BATCH_SIZE", 3)[0]
    done = run_tool("pack_dataset.py", tmp_path / "pack", "TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3)
    assert done.returncode == 0, done.stderr
    packed = ("DATA.NAME", "packed", "TRAIN.DATASET", tmp_path / "pack", "MODEL.NUM_CLASSES", 3)
    assert "at most 48, the" in problems_of(*packed, "TRAIN.BATCH_SIZE", 49)[0]


def test_the_images_of_a_large_folder_are_not_all_counted(image_folder, monkeypatch):
    cfg = load_cfg(None, ["TRAIN.DATASET", str(image_folder)])
    assert [ImageFolder.count_images(cfg, most) for most in (1, 16, 17, 48, 1000)] == [1, 16, 17, 48, 48]
    seen = []
    monkeypatch.setattr(imagefolder, "is_image", lambda name: not seen.append(name))
    assert ImageFolder.count_images(cfg, 20) == len(seen) == 20
