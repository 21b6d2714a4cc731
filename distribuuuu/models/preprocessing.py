"""Preprocessing that weights were trained with: unset options follow it, and set ones that differ are reported."""

import logging
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.checkpoint.weights_files import find_card
from distribuuuu.config import Config, ConfigError
from distribuuuu.config.config_node import get_value, iter_options
from distribuuuu.config.derived import FOLLOWING, SIZES, STATISTICS
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.model_names import PUBLISHED, is_published
from distribuuuu.config.reader import override, read_cfg
from distribuuuu.config.registry import dataset_class
from distribuuuu.launch.detect import list_jobs

# Parts of names of licenses that forbid commercial use: cc-by-nc, Apple's for research (AMLR), those of SEER and SWAG.
_NON_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial|research|amlr|seer|swag", re.IGNORECASE)


def resolve_preprocessing(cfg: Config, weights: str = "", jobs: Sequence[str] | None = None) -> Config:
    """Return a config that follows the preprocessing of its weights; `cfg.notes` says what does, and what differs.

    `weights` are those of an evaluation, a file or `pretrained`; empty: those that a training starts with. With
    TRAIN.AUTO_RESUME False, it is resumed from a checkpoint of one of the `jobs`; None: of those of this process.
    """
    if cfg.notes:  # it was resolved before
        return cfg
    start = [("MODEL.WEIGHTS", cfg.MODEL.WEIGHTS), ("FINETUNE.WEIGHTS", cfg.FINETUNE.WEIGHTS),
             ("MODEL.PRETRAINED", PUBLISHED if cfg.MODEL.PRETRAINED else "")]  # fmt: skip
    jobs = list_jobs(only_restarted=True) if jobs is None else jobs
    is_resumed = not weights and CheckpointManager(cfg.OUT_DIR).has_any(None if cfg.TRAIN.AUTO_RESUME else jobs)
    key, weights = next((pair for pair in start if pair[1]), ("", "")) if not weights else ("weights", weights)
    if is_resumed and (file := Path(cfg.OUT_DIR) / cfg.CFG_DEST).is_file():
        cfg = _keep(cfg, file)
    elif weights:
        source = f"{key} {cfg.MODEL.ARCH if weights == PUBLISHED else weights}"
        theirs = read_preprocessing(cfg.MODEL.ARCH, weights)
        if weights != PUBLISHED and (is_published(weights) or os.path.isdir(weights) or find_card(weights)):
            cfg = _take_model(cfg, source, theirs)
        cfg = follow(cfg, source, theirs)
    if cfg.DISTILL.TEACHER and key != "weights":
        theirs = read_preprocessing(cfg.DISTILL.TEACHER, cfg.DISTILL.WEIGHTS or PUBLISHED)
        own = {key: _value_of(cfg, key) for key in STATISTICS if key in theirs}
        named = "DISTILL.WEIGHTS" if cfg.DISTILL.WEIGHTS else "DISTILL.TEACHER"
        source = f"{named} {get_value(cfg, named)}"
        _note_differences(cfg, source, theirs, own)
        _note_license(cfg, source, theirs.get("MODEL.LICENSE"))
    return cfg


def _keep(cfg: Config, file: Path) -> Config:
    """Return a config whose options that are not set are those that a run was trained with, from its stored config."""
    trained, problems = read_cfg(FoundConfig(file))
    if problems and not trained.origins:  # nothing of it can be read; an option of another version is no reason
        raise ConfigError(problems)
    cfg = _take_model(cfg, str(file), dict(iter_options(trained)))
    unset = {key: get_value(trained, key) for key in FOLLOWING if key not in cfg.origins}
    kept = {key: value for key, value in unset.items() if value != get_value(cfg, key)}
    if kept:
        cfg = override(cfg, kept, str(file), FOLLOWING)
        shown = ", ".join(f"{key} {_show(value)}" for key, value in kept.items())
        cfg.notes.append((logging.INFO, f"preprocessing of the run that is resumed, {file}: {shown}"))
    return cfg


def _take_model(cfg: Config, source: str, theirs: Mapping[str, Any]) -> Config:
    """Return a config with the architecture of a run or of a folder of weights, unless MODEL.ARCH is set."""
    model = {key: theirs[key] for key in theirs if key.startswith(("MODEL.ARCH", "MODEL.KWARGS."))}
    if "MODEL.ARCH" in cfg.origins or model.get("MODEL.ARCH", cfg.MODEL.ARCH) == cfg.MODEL.ARCH:
        return cfg
    cfg = override(cfg, model, source, ("MODEL.ARCH", "MODEL.KWARGS."))
    cfg.notes.append((logging.INFO, f"model of {source}: {cfg.MODEL.ARCH}"))
    return cfg


def follow(cfg: Config, source: str, theirs: Mapping[str, Any]) -> Config:
    """Return a config whose options that are not set are those of weights, which messages call `source`.

    The options of the weights, `theirs`, may be untrusted; others than `FOLLOWING` are ignored.
    """
    known = {key: theirs[key] for key in FOLLOWING if theirs.get(key) not in (None, "", (), [])}
    has_channels = cfg.DATA.CHANNELS in (1, theirs.get("DATA.CHANNELS", 3))
    if not has_channels or theirs.get("DATA.PIXELS", cfg.DATA.PIXELS) != cfg.DATA.PIXELS:
        known = {key: value for key, value in known.items() if key not in STATISTICS}
    own = {*cfg.origins, *(SIZES if any(key in cfg.origins for key in SIZES) else ())}
    followed = {key: value for key, value in known.items() if key not in own}
    # Whoever sets the size of the evaluation has chosen the sizes.
    ignored = ("DATA.INTERPOLATION", "MODEL.LICENSE", *(SIZES if "TEST.CROP_SIZE" in cfg.origins else ()))
    given = {key: _value_of(cfg, key) for key in known if key in cfg.origins and key not in ignored}
    if followed:
        cfg = override(cfg, followed, source, FOLLOWING)
        shown = ", ".join(f"{key} {_show(get_value(cfg, key))}" for key in followed)
        cfg.notes.append((logging.INFO, f"preprocessing of {source}: {shown}"))
    elif not known:
        text = f"{source}: it is not known how its images were preprocessed; the options of this config are used"
        cfg.notes.append((logging.INFO, text))
    _note_differences(cfg, source, known, given)
    _note_license(cfg, source, cfg.MODEL.LICENSE, is_named="MODEL.LICENSE" in followed)
    return cfg


def _note_license(cfg: Config, source: str, license: object, is_named: bool = False) -> None:
    level, text = describe_license(license)
    if license and not (is_named and level == logging.INFO):
        cfg.notes.append((level, f"{source}: {text}"))


def describe_license(license: object) -> tuple[int, str]:
    """Return a line about the license of weights, and its level: a warning if it forbids commercial use."""
    if isinstance(license, str) and _NON_COMMERCIAL.search(license):
        text = f"the license of the weights, {license}, forbids commercial use, also of what is trained from them"
        return logging.WARNING, text
    return logging.INFO, f"license of the weights: {license or 'unknown'}"


def _value_of(cfg: Config, key: str) -> Any:
    """Return the value of an option; an empty mean or standard deviation is that of the data set."""
    value = get_value(cfg, key)
    if key in STATISTICS and not value:
        return getattr(dataset_class(cfg), key.partition(".")[2].lower())
    return value


def _note_differences(cfg: Config, source: str, theirs: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if different := {key: value for key, value in own.items() if not _is_same(theirs[key], value)}:
        shown = ", ".join(f"{key} {_show(value)}" for key, value in different.items())
        words = " ".join(f"{key} {shlex.quote(_show(theirs[key]))}" for key in different)
        text = f"{source} was trained with other preprocessing than {shown}; to follow it, add: {words}"
        cfg.notes.append((logging.WARNING, text))


def _show(value: Any) -> str:
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if 1 in (len(one), len(other)):  # of gray images, three values are averaged
            one, other = [sum(one) / len(one)], [sum(other) / len(other)]
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, abs_tol=1e-3)
    return one == other


def read_preprocessing(arch: str, weights: str) -> Mapping[str, Any]:
    """Return the options of weights by key, as far as they are known.

    The weights are `pretrained`, a file, or the folder of a run or of a Hub's model.
    """
    from distribuuuu.models.pretrained import resolve_backbone

    try:
        found = resolve_backbone(arch if weights == PUBLISHED else weights)
    except (ConfigError, OSError):
        return {}  # whoever loads the weights reports what is wrong with them
    return {**({"MODEL.ARCH": found.arch} if found.arch else {}), **found.options}
