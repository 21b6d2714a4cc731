"""Conflicts between options, and options without effect."""

import reprlib
from collections.abc import Iterator
from typing import Any

from distribuuuu.config import derived
from distribuuuu.config.config_node import Config, get_value
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.derived import eval_crop_size, eval_resize, height_and_width, needs_statistics, show_size
from distribuuuu.config.errors import ConfigError, Problem, counted, did_you_mean
from distribuuuu.config.options import OPTIONS
from distribuuuu.config.registry import BUILT_IN_TASKS, SETTINGS, dataset_class
from distribuuuu.config.run_files import find_name_problem, find_path_problem

# First words of AUG.POLICY: torchvision's policies by our names, then timm's, which take settings.
_TORCHVISION_POLICIES = ("autoaugment", "randaugment", "trivialaugment")
POLICIES = ("none", *_TORCHVISION_POLICIES, "3augment",
            "rand", "augmix", "original", "originalr", "v0", "v0r", "3a")  # fmt: skip

# Options that are off by default, whose conflicts are in a file of their own.
_FEATURES = ("AUG.MIXUP", "AUG.CUTMIX", "TRAIN.IM_SIZE_START", "TEST.LABELS", "LOSS.CLASS_WEIGHTS",
             "LOSS.POSITIVE_WEIGHT", "DISTILL.TEACHER", "DISTILL.WEIGHTS", "FINETUNE.HEAD", "FINETUNE.HEAD_RESET",
             "FINETUNE.LR_MULT", "FINETUNE.LORA", "MODEL.KWARGS", "DISTILL.KWARGS", "OPTIM.KWARGS")  # fmt: skip

# An option, whether its value is in conflict with others, and what is expected.
Conflict = tuple[str, object, str]


def check_cfg(cfg: Config) -> None:
    """Raise ConfigError with every value that is out of range or conflicts with another; touches no file."""
    problems = find_problems(cfg)
    if problems:
        raise ConfigError(problems)


def find_problems(cfg: Config) -> list[Problem]:
    """Return a problem for each value that is out of range or conflicts with another."""
    found = [Problem(key, message) for key, option in OPTIONS.items()
             for message in option.find_wrong(get_value(cfg, key))]  # fmt: skip
    groups = [_images, _augmentation, _optimizer, _task_and_loss]
    pairs = [(cfg.DIST.SHARD, "none"), (cfg.DATA.CHANNELS, 3), (cfg.DATA.PIXELS, "uint8"),
             (cfg.MODEL.COMPILE, "none"), (cfg.LOSS.NAME == "bce", False)]  # fmt: skip
    if any(value != usual for value, usual in pairs) or any(get_value(cfg, key) for key in _FEATURES):
        from distribuuuu.config import feature_conflicts

        groups.append(feature_conflicts.find_conflicts)
        found += [*feature_conflicts.check_arguments(cfg), *feature_conflicts.find_sharding_problems(cfg)]
    for conflicts in groups:
        found += [Problem(key, f"got {_show(cfg, key)}; {expected}")
                  for key, is_wrong, expected in conflicts(cfg) if is_wrong]  # fmt: skip
    if any(get_value(cfg, key) for key in SETTINGS):
        from distribuuuu.config.read_settings import find_settings_problems

        found += find_settings_problems(cfg)
    found += _check_paths(cfg)
    return [problem.located(cfg.origins) for problem in found]


def _show(cfg: Config, key: str) -> Any:
    value = get_value(cfg, key)
    if isinstance(value, tuple):
        return reprlib.repr([*value])
    return dict(value) if isinstance(value, dict) else f"{value:g}" if isinstance(value, float) else value


# ---------------------------------------------------------------------------------------- conflicts


def _images(cfg: Config) -> Iterator[Conflict]:
    data, crop = cfg.DATA, eval_crop_size(cfg)
    is_cut = any(of < side for side, of in zip(height_and_width(crop), height_and_width(eval_resize(cfg)), strict=True))
    expected = f"expected the size of the crop, TEST.CROP_SIZE or TRAIN.IM_SIZE, {show_size(crop)}, or more"
    yield "TEST.IM_SIZE", is_cut, expected
    is_far = 0 < cfg.TEST.SHIFT >= min(height_and_width(crop))
    yield "TEST.SHIFT", is_far, f"expected less than the size of the crop, {show_size(crop)}"
    for key, most, words in (("CROP_SCALE", 1, " <= 1"), ("CROP_RATIO", float("inf"), "")):
        is_range = len(data[key]) == 2 and 0 < data[key][0] <= data[key][1] <= most
        yield f"DATA.{key}", not is_range, f"expected two numbers, 0 < min <= max{words}"
    is_random = derived.training_crop(cfg) == "resized" and cfg.AUG.POLICY not in _TORCHVISION_POLICIES
    expected = "expected bilinear or bicubic, unless DATA.CROP is resized and AUG.POLICY none or of timm"
    yield "DATA.INTERPOLATION", data.INTERPOLATION == "random" and not is_random, expected
    lacks = (data.CHANNELS, data.PIXELS) != (3, "uint8") and not cfg.MODEL.DUMMY_INPUT and needs_statistics(cfg)
    for key in ("MEAN", "STD"):
        value, num = data[key], len(data[key])
        expected = "expected one number per channel; fix: `distribuuuu doctor --statistics` finds them"
        yield f"DATA.{key}", lacks and not value, expected
        is_other = num not in (0, data.CHANNELS) and (data.CHANNELS, num) != (1, 3)
        yield f"DATA.{key}", is_other, f"expected {counted(data.CHANNELS, 'number')}, one per channel, or []"
        fix = f"fix: set it to {[float(f'{each / 255:.4g}') for each in value]}"
        is_scaled = data.PIXELS != "float32" and max((0, *value)) > 1
        yield f"DATA.{key}", is_scaled, f"expected pixel values 0 to 1; {fix}"
    yield "DATA.STD", any(value <= 0 for value in data.STD), "expected numbers above 0"


def _augmentation(cfg: Config) -> Iterator[Conflict]:
    aug, last = cfg.AUG, cfg.OPTIM.MAX_EPOCH
    jitter = aug.COLOR_JITTER
    is_jitter = len(jitter) in (0, 1, 3, 4) and min((0, *jitter)) == 0 and max((0, *jitter[3:])) <= 0.5
    expected = "expected 0, 1, 3 or 4 numbers, 0 or more; the fourth, for the hue, at most 0.5"
    yield "AUG.COLOR_JITTER", not is_jitter, expected
    name = aug.POLICY.split("-")[0]
    near = did_you_mean(aug.POLICY, POLICIES) or did_you_mean(name, POLICIES)
    expected = f"expected a policy that begins with one of {', '.join(POLICIES)}{near}"
    yield "AUG.POLICY", name not in POLICIES, expected
    yield "AUG.MIX_GROUP", aug.MIX_GROUP % 2, "expected an even number, since images are mixed in pairs; fix: add 1"
    yield "AUG.OFF_EPOCHS", 0 < aug.OFF_EPOCHS >= last, f"expected less than OPTIM.MAX_EPOCH {last}"


def _optimizer(cfg: Config) -> Iterator[Conflict]:
    optim, steps, name = cfg.OPTIM, cfg.OPTIM.STEPS, cfg.OPTIM.NAME.lower()
    cannot = name == "sgd" and optim.NESTEROV and (optim.MOMENTUM == 0 or optim.DAMPENING != 0)
    yield "OPTIM.NESTEROV", cannot, "it needs OPTIM.MOMENTUM above 0 and OPTIM.DAMPENING 0"
    is_empty = optim.LR_POLICY == "steps" and not steps
    yield "OPTIM.STEPS", is_empty, "OPTIM.LR_POLICY steps expects the epochs, e.g. [30, 60, 90]"
    is_ascending = [*steps] == sorted({*steps}) and min((0, *steps)) == 0
    yield "OPTIM.STEPS", not is_ascending, "expected ascending epochs, 0 or more, each once"


def _task_and_loss(cfg: Config) -> Iterator[Conflict]:
    loss, name, targets = cfg.LOSS, cfg.TASK.NAME, dataset_class(cfg).targets
    if targets != "label":
        what = "any number of classes" if targets == "labels" else "a structured target"
        reason = f"since DATA.NAME {cfg.DATA.NAME} gives an image {what}"
        yield "LOSS.NAME", loss.NAME != "bce" and targets == "labels", f"expected bce, {reason}"
        yield "DATA.SAMPLING", cfg.DATA.SAMPLING != "uniform", f"expected uniform, {reason}"
        yield "DISTILL.TEACHER", cfg.DISTILL.TEACHER, f"expected none, {reason}"
    is_own = name not in (AUTO, *BUILT_IN_TASKS)
    is_other = name in BUILT_IN_TASKS and (targets == "labels") != (name == "multilabel")
    labels = {"labels": "several labels per image", "label": "one label per image"}.get(targets, "structured targets")
    fix = f"fix: set {'a task of your own' if targets == 'structured' else 'TASK.NAME auto'}"
    yield "TASK.NAME", (targets == "structured" and not is_own) or is_other, f"the data has {labels}; {fix}"
    expected = f"TASK.NAME {name} takes one view of an image; fix: set it to 1, or TASK.NAME to a task of your own"
    yield "DATA.VIEWS", cfg.DATA.VIEWS > 1 and not is_own, expected
    has_none = name == "distillation" and not cfg.DISTILL.TEACHER
    yield "TASK.NAME", has_none, "there is no teacher; fix: set DISTILL.TEACHER"


def _check_paths(cfg: Config) -> Iterator[Problem]:
    if problem := find_path_problem(cfg.OUT_DIR, is_run=True):
        yield Problem("OUT_DIR", problem)
    if cfg.DATA.CACHE_DIR and (problem := find_path_problem(cfg.DATA.CACHE_DIR)):
        yield Problem("DATA.CACHE_DIR", problem)
    if problem := find_name_problem(cfg.CFG_DEST):
        yield Problem("CFG_DEST", problem)


# ----------------------------------------------------------------------------------- unused options


def find_unused_options(cfg: Config) -> list[Problem]:
    """Return a problem for each option that is not the default and has no effect, e.g. an epoch after the last one."""
    found = []
    for key, option in OPTIONS.items():
        if (value := get_value(cfg, key)) == option.default:
            continue
        last = max(value if isinstance(value, tuple) else (value,)) if option.is_epoch else -1
        if option.needs and not derived.CONDITIONS[option.needs](cfg):
            found.append(Problem(key, f"{_show(cfg, key)} has no effect; it needs {option.needs}", cfg.origins))
        elif 0 < cfg.OPTIM.MAX_EPOCH <= last:
            message = f"epoch {last} is not reached; it needs OPTIM.MAX_EPOCH above {last}"
            found.append(Problem(key, message, cfg.origins))
    return found
