"""Rules of a config: allowed values, conflicts between options, and options without effect."""

import os
from collections.abc import Callable, Iterator

from distribuuuu.config.config_node import Config, get_cfg, get_value
from distribuuuu.config.errors import ConfigError, Problem, counted, did_you_mean
from distribuuuu.config.model_names import find_reading_keywords
from distribuuuu.config.registry import AUGMENTATIONS, DATASETS, LOSSES, METRICS, SCHEDULES, TASKS, dataset_class
from distribuuuu.config.run_files import find_name_problem, find_path_problem

# Options that may be null, and their type otherwise.
NULLABLE = {"MODEL.WEIGHTS": str, "LOSS.BCE_TARGET_THRESHOLD": float, "RNG_SEED": int}
# TRAIN.BATCH_SIZE may be this word instead of a number.
AUTO = "auto"
# The values of MODEL.COMPILE that replay CUDA graphs.
GRAPH_MODES = ("reduce-overhead", "max-autotune")
# Free-form sections: the model constructor, or the model's parameters, decide on their keys; all LR_MULT are numbers.
NUMBER_SECTIONS = ("FINETUNE.LR_MULT",)
OPEN_SECTIONS = ("MODEL.KWARGS", "DISTILL.KWARGS", "TASK.KWARGS", *NUMBER_SECTIONS)
# Options that are lists of strings; all other lists are lists of numbers.
TEXT_LISTS = ("AUG.OPERATIONS", "FINETUNE.FREEZE", "OPTIM.NO_WEIGHT_DECAY", "TRAIN.METRICS", "TEST.METRICS")

# The decoders of optional packages, and the module that each one needs.
OPTIONAL_DECODERS = {"simplejpeg": "simplejpeg", "nvimgcodec": "nvidia.nvimgcodec"}
INTERPOLATIONS = ("bilinear", "bicubic", "opencv_linear", "opencv_area")
CHOICES = {
    "AUG.ERASING_MODE": ("const", "pixel"),
    "AUG.MIX_BY": ("pair", "step"),
    "DATA.CROP": ("auto", "resized", "pad"),
    "DATA.DECODER": ("auto", "torchvision", "pil", *OPTIONAL_DECODERS),
    "DATA.INTERPOLATION": (*INTERPOLATIONS, "random"),
    "DATA.LOADER": ("host", "device"),
    "DATA.ON_BAD_IMAGE": ("raise", "skip"),
    "DATA.SAMPLING": ("uniform", "balanced", "sqrt"),
    "DATA.SHUFFLE": ("global", "blocks"),
    "DATA.WORKER_KIND": ("process", "thread"),
    "DISTILL.KIND": ("soft", "hard"),
    "EMA.BUFFERS": ("average", "copy"),
    "MODEL.INIT": ("own", "fan_out", "fan_out_own_norms"),
    "MODEL.COMPILE": ("none", "default", *GRAPH_MODES),
    "TRAIN.AMP": ("none", "bf16", "fp16"),
    "TRAIN.MATMUL_PRECISION": ("highest", "high", "medium"),
    "DIST.BACKEND": ("auto", "nccl", "gloo"),
    "DIST.COMPRESS": ("none", "bf16", "fp16"),
    "DIST.SHARD": ("none", "zero1", "fsdp"),
    "LOSS.BCE_REDUCTION": ("mean", "sum"),
    "TEST.INTERPOLATION": INTERPOLATIONS,
    "TEST.LABELS": ("", "imagenet_a", "imagenet_r", "imagenet_v2", "imagenet_sketch", "imagenet_real"),
    "OPTIM.LR_SCALE": ("none", "linear", "sqrt"),
    "OPTIM.LR_UPDATE": ("epoch", "step"),
    "TRAIN.ON_NAN": ("stop", "rollback"),
}

# Options whose values are names in a registry, or lists of such names.
REGISTERED = {"DATA.NAME": DATASETS, "OPTIM.LR_POLICY": SCHEDULES, "LOSS.NAME": LOSSES, "AUG.OPERATIONS": AUGMENTATIONS,
              "TRAIN.METRICS": METRICS, "TEST.METRICS": METRICS}  # fmt: skip

# Minimum and maximum; None: no maximum.
RANGES = {
    "AUG.ERASING": (0, 1),
    "AUG.MIXUP": (0, None),
    "AUG.CUTMIX": (0, None),
    "AUG.MIX_GROUP": (0, None),
    "AUG.MIX_PROB": (0, 1),
    "AUG.CUTMIX_SHARE": (0, 1),
    "MODEL.NUM_CLASSES": (0, None),
    "MODEL.PRECISE_BN": (0, None),
    "DISTILL.ALPHA": (0, 1),
    "DISTILL.TEMPERATURE": (0.001, None),
    "EMA.HALF_LIFE": (0, None),
    "EMA.RAMP_UP": (0, 1),
    "EMA.EVERY_STEPS": (1, None),
    "EMA.START_EPOCH": (0, None),
    "TRAIN.BATCH_SIZE": (1, None),
    "TRAIN.GLOBAL_BATCH_SIZE": (0, None),
    # torch's antialiased resize to a single pixel fails at random.
    "TRAIN.IM_SIZE": (2, None),
    "TRAIN.IM_SIZE_START": (0, None),
    "TRAIN.IM_SIZE_MULTIPLE": (1, None),
    "TRAIN.WORKERS": (-1, None),
    "TRAIN.PRINT_FREQ": (1, None),
    "TRAIN.EVAL_PERIOD": (1, None),
    "TRAIN.TOPK": (1, None),
    "TEST.BATCH_SIZE": (1, None),
    "TEST.IM_SIZE": (2, None),
    "TEST.CROP_SIZE": (0, None),
    "TEST.PRINT_FREQ": (1, None),
    "DATA.CACHE_GB": (0.1, None),
    "DATA.CROP_PADDING": (0, None),
    "DATA.FLIP": (0, 1),
    "DATA.MAX_PIXELS": (1, None),
    "DATA.REPEATS": (1, None),
    "DATA.TIMEOUT_S": (1, None),
    "LOSS.LABEL_SMOOTHING": (0, 1),
    "LOSS.BCE_TARGET_THRESHOLD": (0, 1),
    "LOSS.FOCAL_GAMMA": (0, None),
    "OPTIM.MAX_EPOCH": (0, None),
    "OPTIM.BASE_LR": (0, None),
    "OPTIM.LR_LAG": (0, None),
    "OPTIM.LR_SCALE_BATCH": (1, None),
    "OPTIM.EPS": (0, None),
    "OPTIM.MIN_LR": (0, 1),
    "OPTIM.LR_MULT": (0, None),
    "OPTIM.MOMENTUM": (0, 1),
    "OPTIM.DAMPENING": (0, 1),
    "OPTIM.WARMUP_FACTOR": (0, 1),
    "OPTIM.WARMUP_EPOCHS": (0, None),
    "OPTIM.WEIGHT_DECAY": (0, None),
    "OPTIM.NORM_WEIGHT_DECAY": (-1, None),
    "OPTIM.BIAS_WEIGHT_DECAY": (-1, None),
    "OPTIM.LAYER_DECAY": (0.001, 1),
    "OPTIM.CLIP_NORM": (0, None),
    "CHECKPOINT.EVERY_STEPS": (0, None),
    "CHECKPOINT.KEEP_LAST": (1, None),
    "CHECKPOINT.KEEP_EVERY": (0, None),
    "LOG.NUM_IMAGES": (0, None),
    "CHECKPOINT.MAX_HOURS": (0, None),
    "TRAIN.MAX_ROLLBACKS": (0, None),
    "DIST.TIMEOUT_S": (1, None),
    "DIST.STARTUP_TIMEOUT_S": (1, None),
    "DIST.BUCKET_MB": (0.001, None),
    "RNG_SEED": (0, 2**63 - 1),
}

# First words of AUG.POLICY: torchvision's and big_vision's policies by our names, then timm's, which take settings.
_TORCHVISION_POLICIES = ("autoaugment", "randaugment", "trivialaugment")
POLICIES = ("none", *_TORCHVISION_POLICIES, "randaugment_big_vision", "3augment",
            "rand", "augmix", "original", "originalr", "v0", "v0r", "3a")  # fmt: skip

# Optimizers that give the same weights with FSDP as without, with any of the suffixes. Others need more of a weight
# than the rows of one process, in operations that torch's sharded tensors do not support.
_FSDP_OPTIMIZERS = (
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamw", "adan", "adopt", "lamb", "laprop", "larc", "lars",
    "lion", "madgrad", "momentum", "nadam", "nesterov", "nlarc", "nlars", "radabelief", "radam", "rmsprop", "rmsproptf",
    "sgd",
)  # fmt: skip
_SUFFIXES = ("", "c", "cd", "cw", "w", "legacy")
# These scale a step by the norm of all gradients, or use random numbers; a process has its own share only.
_NOT_FOR_ZERO1 = ("clamb", "kron", "lamb")
_BUILT_IN_TASKS = ("classification", "distillation", "multilabel")


def check_cfg(cfg: Config) -> None:
    """Raise ConfigError with every value that is out of range or conflicts with another; touches no file."""
    problems = find_problems(cfg)
    if problems:
        raise ConfigError(problems)


def find_problems(cfg: Config) -> list[Problem]:
    """Return a problem for each value that is out of range or conflicts with another."""
    checks = (_check_choices, _check_ranges, _check_images, _check_labels, _check_sizes, _check_augmentation,
              _check_multilabel, _check_schedule, _check_loss, _check_finetuning, _check_distillation, _check_task,
              _check_keywords, _check_sharding, _check_paths, _check_batch)  # fmt: skip
    return [problem.located(cfg.origins) for check in checks for problem in check(cfg)]


def _check_choices(cfg: Config) -> Iterator[Problem]:
    registered = {key: registry.names() for key, registry in REGISTERED.items()}
    for key, allowed in {**CHOICES, **registered, "TASK.NAME": ["auto", *TASKS.names()]}.items():
        value = get_value(cfg, key)
        names = value if isinstance(value, tuple) else (value,)
        for name in names:
            if name not in allowed:
                hint = did_you_mean(name, allowed)
                yield Problem(key, f"got {name!r}; expected one of {', '.join(filter(None, allowed))}{hint}")
        if len(set(names)) < len(names):
            yield Problem(key, f"got {list(names)}; expected each name once")


def _check_ranges(cfg: Config) -> Iterator[Problem]:
    for key, (least, most) in RANGES.items():
        value = get_value(cfg, key)
        if value not in (None, AUTO) and (value < least or (most is not None and value > most)):
            yield Problem(key, f"got {value}; expected {least} {'or more' if most is None else f'to {most}'}")


# ---------------------------------------------------------------------------------------- conflicts


def _check_images(cfg: Config) -> Iterator[Problem]:
    data = cfg.DATA
    crop_size = cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE
    if crop_size > cfg.TEST.IM_SIZE:
        crop = "TEST.CROP_SIZE" if cfg.TEST.CROP_SIZE else "TRAIN.IM_SIZE, the crop size,"
        message = f"got {cfg.TEST.IM_SIZE}, smaller than {crop} {crop_size}; set it to {crop_size} or more"
        yield Problem("TEST.IM_SIZE", message)
    if len(data.CROP_SCALE) != 2 or not 0 < data.CROP_SCALE[0] <= data.CROP_SCALE[-1] <= 1:
        yield Problem("DATA.CROP_SCALE", f"got {list(data.CROP_SCALE)}; expected two numbers, 0 < min <= max <= 1")
    if len(data.CROP_RATIO) != 2 or not 0 < data.CROP_RATIO[0] <= data.CROP_RATIO[-1]:
        yield Problem("DATA.CROP_RATIO", f"got {list(data.CROP_RATIO)}; expected two numbers, 0 < min <= max")
    if data.INTERPOLATION == "random" and (_crop_of(cfg) != "resized" or cfg.AUG.POLICY in _TORCHVISION_POLICIES):
        message = "got random; expected bilinear or bicubic, unless DATA.CROP is resized and AUG.POLICY none or of timm"
        yield Problem("DATA.INTERPOLATION", message)
    if data.SHUFFLE == "blocks" and (data.NAME, data.SAMPLING) != ("packed", "uniform"):
        yield Problem("DATA.SHUFFLE", "got blocks; expected global, or DATA.NAME packed and DATA.SAMPLING uniform")
    for key in ("MEAN", "STD"):
        if len(data[key]) not in (0, 3):
            yield Problem(f"DATA.{key}", f"got {list(data[key])}; expected three numbers, one per channel, or []")
    if any(value <= 0 for value in data.STD):
        yield Problem("DATA.STD", f"got {list(data.STD)}; expected numbers above 0")


def _check_labels(cfg: Config) -> Iterator[Problem]:
    labels, test = cfg.TEST.LABELS, f"TEST.LABELS {cfg.TEST.LABELS}"
    if labels and cfg.MODEL.NUM_CLASSES != 1000:
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
    start, final, epochs = cfg.TRAIN.IM_SIZE_START, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE_EPOCHS
    if not start:
        return
    if start == 1:
        yield Problem("TRAIN.IM_SIZE_START", "got 1; expected 0, or 2 or more")
    if start > final:
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
    if (aug.MIXUP or aug.CUTMIX) and not aug.MIX_PROB:
        yield Problem("AUG.MIX_PROB", "0 disables AUG.MIXUP and AUG.CUTMIX; set both to 0, or this one above 0")
    if aug.MIX_GROUP % 2:
        message = f"got {aug.MIX_GROUP}; expected an even number, since images are mixed in pairs; fix: add 1"
        yield Problem("AUG.MIX_GROUP", message)
    if aug.MIX_GROUP and aug.MIX_BY == "step":
        message = f"got {aug.MIX_GROUP} with AUG.MIX_BY step; expected one of them; fix: set it to 0, or MIX_BY to pair"
        yield Problem("AUG.MIX_GROUP", message)
    if aug.MIXUP and aug.CUTMIX and aug.CUTMIX_SHARE in (0, 1):
        unused = "AUG.MIXUP" if aug.CUTMIX_SHARE else "AUG.CUTMIX"
        message = f"{aug.CUTMIX_SHARE:g} disables {unused}; set {unused} 0, or this one between 0 and 1"
        yield Problem("AUG.CUTMIX_SHARE", message)


def _check_multilabel(cfg: Config) -> Iterator[Problem]:
    if not dataset_class(cfg).multilabel:
        return
    reason = f"DATA.NAME {cfg.DATA.NAME} gives an image any number of classes"
    if cfg.LOSS.NAME != "bce":
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
    for key in ("BETAS", "EPS"):
        if optim.NAME.lower() == "sgd" and optim[key]:
            yield Problem(f"OPTIM.{key}", f"sgd has no {key.lower()}; remove this option")
    if optim.LR_POLICY == "steps" and not optim.STEPS:
        yield Problem("OPTIM.STEPS", "is empty, but OPTIM.LR_POLICY is steps; set the epochs, e.g. [30, 60, 90]")
    if list(optim.STEPS) != sorted(set(optim.STEPS)) or any(step < 0 for step in optim.STEPS):
        yield Problem("OPTIM.STEPS", f"got {list(optim.STEPS)}; expected ascending epochs, 0 or more, each once")
    if optim.LR_POLICY in ("tri", "cos_after_warmup") and 0 < optim.MAX_EPOCH <= optim.WARMUP_EPOCHS:
        message = f"got {optim.WARMUP_EPOCHS:g}; OPTIM.LR_POLICY {optim.LR_POLICY} expects less than OPTIM.MAX_EPOCH"
        yield Problem("OPTIM.WARMUP_EPOCHS", f"{message} {optim.MAX_EPOCH}")
    if optim.LR_POLICY == "exp" and optim.MIN_LR <= 0:
        message = f"got {optim.MIN_LR:g}; OPTIM.LR_POLICY exp expects a factor above 0, e.g. 0.001"
        yield Problem("OPTIM.MIN_LR", message)


def _check_loss(cfg: Config) -> Iterator[Problem]:
    loss, num_classes = cfg.LOSS, cfg.MODEL.NUM_CLASSES
    weights, threshold = loss.CLASS_WEIGHTS, loss.BCE_TARGET_THRESHOLD
    if num_classes and len(weights) not in (0, num_classes):
        message = f"has {counted(len(weights), 'number')}, but MODEL.NUM_CLASSES is {num_classes}; set one per class"
        yield Problem("LOSS.CLASS_WEIGHTS", message)
    if weights and (min(weights) < 0 or max(weights) == 0):
        message = f"got a minimum of {min(weights)} and a maximum of {max(weights)}; expected 0 or more, not all 0"
        yield Problem("LOSS.CLASS_WEIGHTS", message)
    # 0 was once the default, so configs of older runs have it with any loss.
    for_bce = {"BCE_TARGET_THRESHOLD": (threshold, "null"), "BCE_REDUCTION": (loss.BCE_REDUCTION == "sum", "mean")}
    for key, (is_on, default) in for_bce.items():
        if is_on and loss.NAME != "bce":
            message = f"needs LOSS.NAME bce, but it is {loss.NAME}; set LOSS.NAME bce, or this option to {default}"
            yield Problem(f"LOSS.{key}", message)
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
    if cfg.FINETUNE.HEAD_RESET and not cfg.FINETUNE.WEIGHTS:
        yield Problem("FINETUNE.HEAD_RESET", "has no effect without FINETUNE.WEIGHTS; set them, or this one to False")


def _check_distillation(cfg: Config) -> Iterator[Problem]:
    distill = cfg.DISTILL
    if distill.TEACHER and not distill.WEIGHTS:
        yield Problem("DISTILL.WEIGHTS", "is not set; set the teacher's file, or pretrained")
    if distill.WEIGHTS and not distill.TEACHER:
        yield Problem("DISTILL.TEACHER", "is not set; set the model that DISTILL.WEIGHTS belong to")


def _check_task(cfg: Config) -> Iterator[Problem]:
    name, multilabel = cfg.TASK.NAME, dataset_class(cfg).multilabel
    if name in _BUILT_IN_TASKS and multilabel != (name == "multilabel"):
        labels = "several labels" if multilabel else "one label"
        yield Problem("TASK.NAME", f"got {name}, but the data has {labels} per image; fix: set TASK.NAME auto")
    if (name == "distillation") > bool(cfg.DISTILL.TEACHER):
        yield Problem("TASK.NAME", "got distillation without a teacher; fix: set DISTILL.TEACHER")
    if cfg.TASK.KWARGS and name in ("auto", *_BUILT_IN_TASKS):
        keys = ", ".join(cfg.TASK.KWARGS)
        message = f"got {keys}, but TASK.NAME {name} has no settings; fix: set TASK.NAME to a task of your own"
        yield Problem("TASK.KWARGS", message)


def _check_keywords(cfg: Config) -> Iterator[Problem]:
    for section in ("MODEL.KWARGS", "DISTILL.KWARGS"):
        for key, message in find_reading_keywords(section, get_value(cfg, section)):
            yield Problem(key, message)


def _check_sharding(cfg: Config) -> Iterator[Problem]:
    shard, name = cfg.DIST.SHARD, cfg.OPTIM.NAME.lower()
    compiles = cfg.MODEL.COMPILE != "none"
    if cfg.DIST.CPU_OFFLOAD and shard != "fsdp":
        yield Problem("DIST.CPU_OFFLOAD", f"needs DIST.SHARD fsdp, but it is {shard}")
    if shard == "fsdp" and name not in [base + suffix for base in _FSDP_OPTIMIZERS for suffix in _SUFFIXES]:
        message = f"{name} does not work with DIST.SHARD fsdp; set DIST.SHARD zero1, or one of"
        yield Problem("OPTIM.NAME", f"{message} {', '.join(_FSDP_OPTIMIZERS)}")
    if shard == "zero1" and name.startswith(_NOT_FOR_ZERO1):
        message = f"{name} needs all gradients, but DIST.SHARD zero1 gives it a part; set DIST.SHARD fsdp or none"
        yield Problem("OPTIM.NAME", message)
    if cfg.DIST.BUCKET_MB < 1 and compiles and shard != "fsdp":  # torch's DDPOptimizer asserts it
        message = f"got {cfg.DIST.BUCKET_MB:g}; with MODEL.COMPILE {cfg.MODEL.COMPILE} expected 1 or more"
        yield Problem("DIST.BUCKET_MB", f"{message}; set it to 1 or more, or MODEL.COMPILE none")
    if cfg.MODEL.ACT_CHECKPOINT and compiles:
        message = "does not work with MODEL.COMPILE, which selects what to recompute; set one of them off"
        yield Problem("MODEL.ACT_CHECKPOINT", message)
    if shard == "fsdp" and cfg.MODEL.COMPILE in GRAPH_MODES:  # the weights are gathered in other memory in each step
        message = f"got {cfg.MODEL.COMPILE}, which replays CUDA graphs, with DIST.SHARD fsdp; expected none or default"
        yield Problem("MODEL.COMPILE", f"{message}; fix: set it to default, or DIST.SHARD to zero1 or none")
    if shard == "fsdp" and cfg.TRAIN.AMP == "fp16":
        message = "fp16 does not work with DIST.SHARD fsdp, where each process would scale its loss alone; use bf16"
        yield Problem("TRAIN.AMP", message)


def _check_paths(cfg: Config) -> Iterator[Problem]:
    if problem := find_path_problem(cfg.OUT_DIR):
        yield Problem("OUT_DIR", problem)
    if cfg.DATA.CACHE_DIR and (problem := find_path_problem(os.path.expanduser(cfg.DATA.CACHE_DIR))):
        yield Problem("DATA.CACHE_DIR", problem)
    if problem := find_name_problem(cfg.CFG_DEST):
        yield Problem("CFG_DEST", problem)


def _check_batch(cfg: Config) -> Iterator[Problem]:
    if cfg.TRAIN.BATCH_SIZE == AUTO and not cfg.TRAIN.GLOBAL_BATCH_SIZE:
        fix = "fix: set TRAIN.GLOBAL_BATCH_SIZE, the images per step, e.g. 256; or set a number of images"
        yield Problem("TRAIN.BATCH_SIZE", f"got auto without TRAIN.GLOBAL_BATCH_SIZE; {fix}")


# ----------------------------------------------------------------------------------- unused options


def find_unused_options(cfg: Config) -> list[Problem]:
    """Return a problem for each option that differs from its default but has no effect in this config."""
    default, found = get_cfg(), []
    for keys, is_used, condition in _USED_IF:
        for key in keys:
            value = get_value(cfg, key)
            if value != get_value(default, key) and not is_used(cfg):
                shown = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value
                found.append(Problem(key, f"{shown} has no effect; it needs {condition}", cfg.origins))
    return found


def _crop_of(cfg: Config) -> str | None:
    """Return the training crop, "resized" or "pad"; None if it is known only once the data set is opened."""
    if cfg.DATA.CROP != "auto":
        return cfg.DATA.CROP
    return None if cfg.DATA.NAME == "packed" else dataset_class(cfg).crop


def _mixes(cfg: Config) -> bool:
    return bool(cfg.AUG.MIXUP or cfg.AUG.CUTMIX)


def _distills_probabilities(cfg: Config) -> bool:
    return bool(cfg.DISTILL.TEACHER) and cfg.DISTILL.KIND == "soft"


# Options, whether a config uses them, and the condition in words.
_USED_IF: tuple[tuple[tuple[str, ...], Callable[[Config], object], str], ...] = (
    (("AUG.MIX_PROB", "AUG.MIX_BY", "AUG.MIX_GROUP"), _mixes, "AUG.MIXUP or AUG.CUTMIX above 0"),
    (("AUG.CUTMIX_SHARE",), lambda cfg: cfg.AUG.MIXUP and cfg.AUG.CUTMIX, "both AUG.MIXUP and AUG.CUTMIX above 0"),
    (("AUG.ERASING_MODE",), lambda cfg: cfg.AUG.ERASING, "AUG.ERASING above 0"),
    (("DATA.CACHE_GB", "DATA.TIMEOUT_S"), lambda cfg: "://" in cfg.TRAIN.DATASET + cfg.TEST.DATASET, "data at a URL"),
    (("DATA.CROP_SCALE", "DATA.CROP_RATIO"), lambda cfg: _crop_of(cfg) != "pad", "DATA.CROP resized"),
    (("DATA.CROP_PADDING",), lambda cfg: _crop_of(cfg) != "resized", "DATA.CROP pad"),
    (("DIST.BUCKET_MB",), lambda cfg: cfg.DIST.SHARD != "fsdp", "DIST.SHARD none or zero1"),
    (("DISTILL.KIND", "DISTILL.ALPHA", "DISTILL.KWARGS"), lambda cfg: cfg.DISTILL.TEACHER, "a DISTILL.TEACHER"),
    (("DISTILL.TEMPERATURE",), _distills_probabilities, "a DISTILL.TEACHER and DISTILL.KIND soft"),
    (
        ("EMA.RAMP_UP", "EMA.BUFFERS", "EMA.EVERY_STEPS", "EMA.START_EPOCH"),
        lambda cfg: cfg.EMA.HALF_LIFE,
        "EMA.HALF_LIFE above 0",
    ),
    (("FINETUNE.EMA",), lambda cfg: cfg.FINETUNE.WEIGHTS, "FINETUNE.WEIGHTS"),
    (("LOG.NUM_IMAGES",), lambda cfg: cfg.LOG.TENSORBOARD, "LOG.TENSORBOARD True"),
    (("LOSS.FOCAL_GAMMA",), lambda cfg: cfg.LOSS.NAME == "focal", "LOSS.NAME focal"),
    (("MODEL.INIT",), lambda cfg: not cfg.MODEL.PRETRAINED, "MODEL.PRETRAINED False"),
    (("OPTIM.STEPS", "OPTIM.LR_MULT"), lambda cfg: cfg.OPTIM.LR_POLICY == "steps", "OPTIM.LR_POLICY steps"),
    (("OPTIM.MIN_LR",), lambda cfg: cfg.OPTIM.LR_POLICY != "steps", "an OPTIM.LR_POLICY other than steps"),
    (("OPTIM.LR_SCALE_BATCH",), lambda cfg: cfg.OPTIM.LR_SCALE != "none", "OPTIM.LR_SCALE linear or sqrt"),
    (("OPTIM.WARMUP_FACTOR",), lambda cfg: cfg.OPTIM.WARMUP_EPOCHS, "OPTIM.WARMUP_EPOCHS above 0"),
    (("OPTIM.DAMPENING",), lambda cfg: cfg.OPTIM.NAME.lower() == "sgd", "OPTIM.NAME sgd"),
    (("TRAIN.IM_SIZE_EPOCHS", "TRAIN.IM_SIZE_MULTIPLE"), lambda cfg: cfg.TRAIN.IM_SIZE_START, "TRAIN.IM_SIZE_START"),
    (("TRAIN.LOAD_OPT",), lambda cfg: cfg.MODEL.WEIGHTS, "MODEL.WEIGHTS"),
    (("TRAIN.MAX_ROLLBACKS",), lambda cfg: cfg.TRAIN.ON_NAN == "rollback", "TRAIN.ON_NAN rollback"),
    (("TRAIN.SPLIT", "TEST.SPLIT"), lambda cfg: dataset_class(cfg).has_splits, "a DATA.NAME with folders of splits"),
)
