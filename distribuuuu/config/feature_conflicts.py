"""Conflicts of options that are off by default: mixing, growing images, class weights, teachers, other test sets."""

import json
from collections.abc import Iterator

from distribuuuu.config.config_node import Config
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.errors import counted
from distribuuuu.config.model_names import is_published, names_backbone
from distribuuuu.config.options import IMAGENET_CLASSES
from distribuuuu.config.registry import BUILT_IN_TASKS

# An option, whether its value is in conflict with others, and what is expected.
Conflict = tuple[str, object, str]


def find_conflicts(cfg: Config) -> Iterator[Conflict]:
    """Yield the conflicts of all features that are on."""
    yield from _mixing(cfg)
    yield from _growth(cfg) if cfg.TRAIN.IM_SIZE_START else ()
    yield from _class_weights(cfg)
    yield from _other_weights(cfg)
    yield from _labels(cfg) if cfg.TEST.LABELS else ()


def _mixing(cfg: Config) -> Iterator[Conflict]:
    aug = cfg.AUG
    is_mixed, is_both = aug.MIXUP or aug.CUTMIX, aug.MIXUP and aug.CUTMIX
    yield "AUG.MIX_PROB", is_mixed and not aug.MIX_PROB, "expected more than 0 with AUG.MIXUP or AUG.CUTMIX"
    is_one = is_both and aug.CUTMIX_SHARE in (0, 1)
    yield "AUG.CUTMIX_SHARE", is_one, "expected between 0 and 1 with both; fix: set AUG.MIXUP or AUG.CUTMIX to 0"
    is_group = aug.MIX_GROUP and aug.MIX_BY == "step"
    yield "AUG.MIX_BY", is_group, "expected pair with AUG.MIX_GROUP; fix: set one of them back"


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
            numbers = [*json.loads(weights).values()] if weights.startswith("{") else []
            is_auto = class_weight_beta(weights) is not None and (key == "LOSS.CLASS_WEIGHTS" or weights == AUTO)
            form = "auto, auto:BETA with 0 <= BETA < 1" if key == "LOSS.CLASS_WEIGHTS" else "auto"
            yield key, not (is_auto or numbers), f"expected {form}, one number per class, or numbers by name"
        elif key == "LOSS.CLASS_WEIGHTS" or len(weights) > 1:
            is_other = num_classes and len(weights) not in (0, num_classes)
            yield key, is_other, f"expected {counted(num_classes, 'number')}, MODEL.NUM_CLASSES"
        yield key, numbers and (min(numbers) < 0 or max(numbers) == 0), "expected 0 or more, not all 0"


def _other_weights(cfg: Config) -> Iterator[Conflict]:
    name = cfg.TASK.NAME
    teacher = cfg.DISTILL.TEACHER
    lacks = teacher and not (cfg.DISTILL.WEIGHTS or is_published(teacher) or names_backbone(teacher))
    yield "DISTILL.WEIGHTS", lacks, "expected the file of the teacher's weights, or pretrained"
    lacks = cfg.DISTILL.WEIGHTS and not cfg.DISTILL.TEACHER
    yield "DISTILL.WEIGHTS", lacks, "expected none without a teacher; fix: set DISTILL.TEACHER to their model"
    lacks = cfg.FINETUNE.HEAD_RESET and not cfg.FINETUNE.WEIGHTS
    yield "FINETUNE.HEAD_RESET", lacks, "expected False without weights; fix: set FINETUNE.WEIGHTS"
    is_unused = cfg.DISTILL.TEACHER and name in BUILT_IN_TASKS and name != "distillation"
    yield "DISTILL.TEACHER", is_unused, f"expected none with TASK.NAME {name}; fix: set TASK.NAME auto"


def _labels(cfg: Config) -> Iterator[Conflict]:
    labels = cfg.TEST.LABELS
    with_labels = f"with TEST.LABELS {labels}"
    is_other = cfg.MODEL.NUM_CLASSES not in (0, IMAGENET_CLASSES)
    yield "MODEL.NUM_CLASSES", is_other, f"expected {IMAGENET_CLASSES} {with_labels}"
    yield "DATA.NAME", cfg.DATA.NAME != "imagefolder", f"expected imagefolder {with_labels}"
    yield "MODEL.DUMMY_INPUT", cfg.MODEL.DUMMY_INPUT, f"expected False {with_labels}"
    is_real = labels == "imagenet_real"
    yield "TEST.METRICS", is_real and {*cfg.TEST.METRICS} - {"top1", "topk"}, f"expected top1 or topk {with_labels}"
    is_task = cfg.TASK.NAME in (AUTO, "classification", "distillation")
    yield "TASK.NAME", is_real and not is_task, f"expected classification {with_labels}; fix: set TASK.NAME auto"


def class_weight_beta(text: str) -> float | None:
    """Return BETA of LOSS.CLASS_WEIGHTS auto:BETA; 1, its limit, for auto; None if the text is neither."""
    word, colon, number = text.partition(":")
    if word != AUTO or not colon:
        return 1.0 if text == AUTO else None
    try:
        return beta if 0 <= (beta := float(number)) < 1 else None
    except ValueError:
        return None
