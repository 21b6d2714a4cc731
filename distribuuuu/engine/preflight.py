"""Checks of paths, data and batch sizes before torch is imported and the process group is created."""

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distribuuuu.checkpoint.weights_files import best_path, find_best
from distribuuuu.config import Config, ConfigError, Problem, check_cfg
from distribuuuu.config.config_node import changed, get_value
from distribuuuu.config.conflicts import find_problems
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.derived import FOLLOWING
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.model_names import find_model_problems, load_names, names_backbone
from distribuuuu.config.options import IMAGENET_CLASSES, OPTIONAL_DECODERS, TEST_SETS
from distribuuuu.config.reader import read_cfg
from distribuuuu.config.registry import OPTIMIZERS, dataset_class, dataset_name
from distribuuuu.config.run_files import CHECKPOINTS, DECISIONS, find_path_problem, url_of
from distribuuuu.data.batch_plan import check_graphs, check_num_images, check_pairs, plan_of
from distribuuuu.launch.detect import detect_launch, list_jobs


def find_run_problems(
    cfg, train: bool, nproc: int | None = None, set_keys_only: bool = False, needs_weights: bool = True
) -> list[Problem]:
    """Return the problems of the paths, the data folders and the batch sizes; takes milliseconds.

    Args:
        nproc: the number of processes; None: that of the launcher.
        set_keys_only: report only options that were set, because the config has other problems: they may be the reason
            why a default does not fit.
        needs_weights: an evaluation needs weights; False: the program gives them.
    """
    problems: list[Problem] = []
    given, cfg = cfg, _with_num_classes(cfg, _count_classes(cfg))
    if cfg is not given:
        known = find_problems(given)
        problems += [problem for problem in find_problems(cfg) if problem not in known]
    found = list(_path_problems(cfg, train, needs_weights))
    if cfg.TEST.DATASET == cfg.TRAIN.DATASET and "TRAIN.DATASET" in dict(found):  # one folder, one problem
        found = [(key, message) for key, message in found if key != "TEST.DATASET"]
    problems += [Problem(key, text, cfg.origins) for key, text in found if key in cfg.origins or not set_keys_only]
    try:
        world_size = nproc or detect_launch().world_size
        if train and cfg.TRAIN.GLOBAL_BATCH_SIZE >= 0 and cfg.TRAIN.BATCH_SIZE > 0:
            plan = plan_of(cfg, world_size)
            check_pairs(cfg, plan)
            check_graphs(cfg, plan)
            has_data = not any(key.endswith((".DATASET", ".SPLIT")) for key, _ in found)
            if has_data and (num_images := dataset_class(cfg).count_images(cfg)):
                check_num_images(cfg, plan, num_images)
    except ConfigError as error:
        problems += [problem.located(cfg.origins) for problem in error.problems]
    return problems


def resolve_num_classes(cfg: Config) -> Config:
    """Return the config with the number of classes of the training data if MODEL.NUM_CLASSES is 0; else itself.

    The data set is opened only if its class count does not tell.

    Raises:
        ConfigError: the data set has no fixed number of classes, or the number contradicts the config.
    """
    if cfg.MODEL.NUM_CLASSES:
        return cfg
    num_classes = _count_classes(cfg) or len(dataset_class(cfg).from_cfg(cfg, train=True).classes)
    if not num_classes:
        problem = "got 0, the number of classes of the data, which names none; fix: set the number of classes"
        raise ConfigError(Problem("MODEL.NUM_CLASSES", problem), cfg.origins)
    resolved = _with_num_classes(cfg, num_classes)
    check_cfg(resolved)
    return resolved


def resolve_cfg(cfg: Config, weights: str = "", trains: bool = False) -> Config:
    """Return the config of a run: with the number of classes of the data and the preprocessing of its weights.

    `weights` are those of an evaluation; empty: those that a training starts with, see models/preprocessing.py. If it
    `trains`, TRAIN.AMP and MODEL.CHANNELS_LAST auto are measured.

    Raises:
        ConfigError: as `resolve_num_classes` and `check_model`, or the optimizer or the weights are wrong.
    """
    from distribuuuu.models import check_model

    if not weights and url_of(cfg.OUT_DIR):  # the preprocessing of a run that is resumed is that of its config.yaml
        importlib.import_module("distribuuuu.mirror.sync").restore(cfg.OUT_DIR)
    cfg = resolve_num_classes(cfg)
    if names_backbone(cfg.MODEL.ARCH):
        from distribuuuu.models.pretrained import resolve_arch

        cfg = resolve_arch(cfg, is_resumed=not weights and _may_resume(cfg))
    initial = cfg.MODEL.WEIGHTS or cfg.FINETUNE.WEIGHTS or cfg.MODEL.PRETRAINED or cfg.DISTILL.TEACHER
    jobs = None
    if trains and not cfg.TRAIN.AUTO_RESUME:
        jobs = importlib.import_module("distribuuuu.engine.feature_preflight").gather_jobs(cfg)
    uses_own = Path(weights).parent == Path(cfg.OUT_DIR) if weights else not initial
    if (weights or initial or _may_resume(cfg)) and not (uses_own and _has_stored_preprocessing(cfg)):
        from distribuuuu.models import preprocessing

        cfg = preprocessing.resolve_preprocessing(cfg, weights, jobs)
    check_model(cfg)
    if cfg.OPTIM.KWARGS and not weights:
        from distribuuuu.optim.named_optimizers import take_trial_step

        take_trial_step(cfg)
    if AUTO in (cfg.TRAIN.AMP, cfg.MODEL.CHANNELS_LAST):
        from distribuuuu.engine.fast_mode import resolve_mode

        cfg = resolve_mode(cfg, trains)
    return cfg


def _may_resume(cfg: Config) -> bool:
    """Tell whether a training in OUT_DIR may continue from a checkpoint; finding its job in the files takes torch."""
    is_continued = cfg.TRAIN.AUTO_RESUME or list_jobs(only_restarted=True)
    return bool(is_continued) and any(Path(cfg.OUT_DIR, CHECKPOINTS).glob("*.pth.tar"))


def _has_stored_preprocessing(cfg: Config) -> bool:
    """Tell whether a config has the model and the preprocessing of the run in its OUT_DIR, and no license to name."""
    trained, problems = read_cfg(FoundConfig(Path(cfg.OUT_DIR, cfg.CFG_DEST)))
    keys = ("MODEL.ARCH", "MODEL.KWARGS", *FOLLOWING)
    is_same = all(get_value(trained, key) == get_value(cfg, key) for key in keys)
    return is_same and not (problems or cfg.MODEL.LICENSE)


def _with_num_classes(cfg: Config, num_classes: int) -> Config:
    """Return a frozen copy with this number of classes; the config itself for 0."""
    return changed(cfg, {"MODEL.NUM_CLASSES": num_classes}, "the data") if num_classes else cfg


def _count_classes(cfg: Config) -> int:
    """Return the number of classes of the data if MODEL.NUM_CLASSES is 0; 0 if it is set or the data must be read."""
    if cfg.MODEL.NUM_CLASSES:
        return 0
    has_none = dataset_name(cfg) == "dummy" or cfg.TEST.LABELS in TEST_SETS
    return IMAGENET_CLASSES if has_none else dataset_class(cfg).count_classes(cfg)


def _path_problems(cfg, train: bool, needs_weights: bool) -> Iterator[tuple[str, str]]:
    family = dataset_class(cfg)
    found = list(family.find_problems(cfg, train=True)) if train else []
    yield from dict.fromkeys([*found, *family.find_problems(cfg, train=False)])
    weights = cfg.MODEL.WEIGHTS or cfg.FINETUNE.WEIGHTS or cfg.DISTILL.TEACHER or cfg.DISTILL.WEIGHTS
    features = (weights, cfg.LOG.TRACKERS, cfg.DATA.DECODER in OPTIONAL_DECODERS, cfg.MODEL.COMPILE != "none")
    if any(features) or names_backbone(cfg.MODEL.ARCH):
        from distribuuuu.engine.feature_preflight import find_feature_problems

        yield from find_feature_problems(cfg, train, is_start=train and not _may_resume(cfg))
    is_named = cfg.MODEL.WEIGHTS or cfg.MODEL.PRETRAINED or names_backbone(cfg.MODEL.ARCH)
    if not train and needs_weights and not (is_named or find_best(cfg.OUT_DIR, cfg.EMA.HALF_LIFE > 0)):
        remedy = "set it to the file to evaluate, or OUT_DIR to that of a run"
        yield "MODEL.WEIGHTS", f"is not set, and {best_path(cfg.OUT_DIR)} does not exist; fix: {remedy}"
    # With torch imported, names are checked without the cached tables, later; plug-ins with models import it.
    if "torch" not in sys.modules:
        yield from _name_problems(cfg, train)
    if not find_path_problem(cfg.OUT_DIR):  # else it was reported with the config
        yield from _out_dir_problems(Path(cfg.OUT_DIR), train)


def _name_problems(cfg, train: bool) -> Iterator[tuple[str, str]]:
    """Yield unknown names of models and optimizers, if an earlier process has cached the known ones."""
    yield from find_model_problems("MODEL.ARCH", cfg.MODEL.ARCH, "MODEL.KWARGS", cfg.MODEL.KWARGS)
    name, known = cfg.OPTIM.NAME, load_names("optimizers") if train else []
    if known and name not in OPTIMIZERS and name.lower() not in ("sgd", *known):
        yield "OPTIM.NAME", f"unknown optimizer {name!r}{did_you_mean(name, [*known, *OPTIMIZERS.names()])}"


def _out_dir_problems(out_dir: Path, train: bool) -> Iterator[tuple[str, str]]:
    """Yield a problem if a run cannot write to OUT_DIR or, in training, to its checkpoint folder, or must not."""
    if train and os.path.lexists(out_dir / DECISIONS):
        fix = f"name another folder (a fine-tuning is repeated by --cfg {out_dir}/finetune.yaml OUT_DIR FOLDER)"
        yield "OUT_DIR", f"{out_dir} holds the tested model of distribuuuu finetune; fix: {fix}"
    for path in (out_dir, out_dir / CHECKPOINTS) if train else (out_dir,):
        existing = next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))
        if not existing.is_dir():
            yield "OUT_DIR", f"{existing} is a file, not a folder"
            return
        try:
            tempfile.TemporaryFile(dir=existing).close()  # os.access() ignores read-only file systems and quotas
        except OSError as error:
            yield "OUT_DIR", f"{existing} cannot be written to: {error.strerror}"
            return
