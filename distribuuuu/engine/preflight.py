"""What can be known to fail before torch is imported or a process group is joined: the check before the start."""

import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from distribuuuu.checkpoint.locate import PUBLISHED, find_weights_file
from distribuuuu.config import Config, ConfigError, Problem, check_cfg
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.model_names import find_model_problems, load_table
from distribuuuu.config.registry import OPTIMIZERS, dataset_class
from distribuuuu.config.rules import find_problems
from distribuuuu.data.batch_plan import check_accumulation, check_num_images, check_pairs, plan_batches
from distribuuuu.launch.detect import detect_launch
from distribuuuu.launch.ports import find_port_problem


def find_run_problems(cfg, train: bool, nproc: int | None = None, set_keys_only: bool = False) -> list[Problem]:
    """Return what is wrong with the paths, the data folders and the arithmetic of the batch; takes milliseconds.

    Args:
        cfg: a loaded config.
        train: check what training needs; else what an evaluation needs.
        nproc: the processes that are to be started; None: as the launcher says.
        set_keys_only: speak only of keys that were set: the config has problems already, and a default that does not
            fit may follow from them.
    """
    problems: list[Problem] = []
    asked = cfg
    cfg = _with_num_classes(asked, _count_classes(asked))
    if cfg is not asked:
        told = find_problems(asked)
        problems += [problem for problem in find_problems(cfg) if problem not in told]
    found = list(_path_problems(cfg, train))
    problems += [
        Problem(key, message, cfg.origins) for key, message in found if key in cfg.origins or not set_keys_only
    ]
    try:
        launch = detect_launch()
        if launch.rank == 0 and launch.address and (problem := find_port_problem(launch.address, launch.port)):
            problems.append(Problem("launcher", problem))
        world_size = nproc or launch.world_size
        if train and cfg.TRAIN.BATCH_SIZE > 0 and cfg.TRAIN.GLOBAL_BATCH_SIZE >= 0:
            plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, world_size)
            check_pairs(cfg, plan)
            check_accumulation(cfg, plan)
            is_data_sound = not any(key.endswith((".DATASET", ".SPLIT")) for key, _ in found)
            if is_data_sound and (num_images := dataset_class(cfg).count_images(cfg, plan.global_batch)):
                check_num_images(cfg, plan, num_images)
    except ConfigError as error:
        problems += [problem.located(cfg.origins) for problem in error.problems]
    return problems


def resolve_num_classes(cfg: Config) -> Config:
    """Return the config with the number of classes of the training data where MODEL.NUM_CLASSES is 0; else itself.

    Where only the images tell, they are read.

    Raises:
        ConfigError: the data has no classes of its own, or their number contradicts the config.
    """
    if cfg.MODEL.NUM_CLASSES:
        return cfg
    num_classes = _count_classes(cfg) or len(dataset_class(cfg).from_cfg(cfg, train=True).classes)
    if not num_classes:
        problem = "0 asks the data, but dummy images have as many classes as it says; set it"
        raise ConfigError(Problem("MODEL.NUM_CLASSES", problem), cfg.origins)
    resolved = _with_num_classes(cfg, num_classes)
    check_cfg(resolved)
    return resolved


def _with_num_classes(cfg: Config, num_classes: int) -> Config:
    """Return a frozen copy with the number of classes that the data has; the config itself for 0."""
    if not num_classes:
        return cfg
    resolved = cfg.clone()
    resolved.defrost()
    resolved.MODEL.NUM_CLASSES = num_classes
    resolved.origins["MODEL.NUM_CLASSES"] = "the data"
    resolved.freeze()
    return resolved


def _count_classes(cfg: Config) -> int:
    """Return the number of classes of the data if the config leaves it to the data and no image tells it, else 0."""
    return 0 if cfg.MODEL.NUM_CLASSES else dataset_class(cfg).count_classes(cfg)


def _path_problems(cfg, train: bool) -> Iterator[tuple[str, str]]:
    family = dataset_class(cfg)
    found = list(family.find_problems(cfg, train=True)) if train else []
    yield from dict.fromkeys([*found, *family.find_problems(cfg, train=False)])
    if cfg.DATA.DECODER == "simplejpeg" and not find_spec("simplejpeg"):
        yield "DATA.DECODER", "the package simplejpeg is not installed: pip install simplejpeg"
    teacher = "" if cfg.DISTILL.WEIGHTS == "pretrained" else cfg.DISTILL.WEIGHTS
    for key, path in (("MODEL.WEIGHTS", cfg.MODEL.WEIGHTS), ("DISTILL.WEIGHTS", teacher)):
        if path and not Path(path).is_file():
            what = "not a file" if Path(path).exists() else "no such file"
            yield key, f"{what}: {path}"
    if train:
        yield from _finetune_problems(cfg)
    else:
        yield from _weights_problems(cfg)
    if "torch" not in sys.modules:  # else the tables themselves answer at once, also for what was registered since
        yield from _name_problems(cfg, train)
    yield from _out_dir_problems(Path(cfg.OUT_DIR), train)


def _weights_problems(cfg) -> Iterator[tuple[str, str]]:
    """Yield that an evaluation has no weights."""
    best, averaged = (Path(cfg.OUT_DIR) / name for name in ("best.pth.tar", "best_ema.pth.tar"))
    has_best = best.exists() or (cfg.EMA.HALF_LIFE and averaged.exists())
    if not (cfg.MODEL.WEIGHTS or cfg.MODEL.PRETRAINED or has_best):
        yield "MODEL.WEIGHTS", f"is not set, and {best} is not there; name a file to evaluate, or the OUT_DIR of a run"


def _name_problems(cfg, train: bool) -> Iterator[tuple[str, str]]:
    """Yield unknown names of models and optimizers, where an earlier process has kept the known ones."""
    yield from find_model_problems("MODEL.ARCH", cfg.MODEL.ARCH, "MODEL.KWARGS", cfg.MODEL.KWARGS)
    if not train:
        return
    if cfg.DISTILL.TEACHER:
        yield from find_model_problems("DISTILL.TEACHER", cfg.DISTILL.TEACHER, "DISTILL.KWARGS", cfg.DISTILL.KWARGS)
    name, table = cfg.OPTIM.NAME, load_table("optimizers")
    if table and name not in OPTIMIZERS and name.lower() not in ("sgd", *table.names):
        yield "OPTIM.NAME", f"unknown optimizer {name!r}{did_you_mean(name, [*table.names, *OPTIMIZERS.names()])}"


def _finetune_problems(cfg) -> Iterator[tuple[str, str]]:
    weights = cfg.FINETUNE.WEIGHTS
    if not weights:
        return
    for key in ("MODEL.WEIGHTS", "MODEL.PRETRAINED"):
        section, name = key.split(".")
        if cfg[section][name]:
            off = "null" if name == "WEIGHTS" else "False"
            yield "FINETUNE.WEIGHTS", f"{key} says as well what to start from; set {key} {off}, or leave this one empty"
    if weights != PUBLISHED:
        try:
            find_weights_file(weights)
        except (ConfigError, OSError) as error:
            yield "FINETUNE.WEIGHTS", str(error)


def _out_dir_problems(out_dir: Path, train: bool) -> Iterator[tuple[str, str]]:
    """Yield what keeps a run from writing: training also writes to the folder of its checkpoints."""
    for path in (out_dir, out_dir / "checkpoints") if train else (out_dir,):
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            yield "OUT_DIR", f"{existing} is a file, not a folder"
            return
        try:
            tempfile.TemporaryFile(dir=existing).close()  # os.access() knows neither read-only file systems nor quotas
        except OSError as error:
            yield "OUT_DIR", f"{existing} cannot be written to: {error.strerror}"
            return
