"""Conflicts of options that are off by default: mixing, growing images, class weights, teachers, other test sets,
arguments of constructors, DIST.SHARD.
"""

import json
from collections.abc import Iterator

from distribuuuu.config.config_node import Config, get_value
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.errors import Problem, counted
from distribuuuu.config.model_names import OWN_KEYS, is_published, names_backbone
from distribuuuu.config.options import GRAPH_MODES, IMAGENET_CLASSES, OF_WEIGHTS
from distribuuuu.config.read_settings import read_settings
from distribuuuu.config.registry import BUILT_IN_TASKS, OPTIMIZERS
from distribuuuu.config.settings import LoraSettings

# Arguments of optimizers that are options, the last two for sgd and registered ones only, or that the trainer sets.
OPTIM_ARGUMENTS = {
    "lr": "OPTIM.BASE_LR", "weight_decay": "OPTIM.WEIGHT_DECAY", "momentum": "OPTIM.MOMENTUM", "betas": "OPTIM.BETAS",
    "eps": "OPTIM.EPS", **dict.fromkeys(("params", "fused", "foreach", "capturable", "differentiable"), ""),
    "dampening": "OPTIM.DAMPENING", "nesterov": "OPTIM.NESTEROV",
}  # fmt: skip

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

# Operations of this package that need three channels of 8 bits.
_RGB_OPERATIONS = ("grayscale", "pca_noise")

# An option, whether its value is in conflict with others, and what is expected.
Conflict = tuple[str, object, str]


def find_conflicts(cfg: Config) -> Iterator[Conflict]:
    """Yield the conflicts of all features that are on."""
    yield from _mixing(cfg)
    yield from _colors(cfg) if (cfg.DATA.CHANNELS, cfg.DATA.PIXELS) != (3, "uint8") else ()
    mode = cfg.MODEL.COMPILE
    recomputes = cfg.MODEL.ACT_CHECKPOINT and mode != "none"
    yield "MODEL.ACT_CHECKPOINT", recomputes, f"expected False with MODEL.COMPILE {mode}; fix: set one of them off"
    yield from _targets(cfg) if cfg.LOSS.NAME == "bce" else ()
    yield from _growth(cfg) if cfg.TRAIN.IM_SIZE_START else ()
    yield from _class_weights(cfg)
    yield from _other_weights(cfg)
    yield from _labels(cfg) if cfg.TEST.LABELS else ()
    yield from _static_steps(cfg) if mode == "step" else ()


def _mixing(cfg: Config) -> Iterator[Conflict]:
    aug = cfg.AUG
    is_mixed, is_both = aug.MIXUP or aug.CUTMIX, aug.MIXUP and aug.CUTMIX
    yield "AUG.MIX_PROB", is_mixed and not aug.MIX_PROB, "expected more than 0 with AUG.MIXUP or AUG.CUTMIX"
    is_one = is_both and aug.CUTMIX_SHARE in (0, 1)
    yield "AUG.CUTMIX_SHARE", is_one, "expected between 0 and 1 with both; fix: set AUG.MIXUP or AUG.CUTMIX to 0"
    is_group = aug.MIX_GROUP and aug.MIX_BY == "step"
    yield "AUG.MIX_BY", is_group, "expected pair with AUG.MIX_GROUP; fix: set one of them back"


def _colors(cfg: Config) -> Iterator[Conflict]:
    data, aug = cfg.DATA, cfg.AUG
    expected = f"with DATA.CHANNELS {data.CHANNELS} and DATA.PIXELS {data.PIXELS}, expected"
    yield "AUG.POLICY", aug.POLICY != "none", f"{expected} none, since it needs 8-bit RGB"
    yield "AUG.COLOR_JITTER", aug.COLOR_JITTER, f"{expected} [], since it needs 8-bit RGB"
    rgb = [name for name in aug.OPERATIONS if name in _RGB_OPERATIONS]
    yield "AUG.OPERATIONS", rgb, f"{expected} none of {', '.join(rgb)}, which need 8-bit RGB"


def _targets(cfg: Config) -> Iterator[Conflict]:
    loss, num_classes = cfg.LOSS, cfg.MODEL.NUM_CLASSES
    threshold = loss.BCE_TARGET_THRESHOLD
    if num_classes and threshold is not None:
        # Beyond these two every target would be 0, or every target 1; without smoothing no absent class is above 0.
        lowest = loss.LABEL_SMOOTHING / num_classes
        highest = 1 - loss.LABEL_SMOOTHING + lowest
        is_between = lowest < threshold < highest or threshold == lowest == 0
        expected = f"expected null, or between {lowest:g} and {highest:g}, the targets with LOSS.LABEL_SMOOTHING"
        yield "LOSS.BCE_TARGET_THRESHOLD", not is_between, f"{expected} {loss.LABEL_SMOOTHING:g}"


def _static_steps(cfg: Config) -> Iterator[Conflict]:
    name, step = cfg.OPTIM.NAME.lower(), "with MODEL.COMPILE step, which skips no step and has rates on the device"
    yield "TRAIN.AMP", cfg.TRAIN.AMP == "fp16", f"expected none or bf16 {step}"
    yield "DIST.BACKEND", cfg.DIST.BACKEND != "auto", "expected auto with MODEL.COMPILE step, without a group"
    yield "OPTIM.NAME", name not in ("sgd", "adam", "adamw"), f"expected sgd, adam or adamw {step}"
    yield "OPTIM.DAMPENING", name == "sgd" and cfg.OPTIM.DAMPENING, f"expected 0 {step}"  # else no fused kernel


def _growth(cfg: Config) -> Iterator[Conflict]:
    train, start = cfg.TRAIN, cfg.TRAIN.IM_SIZE_START
    final, epochs = train.IM_SIZE, train.IM_SIZE_EPOCHS
    is_square = isinstance(final, int)
    yield "TRAIN.IM_SIZE_START", not is_square, "expected a square TRAIN.IM_SIZE; fix: set it to 0"
    expected = f"expected at most TRAIN.IM_SIZE {final}, the final size"
    yield "TRAIN.IM_SIZE_START", is_square and start > final, expected
    yield "TRAIN.IM_SIZE_START", start == 1, "expected 0, or 2 or more"  # as TRAIN.IM_SIZE
    is_range = len(epochs) == 2 and 0 <= epochs[0] < epochs[1]
    expected = "expected the first and the last epoch of the growth, 0 <= first < last, e.g. [0, 80]"
    yield "TRAIN.IM_SIZE_EPOCHS", not is_range, expected


def _class_weights(cfg: Config) -> Iterator[Conflict]:
    loss, num_classes = cfg.LOSS, cfg.MODEL.NUM_CLASSES
    for key, weights in (("LOSS.CLASS_WEIGHTS", loss.CLASS_WEIGHTS), ("LOSS.POSITIVE_WEIGHT", loss.POSITIVE_WEIGHT)):
        numbers = weights
        if isinstance(weights, str):
            numbers = [] if weights == AUTO else [*json.loads(weights).values()]
            yield key, not (weights == AUTO or numbers), "expected auto, one number per class, or numbers by name"
        elif key == "LOSS.CLASS_WEIGHTS" or len(weights) > 1:
            is_other = num_classes and len(weights) not in (0, num_classes)
            yield key, is_other, f"expected {counted(num_classes, 'number')}, MODEL.NUM_CLASSES"
        is_none = not isinstance(weights, str) and max(numbers, default=1) == 0  # classes without a name here weigh 1
        yield key, min(numbers, default=0) < 0 or is_none, "expected 0 or more, not all 0"


def _other_weights(cfg: Config) -> Iterator[Conflict]:
    name = cfg.TASK.NAME
    teacher = cfg.DISTILL.TEACHER
    lacks = teacher and not (cfg.DISTILL.WEIGHTS or is_published(teacher) or names_backbone(teacher))
    yield "DISTILL.WEIGHTS", lacks, "expected the file of the teacher's weights, or pretrained"
    lacks = cfg.DISTILL.WEIGHTS and not cfg.DISTILL.TEACHER
    yield "DISTILL.WEIGHTS", lacks, "expected none without a teacher; fix: set DISTILL.TEACHER to their model"
    tune = cfg.FINETUNE
    is_tuned = tune.WEIGHTS or cfg.MODEL.PRETRAINED or names_backbone(cfg.MODEL.ARCH)
    for key in ("HEAD", "HEAD_RESET", "LORA"):
        lacks = tune[key] and not (is_tuned or (key == "LORA" and cfg.MODEL.WEIGHTS))
        yield f"FINETUNE.{key}", lacks, "expected none without trained weights; fix: set FINETUNE.WEIGHTS"
    is_both = tune.LORA and "backbone" in tune.FREEZE
    yield "FINETUNE.FREEZE", is_both, "expected no `backbone`, which would freeze the adapters; fix: remove it"
    is_unused = cfg.DISTILL.TEACHER and name in BUILT_IN_TASKS and name != "distillation"
    yield "DISTILL.TEACHER", is_unused, f"expected none with TASK.NAME {name}; fix: set TASK.NAME auto"


def _labels(cfg: Config) -> Iterator[Conflict]:
    labels = cfg.TEST.LABELS
    with_labels = f"with TEST.LABELS {labels}"
    is_other = labels != OF_WEIGHTS and cfg.MODEL.NUM_CLASSES not in (0, IMAGENET_CLASSES)
    yield "MODEL.NUM_CLASSES", is_other, f"expected {IMAGENET_CLASSES} {with_labels}"
    yield "DATA.NAME", cfg.DATA.NAME != "imagefolder", f"expected imagefolder {with_labels}"
    yield "MODEL.DUMMY_INPUT", cfg.MODEL.DUMMY_INPUT, f"expected False {with_labels}"


def check_arguments(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for each argument of a constructor that is an option, or freezes parameters."""
    for pattern, factor in cfg.FINETUNE.LR_MULT.items():
        if factor <= 0:
            message = f"got {factor:g}; expected a number above 0; to freeze parameters set FINETUNE.FREEZE"
            yield Problem(f"FINETUNE.LR_MULT.{pattern}", message)
    yield from read_settings("FINETUNE.LORA", LoraSettings, cfg.FINETUNE.LORA)[1]
    is_ours = cfg.OPTIM.NAME.lower() == "sgd" or cfg.OPTIM.NAME in OPTIMIZERS
    for name in cfg.OPTIM.KWARGS:
        if name in OPTIM_ARGUMENTS and (is_ours or name not in ("dampening", "nesterov")):
            option = OPTIM_ARGUMENTS[name]
            message = f"is an option; fix: set {option} instead" if option else "is set by the trainer; fix: remove it"
            yield Problem(f"OPTIM.KWARGS.{name}", message)
    for section in ("MODEL.KWARGS", "DISTILL.KWARGS"):
        for name in get_value(cfg, section).keys() & OWN_KEYS.keys() - {"num_classes"}:
            yield Problem(f"{section}.{name}", f"set {OWN_KEYS[name]} instead")


def find_sharding_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for each option that does not work with DIST.SHARD zero1 or fsdp."""
    shard, name = cfg.DIST.SHARD, cfg.OPTIM.NAME.lower()
    if shard == "zero1" and name.startswith(_NOT_FOR_ZERO1):
        message = f"{name} needs all gradients, but DIST.SHARD zero1 gives it a part; set DIST.SHARD fsdp or none"
        yield Problem("OPTIM.NAME", message)
    if shard != "fsdp":
        return
    if name not in [base + suffix for base in _FSDP_OPTIMIZERS for suffix in _SUFFIXES]:
        message = f"{name} does not work with DIST.SHARD fsdp; set DIST.SHARD zero1, or one of"
        yield Problem("OPTIM.NAME", f"{message} {', '.join(_FSDP_OPTIMIZERS)}")
    if cfg.MODEL.COMPILE in GRAPH_MODES:  # the weights are gathered in other memory in each step
        message = f"got {cfg.MODEL.COMPILE}, which replays CUDA graphs, with DIST.SHARD fsdp; expected none or default"
        yield Problem("MODEL.COMPILE", f"{message}; fix: set it to default, or DIST.SHARD to zero1 or none")
    if cfg.FINETUNE.LORA:
        message = "got adapters with DIST.SHARD fsdp, whose shards cannot be merged; fix: set it to zero1 or none"
        yield Problem("FINETUNE.LORA", message)
    if cfg.TRAIN.AMP == "fp16":
        message = "fp16 does not work with DIST.SHARD fsdp, where each process would scale its loss alone; use bf16"
        yield Problem("TRAIN.AMP", message)
