"""Values that are each allowed but do not go together: what a config contradicts itself in."""

import os
from collections.abc import Iterator

from yacs.config import CfgNode

from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.config.registry import dataset_class

# What AUG.POLICY may begin with: names of our own, then those of timm, which takes numbers after them.
POLICIES = ("none", "autoaugment", "randaugment", "trivialaugment", "3augment",
            "rand", "augmix", "original", "originalr", "v0", "v0r", "3a")  # fmt: skip


def find_conflicts(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for every conflict; each names the remedy."""
    of_data = (_in_images, _in_sizes, _in_augmentation, _in_multilabel)
    for find in (*of_data, _in_schedule, _in_loss, _in_finetuning, _in_distillation, _in_sharding, _in_paths):
        yield from find(cfg)


def _in_images(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    data = cfg.DATA
    crop_size = cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE
    if crop_size > cfg.TEST.IM_SIZE:
        what = "TEST.CROP_SIZE" if cfg.TEST.CROP_SIZE else "TRAIN.IM_SIZE, the crop,"
        yield "TEST.IM_SIZE", f"{cfg.TEST.IM_SIZE} is smaller than {what} {crop_size}; set it to {crop_size} or more"
    if len(data.CROP_SCALE) != 2 or not 0 < data.CROP_SCALE[0] <= data.CROP_SCALE[-1] <= 1:
        yield "DATA.CROP_SCALE", f"{list(data.CROP_SCALE)} must be two numbers, 0 < least <= greatest <= 1"
    if len(data.CROP_RATIO) != 2 or not 0 < data.CROP_RATIO[0] <= data.CROP_RATIO[-1]:
        yield "DATA.CROP_RATIO", f"{list(data.CROP_RATIO)} must be two numbers, 0 < least <= greatest"
    for key in ("MEAN", "STD"):
        if len(data[key]) not in (0, 3):
            yield f"DATA.{key}", f"{list(data[key])} must have three numbers, one a channel, or be empty"
    if any(value <= 0 for value in data.STD):
        yield "DATA.STD", f"{list(data.STD)} must be above 0"


def _in_sizes(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    train = cfg.TRAIN
    if not train.IM_SIZE_START:
        return
    if train.IM_SIZE_START == 1:
        yield "TRAIN.IM_SIZE_START", "1 is outside the allowed range: 0, or 2 and up"
    if train.IM_SIZE_START > train.IM_SIZE:
        yield "TRAIN.IM_SIZE_START", f"{train.IM_SIZE_START} is above TRAIN.IM_SIZE {train.IM_SIZE}, where it grows to"
    epochs = train.IM_SIZE_EPOCHS
    if len(epochs) != 2 or not 0 <= epochs[0] < epochs[-1]:
        message = f"{list(epochs)} must be the first and the last epoch of the growth, 0 <= first < last, e.g. [0, 80]"
        yield "TRAIN.IM_SIZE_EPOCHS", message


def _in_augmentation(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    aug = cfg.AUG
    jitter = aug.COLOR_JITTER
    if len(jitter) not in (0, 1, 3, 4) or any(value < 0 for value in jitter) or max((0, *jitter[3:])) > 0.5:
        what = "one number, three or four, 0 or more and the fourth, for the hue, at most 0.5"
        yield "AUG.COLOR_JITTER", f"{list(jitter)} must be {what}"
    name = aug.POLICY.split("-")[0]
    if name not in POLICIES:
        near = did_you_mean(aug.POLICY, POLICIES) or did_you_mean(name, POLICIES)
        yield "AUG.POLICY", f"{aug.POLICY!r} does not begin with one of {', '.join(POLICIES)}{near}"
    if (aug.MIXUP or aug.CUTMIX) and not aug.MIX_PROB:
        yield "AUG.MIX_PROB", "0 leaves nothing to AUG.MIXUP and AUG.CUTMIX; set them to 0, or it above 0"
    if aug.MIXUP and aug.CUTMIX and aug.CUTMIX_SHARE in (0, 1):
        never = "AUG.MIXUP" if aug.CUTMIX_SHARE else "AUG.CUTMIX"
        yield "AUG.CUTMIX_SHARE", f"{aug.CUTMIX_SHARE:g} leaves nothing to {never}; set {never} 0, or a share between"


def _in_multilabel(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    if not dataset_class(cfg).multilabel:
        return
    several = f"DATA.NAME {cfg.DATA.NAME} gives an image any number of classes"
    if cfg.LOSS.NAME != "bce":
        yield "LOSS.NAME", f"{cfg.LOSS.NAME} is for one class an image, but {several}; set LOSS.NAME bce"
    if cfg.DATA.SAMPLING != "uniform":
        yield "DATA.SAMPLING", f"{cfg.DATA.SAMPLING} draws by an image's one class, but {several}; set it to uniform"
    if cfg.DISTILL.TEACHER:
        yield "DISTILL.TEACHER", f"teaches which one class an image is of, but {several}; leave it empty"


def _in_schedule(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    optim = cfg.OPTIM
    if optim.NAME.lower() == "sgd" and optim.NESTEROV and (optim.MOMENTUM == 0 or optim.DAMPENING != 0):
        yield "OPTIM.NESTEROV", "needs OPTIM.MOMENTUM above 0 and OPTIM.DAMPENING 0; or set OPTIM.NESTEROV False"
    for key in ("BETAS", "EPS"):
        if optim.NAME.lower() == "sgd" and optim[key]:
            yield f"OPTIM.{key}", "sgd takes none; leave it at its default"
    if optim.LR_POLICY == "steps" and not optim.STEPS:
        yield "OPTIM.STEPS", "is empty, but OPTIM.LR_POLICY is steps; give the epochs, e.g. [30, 60, 90]"
    if list(optim.STEPS) != sorted(set(optim.STEPS)) or any(step < 0 for step in optim.STEPS):
        yield "OPTIM.STEPS", f"{list(optim.STEPS)} must ascend from 0 or more, each epoch once"
    if optim.LR_POLICY == "tri" and 0 < optim.MAX_EPOCH <= optim.WARMUP_EPOCHS:
        yield "OPTIM.WARMUP_EPOCHS", f"{optim.WARMUP_EPOCHS:g} must be below OPTIM.MAX_EPOCH {optim.MAX_EPOCH} with tri"
    if optim.LR_POLICY == "exp" and optim.MIN_LR <= 0:
        yield "OPTIM.MIN_LR", "must be above 0 when OPTIM.LR_POLICY is exp, e.g. 0.001"


def _in_loss(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    loss, num_classes = cfg.LOSS, cfg.MODEL.NUM_CLASSES
    if num_classes and len(loss.CLASS_WEIGHTS) not in (0, num_classes):
        numbers = counted(len(loss.CLASS_WEIGHTS), "number")
        message = f"has {numbers}, but MODEL.NUM_CLASSES is {num_classes}; give one a class"
        yield "LOSS.CLASS_WEIGHTS", message
    if loss.CLASS_WEIGHTS and (min(loss.CLASS_WEIGHTS) < 0 or max(loss.CLASS_WEIGHTS) == 0):
        yield "LOSS.CLASS_WEIGHTS", f"must be 0 or more, and not all 0; the least is {min(loss.CLASS_WEIGHTS)}"
    for key, off, is_on in (
        ("BCE_TARGET_THRESHOLD", 0, loss.BCE_TARGET_THRESHOLD > 0),
        ("BCE_REDUCTION", "mean", loss.BCE_REDUCTION == "sum"),
    ):
        if is_on and loss.NAME != "bce":
            yield f"LOSS.{key}", f"is for LOSS.NAME bce, which is {loss.NAME}; set that to bce, or this one to {off}"
    # A threshold that the target of every class, or of none, is above would leave nothing to learn.
    least = loss.LABEL_SMOOTHING / max(1, num_classes)
    most = 1 - loss.LABEL_SMOOTHING + least
    has_threshold = num_classes and loss.NAME == "bce" and loss.BCE_TARGET_THRESHOLD
    if has_threshold and not least < loss.BCE_TARGET_THRESHOLD < most:
        message = f"{loss.BCE_TARGET_THRESHOLD:g} must lie between the targets, {least:g} and {most:g}, of one image"
        yield "LOSS.BCE_TARGET_THRESHOLD", f"{message} with LOSS.LABEL_SMOOTHING {loss.LABEL_SMOOTHING:g}; or be 0"


def _in_finetuning(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    for pattern, factor in cfg.FINETUNE.LR_MULT.items():
        if factor <= 0:
            message = f"{factor:g} is not above 0; to leave parameters as they are, name them in FINETUNE.FREEZE"
            yield f"FINETUNE.LR_MULT.{pattern}", message
    if cfg.FINETUNE.HEAD_RESET and not cfg.FINETUNE.WEIGHTS:
        yield "FINETUNE.HEAD_RESET", "has no meaning without FINETUNE.WEIGHTS; set them, or leave it False"


def _in_distillation(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    distill = cfg.DISTILL
    if distill.TEACHER and not distill.WEIGHTS:
        yield "DISTILL.WEIGHTS", "is not set: name the teacher's file, or `pretrained`"
    if distill.WEIGHTS and not distill.TEACHER:
        yield "DISTILL.TEACHER", "is not set: name the model that DISTILL.WEIGHTS belong to"


# The optimizers that give the same weights with FSDP as without, also with the suffixes. Others see more of a weight
# than a process's rows of it, in ways that torch's sharded tensors do not work out.
_FIT_FOR_FSDP = (
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamw", "adan", "adopt", "lamb", "laprop", "larc", "lars",
    "lion", "madgrad", "momentum", "nadam", "nesterov", "nlarc", "nlars", "radabelief", "radam", "rmsprop", "rmsproptf",
    "sgd",
)  # fmt: skip
# They scale a step by the norm of all gradients, or draw at random, with each process knowing its share only.
_UNFIT_FOR_ZERO1 = ("clamb", "kron", "lamb")
_SUFFIXES = ("", "c", "cd", "cw", "w", "legacy")


def _in_sharding(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    shard, name = cfg.DIST.SHARD, cfg.OPTIM.NAME.lower()
    if cfg.DIST.CPU_OFFLOAD and shard != "fsdp":
        yield "DIST.CPU_OFFLOAD", f"needs DIST.SHARD fsdp, which is {shard}"
    if shard == "fsdp" and name not in [base + suffix for base in _FIT_FOR_FSDP for suffix in _SUFFIXES]:
        message = f"{name} does not go with DIST.SHARD fsdp; zero1 takes it, fsdp takes {', '.join(_FIT_FOR_FSDP)}"
        yield "OPTIM.NAME", message
    if shard == "zero1" and name.startswith(_UNFIT_FOR_ZERO1):
        yield "OPTIM.NAME", f"{name} needs to see all gradients, not DIST.SHARD zero1's share; set fsdp or none"
    if cfg.DIST.BUCKET_MB < 1 and cfg.MODEL.COMPILE != "none" and shard != "fsdp":  # torch's DDPOptimizer asserts it
        message = f"got {cfg.DIST.BUCKET_MB:g}; with MODEL.COMPILE {cfg.MODEL.COMPILE} expected 1 or more"
        yield "DIST.BUCKET_MB", f"{message}; set it to 1 or more, or MODEL.COMPILE none"
    if cfg.MODEL.ACT_CHECKPOINT and cfg.MODEL.COMPILE != "none":
        yield "MODEL.ACT_CHECKPOINT", "does not go with MODEL.COMPILE, which decides by itself what to compute again"
    if shard == "fsdp" and cfg.TRAIN.AMP == "fp16":
        yield "TRAIN.AMP", "fp16 does not go with DIST.SHARD fsdp: each process would judge its own gradients; use bf16"


def _in_paths(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    if not cfg.OUT_DIR:
        yield "OUT_DIR", "is empty; name a folder"
    if os.path.basename(cfg.CFG_DEST) != cfg.CFG_DEST or cfg.CFG_DEST in ("", ".", ".."):
        yield "CFG_DEST", f"{cfg.CFG_DEST!r} must be a plain file name; it goes into OUT_DIR"
