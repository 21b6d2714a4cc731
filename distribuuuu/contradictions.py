"""Values that are each allowed but do not go together: what a config contradicts itself in."""

import os
from collections.abc import Iterator

from yacs.config import CfgNode


def find_contradictions(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for every contradiction; each names the remedy."""
    for find in (_in_images, _in_schedule, _in_loss, _in_distillation, _in_paths):
        yield from find(cfg)


def _in_images(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    data = cfg.DATA
    crop_size = cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE
    if crop_size > cfg.TEST.IM_SIZE:
        what = "TEST.CROP_SIZE" if cfg.TEST.CROP_SIZE else "TRAIN.IM_SIZE, the crop,"
        yield "TEST.IM_SIZE", f"{cfg.TEST.IM_SIZE} is smaller than {what} {crop_size}; set it to {crop_size} or more"
    if len(data.CROP_SCALE) != 2 or not 0 < data.CROP_SCALE[0] <= data.CROP_SCALE[-1] <= 1:
        yield "DATA.CROP_SCALE", f"{list(data.CROP_SCALE)} must be two numbers, 0 < least <= greatest <= 1"
    for key in ("MEAN", "STD"):
        if len(data[key]) not in (0, 3):
            yield f"DATA.{key}", f"{list(data[key])} must have three numbers, one a channel, or be empty"
    if any(value <= 0 for value in data.STD):
        yield "DATA.STD", f"{list(data.STD)} must be above 0"


def _in_schedule(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    optim = cfg.OPTIM
    if optim.NESTEROV and (optim.MOMENTUM == 0 or optim.DAMPENING != 0):
        yield "OPTIM.NESTEROV", "needs OPTIM.MOMENTUM above 0 and OPTIM.DAMPENING 0; or set OPTIM.NESTEROV False"
    if optim.LR_POLICY == "steps" and not optim.STEPS:
        yield "OPTIM.STEPS", "is empty, but OPTIM.LR_POLICY is steps; give the epochs, e.g. [30, 60, 90]"
    if list(optim.STEPS) != sorted(set(optim.STEPS)) or any(step < 0 for step in optim.STEPS):
        yield "OPTIM.STEPS", f"{list(optim.STEPS)} must ascend from 0 or more, each epoch once"
    if optim.LR_POLICY == "exp" and optim.MIN_LR <= 0:
        yield "OPTIM.MIN_LR", "must be above 0 when OPTIM.LR_POLICY is exp, e.g. 0.001"


def _in_loss(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    loss, num_classes = cfg.LOSS, cfg.MODEL.NUM_CLASSES
    if len(loss.CLASS_WEIGHTS) not in (0, num_classes):
        message = f"has {len(loss.CLASS_WEIGHTS)} numbers, but MODEL.NUM_CLASSES is {num_classes}; give one a class"
        yield "LOSS.CLASS_WEIGHTS", message
    if loss.CLASS_WEIGHTS and (min(loss.CLASS_WEIGHTS) < 0 or max(loss.CLASS_WEIGHTS) == 0):
        yield "LOSS.CLASS_WEIGHTS", f"must be 0 or more, and not all 0; the least is {min(loss.CLASS_WEIGHTS)}"
    # A threshold that the target of every class, or of none, is above would leave nothing to learn.
    least = loss.LABEL_SMOOTHING / max(1, num_classes)
    most = 1 - loss.LABEL_SMOOTHING + least
    if loss.NAME == "bce" and loss.BCE_TARGET_THRESHOLD and not least < loss.BCE_TARGET_THRESHOLD < most:
        message = f"{loss.BCE_TARGET_THRESHOLD:g} must lie between the targets, {least:g} and {most:g}, of one image"
        yield "LOSS.BCE_TARGET_THRESHOLD", f"{message} with LOSS.LABEL_SMOOTHING {loss.LABEL_SMOOTHING:g}; or be 0"


def _in_distillation(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    distill = cfg.DISTILL
    if distill.TEACHER and not distill.WEIGHTS:
        yield "DISTILL.WEIGHTS", "is not set: name the teacher's file, or `pretrained`"
    if distill.WEIGHTS and not distill.TEACHER:
        yield "DISTILL.TEACHER", "is not set: name the model that DISTILL.WEIGHTS belong to"


def _in_paths(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    if not cfg.OUT_DIR:
        yield "OUT_DIR", "is empty; name a folder"
    if os.path.basename(cfg.CFG_DEST) != cfg.CFG_DEST or cfg.CFG_DEST in ("", ".", ".."):
        yield "CFG_DEST", f"{cfg.CFG_DEST!r} must be a plain file name; it goes into OUT_DIR"
