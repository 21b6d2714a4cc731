"""Unknown options and commands: another framework's name, or similar names."""

import shlex
from collections.abc import Collection, Sequence

from distribuuuu.config.errors import near_matches
from distribuuuu.config.options import OPEN_SECTIONS, OPTIONS
from distribuuuu.hints.words import normalized

# Flags and keys of other frameworks whose name is no part of an option -> equivalent arguments. {}: the value of the
# flag; the others have none.
EQUIVALENTS = {
    "amp mixed-precision use-amp": "TRAIN.AMP bf16",
    "a arch model net model-name type": "MODEL.ARCH {}",
    "accumulate-grad-batches accum-iter accum-steps gradient-accumulation-steps": "TRAIN.GLOBAL_BATCH_SIZE IMAGES",
    "b bs batch batch-size train-batch-size per-device-train-batch-size": "TRAIN.BATCH_SIZE {}",
    "c config config-file conf": "--cfg {}",
    "clip clip-grad clip-grad-norm max-grad-norm": "OPTIM.CLIP_NORM {}",
    "d data data-dir data-path data-root dataset-path path root": "TRAIN.DATASET {}",
    "drop-path drop-path-rate": "MODEL.KWARGS.drop_path_rate {}",
    "epochs max-epochs max-epoch num-epochs": "OPTIM.MAX_EPOCH {}",
    "gpus gpu nproc-per-node nproc_per_node num-gpus devices world-size": "--nproc {}",
    "img-size input-size image-size imgsz train-crop-size": "TRAIN.IM_SIZE {}",
    "init-checkpoint initial-checkpoint weights checkpoint ckpt": "MODEL.WEIGHTS {}",
    "j workers num-workers": "TRAIN.WORKERS {}",
    "lr learning-rate base-lr blr": "OPTIM.BASE_LR {}",
    "model-ema ema": "EMA.HALF_LIFE IMAGES",
    "o out output output-dir out-dir save-dir log-dir": "OUT_DIR {}",
    "opt optimizer optim": "OPTIM.NAME {}",
    "reprob random-erase": "AUG.ERASING {}",
    "resume": "TRAIN.AUTO_RESUME True (from OUT_DIR) or MODEL.WEIGHTS {}",
    "sched scheduler lr-scheduler": "OPTIM.LR_POLICY {}",
    "seed": "RNG_SEED {}",
    "smoothing label-smoothing": "LOSS.LABEL_SMOOTHING {}",
    "eval-freq eval-interval eval-every val-interval check-val-every-n-epoch": "TRAIN.EVAL_PERIOD {}",
    "early-stop early-stopping earlystopping patience": "TRAIN.PATIENCE {}",
    "e eval evaluate test test-only validate": "distribuuuu test",
    "val-batch-size test-batch-size validation-batch-size": "TEST.BATCH_SIZE {}",
    "warmup-epochs lr-warmup-epochs warmup": "OPTIM.WARMUP_EPOCHS {}",
    "wd weight-decay": "OPTIM.WEIGHT_DECAY {}",
    "wandb use-wandb log-wandb wandb-project": "LOG.TRACKERS [wandb]",
    "mlflow": "LOG.TRACKERS [mlflow]",
    "max-iter max-iters max-steps num-steps iterations num-iterations": "OPTIM.MAX_EPOCH EPOCHS",
}
BY_NAME = {name: words for names, words in EQUIVALENTS.items() for name in names.split()}


def describe_unknown_command(name: str, commands: Collection[str], prog: str) -> str:
    """Return the message for a first argument that is no command."""
    if name.startswith("-"):
        return f"got {name} instead of a command; did you mean {prog} train {name} ...?"
    stem = name.lower().replace("-", "_").partition("_")[0]  # train_net, pack_dataset
    meant = [stem] if stem in commands else near_matches(name, commands)
    hint = f"did you mean {', '.join(meant)}?" if meant else f"expected one of {', '.join(commands)}"
    return f"no such command: {name}; {hint}"


def describe_unknown_flag(flag: str, value: str, known: Sequence[str]) -> str:
    """Return what an unknown flag and its value may mean; `known` are the flags of the command."""
    name, value = normalized(flag), shlex.quote(value) if value else "VALUE"
    meant = {normalized(key.rpartition(".")[2]): f"{key} {{}}" for key in reversed(OPTIONS)}
    meant |= BY_NAME | {normalized(own): own for own in known if own.startswith("--")}
    near = [name] if name in meant else near_matches(name, [*meant], cutoff=0.66)
    if near:
        return f"did you mean {meant[near[0]].format(value)}?"
    return "options are KEY VALUE arguments, which distribuuuu train --help-config lists"


def suggest_keys(key: str, known: list[str]) -> list[str]:
    """Return the options that an unknown key may mean: of the same name, an equivalent, or similar ones."""
    section, _, name = key.lower().rpartition(".")
    if same := [other for other in known if other.rpartition(".")[2].lower() == name]:
        return same
    if len(name) > 1 and normalized(name) in BY_NAME:
        return [BY_NAME[normalized(name)].format("").strip()]
    names = {other.rpartition(".")[2] for other in known}
    near = near_matches(name, names, cutoff=0.75)
    similar = [other for match in near for other in known if other.rpartition(".")[2] == match]
    similar.sort(key=lambda other: other.lower().rpartition(".")[0] != section)
    return similar[:3] or near_matches(key, known, cutoff=0.85)


def describe_unknown_key(key: str) -> str:
    """Return the message for a key that is no option."""
    known = [other for other in OPTIONS if other not in OPEN_SECTIONS]
    if key in OPEN_SECTIONS:
        return f"is a section, not an option; set {key}.NAME, or {{NAME: VALUE}}"
    if names := [other.removeprefix(f"{key}.") for other in known if other.startswith(f"{key}.")]:
        return f"is a section, not an option; it contains {', '.join(names)}"
    near = suggest_keys(key, known)
    return "no such key" + (f"; did you mean {', '.join(near)}?" if near else "; --help-config lists all")
