"""Loading of trained models: a run's folder, a checkpoint, an exported folder, or the name of published weights.

An exported folder holds `model.safetensors` and `config.json`. The latter has the format of timm on the Hugging Face
Hub, or an entry `distribuuuu` with the entries of best.pth.tar except the tensors: `classes`, `config` and `weights`.
"""

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distribuuuu.checkpoint.io import CheckpointError, is_list_of, read_checkpoint
from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.checkpoint.weights_files import RAW, best_path, find_best, kind_of
from distribuuuu.config import Config, ConfigError, Problem, get_cfg, load_cfg
from distribuuuu.config.config_node import changed, get_value
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.derived import height_and_width
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.options import DECLARED, OPEN_SECTIONS, OPTIONS
from distribuuuu.config.reader import COMMAND_LINE, CfgFiles, read_cfg, split_key
from distribuuuu.config.registry import dataset_class
from distribuuuu.config.run_files import BEST_NAMES, CHECKPOINTS, RUN_KINDS
from distribuuuu.data.build_transform import statistics_of
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.loader import build_images
from distribuuuu.files.untrusted import MAX_JSON, InvalidFileError, parse_json, read_regular, untrusted
from distribuuuu.inference.calibration import read_calibration
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.inference.locate_run import EXPORT_CONFIG, locate_run
from distribuuuu.models.preprocessing import follow
from distribuuuu.records.read_results import check_results

logger = logging.getLogger(__name__)

# Names of registered entries that a prediction does not need.
_ONLY_TRAINING = ("LOSS.NAME", "AUG.OPERATIONS", "OPTIM.LR_POLICY", "TRAIN.METRICS", "TEST.METRICS")
_CONFIG = get_cfg().CFG_DEST
# Images of a pass that is timed.
_NUM_TIMED = 16


def load_run(
    run: str | os.PathLike,
    cfg_file: CfgFiles = None,
    overrides: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> LoadedRun:
    """Return a trained model with its classes, its evaluation transform, its config and its results.

    Nothing in the files is executed: checkpoints are read as plain data.

    Args:
        run: the OUT_DIR of a run (its best weights; the averaged ones if it has some), a checkpoint, an exported
            folder, or the name of published weights, e.g. `timm/NAME`, see models/pretrained.py.
        cfg_file: the config, for weights without one, such as the state dicts of the 2021 distribuuuu.
        overrides: KEY VALUE pairs that change the config, e.g. ("TEST.IM_SIZE", "288").
        device: where to put the model; None: a GPU if there is one.

    Raises:
        ConfigError: it is no run, is damaged, or lacks the config, the class names, or the mean and the deviation.
    """
    given_device = None if device is None else torch.device(device)
    return replace(find_run(run, cfg_file, overrides), given_device=given_device).build()


def find_run(run: str | os.PathLike, cfg_file: CfgFiles = None, overrides: Sequence[str] = ()) -> LoadedRun:
    """Read the files of a trained model without building it; arguments and errors as for `load_run`."""
    files, cfg = locate_run(run), load_cfg(cfg_file, overrides) if cfg_file else None
    try:
        if files.weights and files.is_export:
            return _open_export(files.weights, cfg, overrides)
        if files.weights:
            return _open_checkpoint(files.weights, None, cfg, overrides)
        if files.folder:
            return _open_out_dir(files.folder, cfg, overrides)
    except (InvalidFileError, OSError) as error:
        raise ConfigError(f"RUN: {error}; expected {RUN_KINDS}") from error
    if cfg:
        raise ConfigError(f"--cfg: {files.name} brings its own config; fix: remove --cfg, and set options as KEY VALUE")
    return _open_published(files.name, overrides)


# ------------------------------------------------------------------------------------ kinds of runs


def _open_out_dir(folder: Path, cfg: Config | None, overrides: Sequence[str]) -> LoadedRun:
    """Return the best weights of a run with the config in its folder, with which an evaluation would load them."""
    if cfg is None and (own := folder / _CONFIG).is_file():
        cfg = load_cfg(FoundConfig(own), overrides)
    best = find_best(folder, not cfg or cfg.EMA.HALF_LIFE > 0)
    if best is None:
        has = first_few(sorted(entry.name for entry in folder.iterdir())) or "nothing"
        kept = sorted((folder / CHECKPOINTS).glob("*.pth.tar"))
        fix = f"; fix: name a checkpoint, e.g. {kept[-1]}" if kept else f"; expected {RUN_KINDS}"
        raise ConfigError(f"RUN: {folder} holds no {best_path(folder).name}, but {has}{fix}")
    return _open_checkpoint(best, folder, cfg, overrides)


def _open_checkpoint(path: Path, folder: Path | None, cfg: Config | None, overrides: Sequence[str]) -> LoadedRun:
    """Return the weights of a file; of a training checkpoint, those that were trained, not their moving average."""
    try:
        content = read_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"RUN: {error}") from error
    if folder is None and BEST_NAMES.fullmatch(path.name) and (path.parent / _CONFIG).is_file():
        folder = path.parent
    return _assemble(str(path), {"weights": kind_of(path), **content}, folder, cfg, overrides)


def _open_export(weights: Path, cfg: Config | None, overrides: Sequence[str]) -> LoadedRun:
    """Return an exported folder: ours, or one in the format of timm."""
    folder, path = weights.parent, weights.with_name(EXPORT_CONFIG)
    with untrusted(path, "config of a model"):
        entries = parse_json(read_regular(path, MAX_JSON)).get("distribuuuu")
    if entries is None:
        entries = _entries_of(f"local-dir:{folder}")
        if not entries["has_classifier"] and cfg is None:
            return _open_published(f"local-dir:{folder}", overrides)
    with untrusted(path, "config of a model"):
        content = {"weights": RAW, **entries, "state_dict": read_checkpoint(weights)["state_dict"]}
        results = entries.get("results")
        if results is not None:
            check_results(results)
    return replace(_assemble(str(weights), content, folder, cfg, overrides), exported_results=results)


def _open_published(name: str, overrides: Sequence[str]) -> LoadedRun:
    """Return weights by name, see models/pretrained.py."""
    entries = _entries_of(name)
    run = _assemble(name, {"weights": "published", **entries}, None, None, overrides)
    is_own_head = len(run.classes) == entries["config"]["MODEL.NUM_CLASSES"]
    return replace(run, has_classifier=run.has_classifier and is_own_head)


def _entries_of(name: str) -> dict[str, Any]:
    """Return the entries `classes`, `config` and `has_classifier` of published weights."""
    from distribuuuu.models.pretrained import resolve_backbone

    try:
        backbone = resolve_backbone(name)
    except ConfigError as error:
        raise ConfigError(f"RUN: {error}") from error
    if backbone.problem:
        raise ConfigError(f"RUN: {backbone.source}: {backbone.problem}")
    num_classes = backbone.num_classes or 0
    options = {**backbone.options, "MODEL.ARCH": backbone.arch, "MODEL.NUM_CLASSES": num_classes}
    return {"classes": backbone.labels, "config": options, "has_classifier": num_classes > 0}


# --------------------------------------------------------------------------------- config and classes


def _assemble(
    source: str, content: dict[str, Any], folder: Path | None, cfg: Config | None, overrides: Sequence[str]
) -> LoadedRun:
    """Return the model of the entries of a checkpoint; a given config takes precedence over the config in them."""
    stored = content.get("config")
    stored = stored if isinstance(stored, dict) else {}
    if cfg is None and stored:
        cfg = config_of(stored, source, overrides)
    if cfg is None:
        what = "holds weights, but not the config that they were trained with"
        raise CheckpointError(f"RUN: {source}: {what}; fix: name it with --cfg FILE")
    cfg = follow(cfg, source, stored)
    for level, note in cfg.notes:
        logger.log(level, "%s", note)
    classes, has_statistics = content.get("classes"), cfg.DATA.MEAN and cfg.DATA.STD
    data = dataset_class(cfg)
    is_packed = cfg.DATA.NAME == "packed"  # it keeps the statistics in its files
    if not classes or (is_packed and not has_statistics):
        try:
            data = open_data(cfg)
        except (ConfigError, OSError) as error:
            missing = "does not hold DATA.MEAN" if classes else "holds no class names"
            what = f"{missing}, and the data of its config cannot be read ({error})"
            fix = "set TRAIN.DATASET and TEST.DATASET to the data that it was trained on (--set KEY VALUE)"
            raise CheckpointError(f"RUN: {source}: {what}; fix: {fix}") from error
    classes = classes or data.classes
    if not is_list_of(classes, str):
        raise CheckpointError(f"RUN: {source}: invalid: `classes`: expected a list of texts")
    if cfg.MODEL.NUM_CLASSES not in (0, len(classes)):
        named = f"names {counted(len(classes), 'class')}, but MODEL.NUM_CLASSES is {cfg.MODEL.NUM_CLASSES}"
        raise CheckpointError(f"RUN: {source}: {named}")
    mean, std = map(tuple, statistics_of(cfg, data))
    own = {"MODEL.WEIGHTS": None, "OUT_DIR": str(folder or Path(source).parent)}
    cfg = changed(cfg, {"MODEL.NUM_CLASSES": len(classes), "DATA.MEAN": mean, "DATA.STD": std, **own})
    kind, tensors = str(content.get("weights")), content.get("state_dict")
    flags = content.get("has_classifier") is not False, content.get("deployed") is True
    run = LoadedRun(source, kind, cfg, tuple(classes), tensors, folder, None, content.get("task"), *flags)
    if AUTO in (cfg.TRAIN.AMP, cfg.MODEL.CHANNELS_LAST):
        from distribuuuu.engine.fast_mode import with_mode

        run = replace(run, cfg=with_mode(cfg, find_fast_mode(run)))
    return replace(run, calibration=read_calibration(folder, tensors))


def find_fast_mode(run: LoadedRun) -> dict[str, Any]:
    """Return the fastest mode of those that the config of a run leaves open, see engine/fast_mode.py."""
    from distribuuuu.engine.fast_mode import choose_mode, list_modes, measure_modes, recall

    modes = list_modes(run.cfg)
    plain = replace(run, cfg=changed(run.cfg, modes[0]))
    size = _NUM_TIMED, run.cfg.DATA.CHANNELS, *height_and_width(plain.transform.crop.size)
    images = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(plain.device)
    weights = hash_tensors(run.state_dict) if run.state_dict else run.source
    what = f"passes of {_NUM_TIMED} images with {weights}"
    mode = recall(run.cfg, what, lambda: choose_mode(measure_modes(plain.model, images, modes)))
    (now,) = measure_modes(plain.model, images, [{key: mode[key] for key in modes[0]}])
    return {**mode, "image_s": now.seconds}  # the load of the machine varies; the fastest mode hardly does


def open_data(cfg: Config, train: bool = False) -> ImageDataset:
    """Return a set of images of a config, which may be of others: nothing is written to the folders that it names.

    The index of a folder or an archive is kept in the user's cache folder, and nothing is downloaded, unless an option
    of the command line says so.
    """
    own = untrusted_data(cfg)
    family = dataset_class(own)
    own = changed(own, {"MODEL.NUM_CLASSES": cfg.MODEL.NUM_CLASSES or family.count_classes(own)})
    return build_images(own, train, family)


def untrusted_data(cfg: Config) -> Config:
    """Return a config of others, whose data is opened with the user's own cache folder and without a download."""
    defaults = {"DATA.CACHE_DIR": "", "DATA.DOWNLOAD": False}
    return changed(cfg, {key: value for key, value in defaults.items() if cfg.origins.get(key) != COMMAND_LINE})


def _is_unknown(key: str, value: Any) -> bool:
    """Tell whether the value of an option has a name that is not registered."""
    registry, names = OPTIONS[key].names, value if isinstance(value, (list, tuple)) else [value]
    return registry is not None and any(isinstance(name, str) and name not in registry for name in names)


def config_of(options: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> Config:
    """Return the config of the options that a checkpoint stores, changed by KEY VALUE pairs.

    Options of other versions of this package are left out, with a warning. Plug-ins are too, as a file imports no code;
    and, unless `overrides` name them, entries that only a training needs and that this process does not know.
    """
    tree, unknown, plugins = get_cfg(), [], options.get("PLUGINS")
    unneeded = [key for key in _ONLY_TRAINING if "PLUGINS" not in overrides[::2] and _is_unknown(key, options.get(key))]
    for key, value in options.items():
        section, name = split_key(str(key))
        if key in ("PLUGINS", *unneeded) or (section == "LOSS.KWARGS" and "LOSS.NAME" in unneeded):
            continue
        if section in OPEN_SECTIONS or (key in OPTIONS and not OPTIONS[key].is_open):
            (get_value(tree, section) if section else tree)[name] = value
            tree.origins[key] = source
        elif key not in DECLARED:  # those that no longer exist are of trainings
            unknown.append(str(key))
    if unknown:
        logger.warning("%s: options of another version are ignored: %s", source, first_few(unknown))
    cfg, problems = read_cfg(tree, overrides)
    if problems and plugins and not cfg.PLUGINS:
        named = ",".join(map(str, plugins)) if isinstance(plugins, (list, tuple)) else str(plugins)
        message = f"{source} was trained with {named}, which is code that no file of weights may import"
        problems.append(Problem("PLUGINS", f"{message}; fix: if you trust it, set PLUGINS {shlex.quote(named)}"))
    if problems:
        raise ConfigError(problems)
    return cfg
