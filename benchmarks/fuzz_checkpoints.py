"""Fuzzer of the checkpoint reader.

Random damage is done to checkpoints, safetensors and files of distribuuuu 2021.

A damaged file must have the same content as before or be refused with CheckpointError. Files without checksums
(safetensors, torch's format from before 1.6) may come back with other values, but must never raise anything else.

    python benchmarks/fuzz_checkpoints.py --number 5000 --seed 0
"""

import collections
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from bench_support.mutations import Subject, count_verdicts, run_fuzzer, run_trials
from bench_support.same_runs import find_differences
from safetensors.torch import save_file

from distribuuuu.checkpoint.io import load_state_dict, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.checkpoint.weights_files import best_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.states import load, make_state, original_checkpoint, save


def make_subjects(folder: Path) -> list[Subject]:
    """Write one file of each kind."""
    state = make_state(epoch=2)
    checkpoints = CheckpointManager(folder / "ours")
    (folder / "ours").mkdir(parents=True)
    ours = save(checkpoints, state, is_best=True)
    names = ("ckpt_ep_005.pth.tar", "legacy/ckpt_ep_005.pth.tar", "legacy/best.pth.tar", "w.safetensors")
    zipped, legacy, bare, tensors = (folder / name for name in names)
    legacy.parent.mkdir()
    original_checkpoint(zipped, state)
    original_checkpoint(legacy, state, _use_new_zipfile_serialization=False)
    torch.save(state.model.state_dict(), bare, _use_new_zipfile_serialization=False)
    save_file(state.model.state_dict(), tensors)
    paths = {ours: True, best_path(folder / "ours"): True, zipped: True, legacy: False, bare: False, tensors: False}
    contents = [read_checkpoint(path) for path in paths]
    return [
        Subject(path, path.read_bytes(), make_reader(path, contents if is_summed else []), name=str(path))
        for path, is_summed in paths.items()
    ]


def make_reader(path: Path, contents: list[dict]) -> Callable[[], None]:
    """Return a function that loads a file, whose content must be one of those of the undamaged files, if any are given.

    A file may have been replaced by another one.
    """
    is_state = "optimizer" in read_checkpoint(path)

    def read() -> None:
        state = make_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = read_checkpoint(path)
            load(state, path) if is_state else load_state_dict(state.model, content["state_dict"], path)
        found = [next(find_differences(other, content, path.name), None) for other in contents]
        assert None in found or not found, found

    return read


def fuzz(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage files `number` times; return the counts of verdicts by file, and the violations."""
    return count_verdicts(run_trials(make_subjects(folder), folder, number, seed))


if __name__ == "__main__":
    sys.exit(run_fuzzer(__doc__, fuzz))
