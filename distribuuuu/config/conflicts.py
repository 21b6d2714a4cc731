"""Conflicts between options, and options without effect."""

from collections.abc import Iterator

from distribuuuu.config.config_node import Config, get_value
from distribuuuu.config.declaration import AUTO, Option
from distribuuuu.config.derived import (
    CONDITIONS,
    class_weight_beta,
    eval_crop_size,
    eval_resize,
    height_and_width,
    needs_statistics,
    training_crop,
)
from distribuuuu.config.errors import ConfigError, Problem, counted, did_you_mean
from distribuuuu.config.model_names import find_reading_keywords
from distribuuuu.config.options import IMAGENET_CLASSES, OPTIONS
from distribuuuu.config.registry import OPTIMIZERS, dataset_class
from distribuuuu.config.run_files import find_name_problem, find_path_problem, url_of
from distribuuuu.config.settings import BUILT_IN_TASKS, find_settings_problems

# First words of AUG.POLICY: torchvision's and big_vision's policies by our names, then timm's, which take settings.
_TORCHVISION_POLICIES = ("autoaugment", "randaugment", "trivialaugment")
POLICIES = ("none", *_TORCHVISION_POLICIES, "randaugment_big_vision", "3augment",
            "rand", "augmix", "original", "originalr", "v0", "v0r", "3a")  # fmt: skip

# Operations of this package that need three channels of 8 bits.
_RGB_OPERATIONS = ("grayscale", "pca_noise")

# Arguments of optimizers that are options, the last two for sgd and registered ones only, or that the trainer sets.
OPTIM_ARGUMENTS = {
    "lr": "OPTIM.BASE_LR", "weight_decay": "OPTIM.WEIGHT_DECAY", "momentum": "OPTIM.MOMENTUM", "betas": "OPTIM.BETAS",
    "eps": "OPTIM.EPS", **dict.fromkeys(("params", "fused", "foreach", "capturable", "differentiable"), ""),
    "dampening": "OPTIM.DAMPENING", "nesterov": "OPTIM.NESTEROV",
}  # fmt: skip


def check_cfg(cfg: Config) -> None:
    """Raise ConfigError with every value that is out of range or conflicts with another; touches no file."""
    problems = find_problems(cfg)
    if problems:
        raise ConfigError(problems)


def find_problems(cfg: Config) -> list[Problem]:
    """Return a problem for each value that is out of range or conflicts with another."""
    checks = (_check_values, _check_images, _check_channels, _check_labels, _check_sizes, _check_augmentation,
              _check_targets, _check_schedule, _check_optimizer, _check_loss, _check_finetuning, _check_distillation,
              _check_task, find_settings_problems, _check_keywords, _check_sharding, _check_paths,
              _check_batch)  # fmt: skip
    return [problem.located(cfg.origins) for check in checks for problem in check(cfg)]


def _check_values(cfg: Config) -> Iterator[Problem]:
    for find_wrong in (Option.find_wrong_words, Option.find_wrong_number):
        for key, option in OPTIONS.items():
            yield from (Problem(key, message) for message in find_wrong(option, get_value(cfg, key)))


# ---------------------------------------------------------------------------------------- conflicts


def _check_images(cfg: Config) -> Iterator[Problem]:
    data = cfg.DATA
    crop_size, resize = eval_crop_size(cfg), eval_resize(cfg)
    if any(side > of for side, of in zip(height_and_width(crop_size), height_and_width(resize), strict=True)):
        crop = "TEST.CROP_SIZE" if cfg.TEST.CROP_SIZE else "TRAIN.IM_SIZE, the crop size,"
        got, least = (list(size) if isinstance(size, tuple) else size for size in (resize, crop_size))
        yield Problem("TEST.IM_SIZE", f"got {got}, smaller than {crop} {least}; set it to {least} or more")
    sides = height_and_width(cfg.TRAIN.IM_SIZE)
    side = min(cfg.TRAIN.IM_SIZE_START or max(sides), *sides)
    if data.CROP_PADDING_MODE == "reflect" and training_crop(cfg) in ("pad", None) and data.CROP_PADDING >= side:
        message = f"got {data.CROP_PADDING}; DATA.CROP_PADDING_MODE reflect expects less than the side of the images"
        yield Problem("DATA.CROP_PADDING", f"{message}, {side} px")
    if cfg.TEST.SHIFT >= (side := min(height_and_width(crop_size))):
        message = f"got {cfg.TEST.SHIFT}; expected less than the side of the evaluation images, {side} px"
        yield Problem("TEST.SHIFT", message)
    if len(data.CROP_SCALE) != 2 or not 0 < data.CROP_SCALE[0] <= data.CROP_SCALE[-1] <= 1:
        yield Problem("DATA.CROP_SCALE", f"got {list(data.CROP_SCALE)}; expected two numbers, 0 < min <= max <= 1")
    if len(data.CROP_RATIO) != 2 or not 0 < data.CROP_RATIO[0] <= data.CROP_RATIO[-1]:
        yield Problem("DATA.CROP_RATIO", f"got {list(data.CROP_RATIO)}; expected two numbers, 0 < min <= max")
    if data.INTERPOLATION == "random" and (training_crop(cfg) != "resized" or cfg.AUG.POLICY in _TORCHVISION_POLICIES):
        message = "got random; expected bilinear or bicubic, unless DATA.CROP is resized and AUG.POLICY none or of timm"
        yield Problem("DATA.INTERPOLATION", message)
    if data.SHUFFLE == "blocks" and not (data.NAME.startswith("packed") and data.SAMPLING == "uniform"):
        yield Problem("DATA.SHUFFLE", "got blocks; expected global, or DATA.NAME packed and DATA.SAMPLING uniform")
    for key in ("MEAN", "STD"):
        if len(data[key]) not in (0, data.CHANNELS) and (data.CHANNELS, len(data[key])) != (1, 3):
            expected = f"expected {counted(data.CHANNELS, 'number')}, one per channel, or []"
            yield Problem(f"DATA.{key}", f"got {list(data[key])}; {expected}")
        if data.PIXELS != "float32" and max((0, *data[key])) > 1:
            scaled = [float(f"{value / 255:.4g}") for value in data[key]]
            expected = "expected pixel values 0 to 1"
            yield Problem(f"DATA.{key}", f"got {list(data[key])}; {expected}; fix: set it to {scaled}")
    if any(value <= 0 for value in data.STD):
        yield Problem("DATA.STD", f"got {list(data.STD)}; expected numbers above 0")


def _check_channels(cfg: Config) -> Iterator[Problem]:
    data, aug = cfg.DATA, cfg.AUG
    if (data.CHANNELS, data.PIXELS) == (3, "uint8"):
        return
    reason = f"with DATA.CHANNELS {data.CHANNELS} and DATA.PIXELS {data.PIXELS}"
    rgb = [name for name in aug.OPERATIONS if name in _RGB_OPERATIONS]
    for key, value, off in (("POLICY", aug.POLICY, "none"), ("COLOR_JITTER", list(aug.COLOR_JITTER), []),
                            ("OPERATIONS", rgb, [])):  # fmt: skip
        if value != off:
            yield Problem(f"AUG.{key}", f"got {value} {reason}; it needs 8-bit RGB; fix: set it to {off}")
    missing = [key for key in ("MEAN", "STD") if not data[key]]
    if missing and not cfg.MODEL.DUMMY_INPUT and needs_statistics(cfg):
        message = f"got [] {reason}; expected one number per channel; fix: `distribuuuu doctor --statistics` finds them"
        yield from (Problem(f"DATA.{key}", message) for key in missing)


def _check_labels(cfg: Config) -> Iterator[Problem]:
    labels, test = cfg.TEST.LABELS, f"TEST.LABELS {cfg.TEST.LABELS}"
    if labels and cfg.MODEL.NUM_CLASSES not in (0, IMAGENET_CLASSES):
        message = f"got {cfg.MODEL.NUM_CLASSES}; {test} expects a model of the 1000 ImageNet classes; fix: set 1000"
        yield Problem("MODEL.NUM_CLASSES", message)
    if labels and (cfg.DATA.NAME != "imagefolder" or cfg.MODEL.DUMMY_INPUT):
        message = f"{test} expects images; fix: set DATA.NAME imagefolder MODEL.DUMMY_INPUT False"
        yield Problem(("DATA.NAME", "MODEL.DUMMY_INPUT"), message)
    if labels == "imagenet_real" and (undefined := {*cfg.TEST.METRICS} - {"top1", "topk"}):
        yield Problem("TEST.METRICS", f"got {', '.join(sorted(undefined))}; {test} expects top1 or topk")
    if labels == "imagenet_real" and cfg.TASK.NAME not in ("auto", "classification", "distillation"):
        yield Problem("TASK.NAME", f"got {cfg.TASK.NAME}; {test} expects classification; fix: set TASK.NAME auto")


def _check_sizes(cfg: Config) -> Iterator[Problem]:
    if (off := cfg.AUG.OFF_EPOCHS) and off >= cfg.OPTIM.MAX_EPOCH:
        yield Problem("AUG.OFF_EPOCHS", f"got {off}; expected less than OPTIM.MAX_EPOCH {cfg.OPTIM.MAX_EPOCH}")
    start, final, epochs = cfg.TRAIN.IM_SIZE_START, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE_EPOCHS
    if not start:
        return
    if isinstance(final, tuple):
        message = f"got {start} with TRAIN.IM_SIZE {list(final)}; expected a square TRAIN.IM_SIZE; fix: set it to 0"
        yield Problem("TRAIN.IM_SIZE_START", message)
    elif start > final:
        yield Problem("TRAIN.IM_SIZE_START", f"got {start}; expected at most TRAIN.IM_SIZE {final}, the final size")
    if len(epochs) != 2 or not 0 <= epochs[0] < epochs[-1]:
        expected = "expected the first and the last epoch of the growth, 0 <= first < last, e.g. [0, 80]"
        yield Problem("TRAIN.IM_SIZE_EPOCHS", f"got {list(epochs)}; {expected}")


def _check_augmentation(cfg: Config) -> Iterator[Problem]:
    aug = cfg.AUG
    jitter = aug.COLOR_JITTER
    if len(jitter) not in (0, 1, 3, 4) or any(value < 0 for value in jitter) or max((0, *jitter[3:])) > 0.5:
        expected = "expected 0, 1, 3 or 4 numbers, 0 or more; the fourth, for the hue, at most 0.5"
        yield Problem("AUG.COLOR_JITTER", f"got {list(jitter)}; {expected}")
    name = aug.POLICY.split("-")[0]
    if name not in POLICIES:
        near = did_you_mean(aug.POLICY, POLICIES) or did_you_mean(name, POLICIES)
        message = f"got {aug.POLICY!r}; expected a policy that begins with one of {', '.join(POLICIES)}{near}"
        yield Problem("AUG.POLICY", message)
    if aug.MIX_GROUP % 2:
        message = f"got {aug.MIX_GROUP}; expected an even number, since images are mixed in pairs; fix: add 1"
        yield Problem("AUG.MIX_GROUP", message)


def _check_targets(cfg: Config) -> Iterator[Problem]:
    if (targets := dataset_class(cfg).targets) == "label":
        return
    what = "any number of classes" if targets == "labels" else "a structured target"
    reason = f"DATA.NAME {cfg.DATA.NAME} gives an image {what}"
    if cfg.LOSS.NAME != "bce" and targets == "labels":
        message = f"{cfg.LOSS.NAME} expects one class per image, but {reason}; set LOSS.NAME bce"
        yield Problem("LOSS.NAME", message)
    if cfg.DATA.SAMPLING != "uniform":
        message = f"{cfg.DATA.SAMPLING} samples by the class of an image, but {reason}; set it to uniform"
        yield Problem("DATA.SAMPLING", message)
    if cfg.DISTILL.TEACHER:
        yield Problem("DISTILL.TEACHER", f"distillation expects one class per image, but {reason}; leave it empty")


def _check_schedule(cfg: Config) -> Iterator[Problem]:
    optim = cfg.OPTIM
    if optim.NAME.lower() == "sgd" and optim.NESTEROV and (optim.MOMENTUM == 0 or optim.DAMPENING != 0):
        message = "needs OPTIM.MOMENTUM above 0 and OPTIM.DAMPENING 0; or set OPTIM.NESTEROV False"
        yield Problem("OPTIM.NESTEROV", message)
    if optim.LR_POLICY == "steps" and not optim.STEPS:
        yield Problem("OPTIM.STEPS", "is empty, but OPTIM.LR_POLICY is steps; set the epochs, e.g. [30, 60, 90]")
    if list(optim.STEPS) != sorted(set(optim.STEPS)) or any(step < 0 for step in optim.STEPS):
        yield Problem("OPTIM.STEPS", f"got {list(optim.STEPS)}; expected ascending epochs, 0 or more, each once")
    if optim.LR_POLICY == "exp" and optim.MIN_LR <= 0:
        message = f"got {optim.MIN_LR:g}; OPTIM.LR_POLICY exp expects a factor above 0, e.g. 0.001"
        yield Problem("OPTIM.MIN_LR", message)


def _check_optimizer(cfg: Config) -> Iterator[Problem]:
    optim = cfg.OPTIM
    is_ours = optim.NAME.lower() == "sgd" or optim.NAME in OPTIMIZERS
    for name in optim.KWARGS:
        if name in OPTIM_ARGUMENTS and (is_ours or name not in ("dampening", "nesterov")):
            option = OPTIM_ARGUMENTS[name]
            message = f"is an option; fix: set {option} instead" if option else "is set by the trainer; fix: remove it"
            yield Problem(f"OPTIM.KWARGS.{name}", message)
    if optim.CLIP in ("value", "agc") and not optim.CLIP_LIMIT:
        yield Problem("OPTIM.CLIP_LIMIT", f"got 0; OPTIM.CLIP {optim.CLIP} expects a number above 0, e.g. 0.01")
    if optim.WEIGHT_DECAY_END >= 0 and not optim.WEIGHT_DECAY:
        message = f"got {optim.WEIGHT_DECAY_END:g} with OPTIM.WEIGHT_DECAY 0; expected a start above 0"
        yield Problem("OPTIM.WEIGHT_DECAY_END", f"{message}; fix: set OPTIM.WEIGHT_DECAY, or this option to -1")


def _check_loss(cfg: Config) -> Iterator[Problem]:
    loss, num_classes = cfg.LOSS, cfg.MODEL.NUM_CLASSES
    weights, threshold = loss.CLASS_WEIGHTS, loss.BCE_TARGET_THRESHOLD
    if isinstance(weights, str):
        if class_weight_beta(weights) is None:
            message = f"got {weights!r}; expected auto, auto:BETA with 0 <= BETA < 1, or one number per class"
            yield Problem("LOSS.CLASS_WEIGHTS", message)
    elif num_classes and len(weights) not in (0, num_classes):
        message = f"has {counted(len(weights), 'number')}, but MODEL.NUM_CLASSES is {num_classes}; set one per class"
        yield Problem("LOSS.CLASS_WEIGHTS", message)
    elif weights and (min(weights) < 0 or max(weights) == 0):
        message = f"got a minimum of {min(weights)} and a maximum of {max(weights)}; expected 0 or more, not all 0"
        yield Problem("LOSS.CLASS_WEIGHTS", message)
    # Beyond these two every target would be 0, or every target 1; without smoothing no absent class is above 0.
    lowest = loss.LABEL_SMOOTHING / max(1, num_classes)
    highest = 1 - loss.LABEL_SMOOTHING + lowest
    is_between = threshold is None or lowest < threshold < highest or threshold == lowest == 0
    if num_classes and loss.NAME == "bce" and not is_between:
        message = f"got {threshold:g}; expected null, or between {lowest:g} and {highest:g}, the targets of an image"
        yield Problem("LOSS.BCE_TARGET_THRESHOLD", f"{message} with LOSS.LABEL_SMOOTHING {loss.LABEL_SMOOTHING:g}")


def _check_finetuning(cfg: Config) -> Iterator[Problem]:
    for pattern, factor in cfg.FINETUNE.LR_MULT.items():
        if factor <= 0:
            message = f"got {factor:g}; expected a number above 0; to freeze parameters set FINETUNE.FREEZE"
            yield Problem(f"FINETUNE.LR_MULT.{pattern}", message)


def _check_distillation(cfg: Config) -> Iterator[Problem]:
    distill = cfg.DISTILL
    if distill.TEACHER and not distill.WEIGHTS:
        yield Problem("DISTILL.WEIGHTS", "is not set; set the teacher's file, or pretrained")


def _check_task(cfg: Config) -> Iterator[Problem]:
    name, targets = cfg.TASK.NAME, dataset_class(cfg).targets
    is_own = name not in ("auto", *BUILT_IN_TASKS)
    if targets == "structured" and not is_own:
        message = f"got {name}, but DATA.NAME {cfg.DATA.NAME} has structured targets; fix: set a task of your own"
        yield Problem("TASK.NAME", message)
    elif name in BUILT_IN_TASKS and (targets == "labels") != (name == "multilabel"):
        labels = "several labels" if targets == "labels" else "one label"
        yield Problem("TASK.NAME", f"got {name}, but the data has {labels} per image; fix: set TASK.NAME auto")
    if cfg.DATA.VIEWS > 1 and not is_own:
        message = f"got {cfg.DATA.VIEWS}, but TASK.NAME {name} takes one view of an image; fix: set it to 1"
        yield Problem("DATA.VIEWS", f"{message}, or TASK.NAME to a task of your own")
    if (name == "distillation") > bool(cfg.DISTILL.TEACHER):
        yield Problem("TASK.NAME", "got distillation without a teacher; fix: set DISTILL.TEACHER")


def _check_keywords(cfg: Config) -> Iterator[Problem]:
    for section in ("MODEL.KWARGS", "DISTILL.KWARGS", "OPTIM.KWARGS"):
        for key, message in find_reading_keywords(section, get_value(cfg, section)):
            yield Problem(key, message)


def _check_sharding(cfg: Config) -> Iterator[Problem]:
    shard, mode = cfg.DIST.SHARD, cfg.MODEL.COMPILE
    if shard != "none":
        from distribuuuu.config.sharding_conflicts import find_sharding_problems

        yield from find_sharding_problems(cfg)
    if cfg.DIST.BUCKET_MB < 1 and mode != "none" and shard != "fsdp":  # torch's DDPOptimizer asserts it
        message = f"got {cfg.DIST.BUCKET_MB:g}; with MODEL.COMPILE {mode} expected 1 or more"
        yield Problem("DIST.BUCKET_MB", f"{message}; set it to 1 or more, or MODEL.COMPILE none")
    if cfg.MODEL.ACT_CHECKPOINT and mode != "none":
        message = "does not work with MODEL.COMPILE, which selects what to recompute; set one of them off"
        yield Problem("MODEL.ACT_CHECKPOINT", message)


def _check_paths(cfg: Config) -> Iterator[Problem]:
    if problem := find_path_problem(cfg.OUT_DIR, is_run=True):
        yield Problem("OUT_DIR", problem)
    if cfg.DATA.CACHE_DIR and (problem := find_path_problem(cfg.DATA.CACHE_DIR)):
        yield Problem("DATA.CACHE_DIR", problem)
    if problem := find_name_problem(cfg.CFG_DEST):
        yield Problem("CFG_DEST", problem)


def _check_batch(cfg: Config) -> Iterator[Problem]:
    if cfg.TRAIN.BATCH_SIZE == AUTO and url_of(cfg.OUT_DIR):  # it is resolved before the run is downloaded
        yield Problem("TRAIN.BATCH_SIZE", "got auto with OUT_DIR at a URL; expected a number; fix: set it to one")
    if cfg.TRAIN.BATCH_SIZE == AUTO and not cfg.TRAIN.GLOBAL_BATCH_SIZE:
        fix = "fix: set TRAIN.GLOBAL_BATCH_SIZE, the images per step, e.g. 256; or set a number of images"
        yield Problem("TRAIN.BATCH_SIZE", f"got auto without TRAIN.GLOBAL_BATCH_SIZE; {fix}")


# ----------------------------------------------------------------------------------- unused options


def find_unused_options(cfg: Config) -> list[Problem]:
    """Return a problem for each option that differs from its default but has no effect in this config."""
    found = []
    for key, option in OPTIONS.items():
        value = get_value(cfg, key)
        if option.needs and value != option.default and not CONDITIONS[option.needs](cfg):
            shown = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value
            found.append(Problem(key, f"{shown} has no effect; it needs {option.needs}", cfg.origins))
    return found
