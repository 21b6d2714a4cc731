"""Options that are set but have no effect in a config, because another option switches them off."""

from collections.abc import Callable, Iterator

from yacs.config import CfgNode

from distribuuuu.config.reader import get_cfg, get_value
from distribuuuu.config.registry import dataset_class

# Data sets whose parts are fixed, whatever the splits are called.
_FIXED_PARTS = ("cifar10", "cifar100", "mnist", "fashion_mnist", "shapes", "dummy")


def _crop_of(cfg: CfgNode) -> str | None:
    """Return the training crop, "resized" or "pad"; None if only the opened set tells it."""
    if cfg.DATA.CROP != "auto":
        return cfg.DATA.CROP
    return None if cfg.DATA.NAME == "packed" else dataset_class(cfg).crop


def _mixes(cfg: CfgNode) -> bool:
    return bool(cfg.AUG.MIXUP or cfg.AUG.CUTMIX)


# The options, whether a config uses them, and when one does.
_RULES: tuple[tuple[tuple[str, ...], Callable[[CfgNode], object], str], ...] = (
    (("AUG.MIX_PROB", "AUG.MIX_BY"), _mixes, "AUG.MIXUP or AUG.CUTMIX above 0"),
    (("AUG.CUTMIX_SHARE",), lambda cfg: cfg.AUG.MIXUP and cfg.AUG.CUTMIX, "both AUG.MIXUP and AUG.CUTMIX above 0"),
    (("AUG.ERASING_MODE",), lambda cfg: cfg.AUG.ERASING, "AUG.ERASING above 0"),
    (("DATA.CROP_SCALE", "DATA.CROP_RATIO"), lambda cfg: _crop_of(cfg) != "pad", "DATA.CROP resized"),
    (("DATA.CROP_PADDING",), lambda cfg: _crop_of(cfg) != "resized", "DATA.CROP pad"),
    (("DIST.BUCKET_MB",), lambda cfg: cfg.DIST.SHARD != "fsdp", "DIST.SHARD none or zero1"),
    (("DISTILL.KIND", "DISTILL.ALPHA", "DISTILL.KWARGS"), lambda cfg: cfg.DISTILL.TEACHER, "a DISTILL.TEACHER"),
    (
        ("DISTILL.TEMPERATURE",),
        lambda cfg: cfg.DISTILL.TEACHER and cfg.DISTILL.KIND == "soft",
        "a DISTILL.TEACHER and DISTILL.KIND soft",
    ),
    (("EMA.RAMP_UP", "EMA.BUFFERS"), lambda cfg: cfg.EMA.HALF_LIFE, "EMA.HALF_LIFE above 0"),
    (("FINETUNE.EMA",), lambda cfg: cfg.FINETUNE.WEIGHTS, "FINETUNE.WEIGHTS"),
    (("LOG.NUM_IMAGES",), lambda cfg: cfg.LOG.TENSORBOARD, "LOG.TENSORBOARD True"),
    (("LOSS.FOCAL_GAMMA",), lambda cfg: cfg.LOSS.NAME == "focal", "LOSS.NAME focal"),
    (("OPTIM.STEPS", "OPTIM.LR_MULT"), lambda cfg: cfg.OPTIM.LR_POLICY == "steps", "OPTIM.LR_POLICY steps"),
    (("OPTIM.MIN_LR",), lambda cfg: cfg.OPTIM.LR_POLICY != "steps", "OPTIM.LR_POLICY cos, exp, lin or tri"),
    (("OPTIM.LR_SCALE_BATCH",), lambda cfg: cfg.OPTIM.LR_SCALE != "none", "OPTIM.LR_SCALE linear or sqrt"),
    (("OPTIM.WARMUP_FACTOR",), lambda cfg: cfg.OPTIM.WARMUP_EPOCHS, "OPTIM.WARMUP_EPOCHS above 0"),
    (("OPTIM.DAMPENING",), lambda cfg: cfg.OPTIM.NAME.lower() == "sgd", "OPTIM.NAME sgd"),
    (("TRAIN.IM_SIZE_EPOCHS", "TRAIN.IM_SIZE_MULTIPLE"), lambda cfg: cfg.TRAIN.IM_SIZE_START, "TRAIN.IM_SIZE_START"),
    (("TRAIN.LOAD_OPT",), lambda cfg: cfg.MODEL.WEIGHTS, "MODEL.WEIGHTS"),
    (("TRAIN.MAX_ROLLBACKS",), lambda cfg: cfg.TRAIN.ON_NAN == "rollback", "TRAIN.ON_NAN rollback"),
    (
        ("TRAIN.SPLIT", "TEST.SPLIT"),
        lambda cfg: cfg.DATA.NAME not in _FIXED_PARTS,
        "DATA.NAME imagefolder, packed or multilabel",
    ),
)


def find_unused_options(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each option that differs from its default but is not used."""
    default = get_cfg()
    for keys, is_used, condition in _RULES:
        for key in keys:
            value = get_value(cfg, key)
            if value != get_value(default, key) and not is_used(cfg):
                shown = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value
                yield key, f"{shown} has no effect; it needs {condition}"
