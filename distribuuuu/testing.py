"""Tests for tasks, losses, data sets and forks: a run resumes bitwise, and is the same on any number of processes.

    from distribuuuu.config import load_cfg
    from distribuuuu.testing import assert_resumes, assert_same_on_processes

    def test_my_task(tmp_path):
        words = ["OPTIM.MAX_EPOCH", "2", "OPTIM.WARMUP_EPOCHS", "0", "CHECKPOINT.EVERY_STEPS", "3"]
        cfg = load_cfg("my_task.yaml", [*words, "OUT_DIR", str(tmp_path)])
        assert_resumes(cfg)
        assert_same_on_processes(cfg, 2)  # not with batch norm, which depends on the division of a batch

The runs are forked processes, so what a test registers is known to them. Linux and macOS only.
"""

import gc
import json
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from distribuuuu import trainer
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import Config
from distribuuuu.config.config_node import changed
from distribuuuu.config.run_files import CHECKPOINTS, METRICS
from distribuuuu.launch.nproc import find_free_port

# A limit that catches a hang, in seconds.
RESULT_S = 300
# Entries of a checkpoint that a resumed run has in common with an undisturbed one, and fields of a row that it has not.
_COMPARED = ("epoch", "step", "state_dict", "optimizer", "scaler", "task", "chosen", "best_acc1")
_TIMED = ("time", "seconds", "images_per_s", "wait", "eta_s")


def assert_resumes(cfg: Config, steps: Sequence[int] = (2, 4), by: int = signal.SIGKILL) -> dict[str, Any]:
    """Train a config without a stop, and once more with stops, and compare the results bit by bit.

    Compared are the weights, their averages, the optimizer, the state of the task, and the rows of metrics.jsonl.

    Args:
        cfg: the config of a short run on the CPU; OUT_DIR gets the folders `whole` and `stopped`.
        steps: for each start but the last one, the step, counted from 0 in this start, in which it is stopped.
        by: the signal: SIGKILL, or SIGTERM for a graceful stop.

    Returns:
        The last checkpoint.
    """
    whole, stopped = (changed(cfg, {"OUT_DIR": str(Path(cfg.OUT_DIR) / name)}) for name in ("whole", "stopped"))
    on_processes(1, trainer.train_model, whole)
    for step in steps:
        stop_in_step(step, trainer.train_model, stopped, by=by)
    on_processes(1, trainer.train_model, stopped)
    assert_equal(newest(stopped.OUT_DIR), newest(whole.OUT_DIR))
    rows, expected = list_rows(stopped.OUT_DIR), list_rows(whole.OUT_DIR)
    assert rows == expected, next(pair for pair in zip(rows, expected, strict=False) if pair[0] != pair[1])
    return newest(whole.OUT_DIR)


def assert_same_on_processes(cfg: Config, num: int, tolerance: float = 1e-3) -> None:
    """Train a config on one process and on several ones that share each global batch; compare the weights.

    They differ by the order in which floats are added, and the more, the more steps follow and the higher the rate is:
    with `model.double()`, a difference of rounding alone nearly vanishes. Without MODEL.SYNCBN, batch norm depends on
    the division of a batch: use a model with another norm, e.g. MODEL.KWARGS.norm group.

    Args:
        cfg: as for `assert_resumes`; OUT_DIR gets the folders `1` and `num`.
        num: the number of processes; it divides the global batch.
        tolerance: relative and absolute.
    """
    size = cfg.TRAIN.GLOBAL_BATCH_SIZE or cfg.TRAIN.BATCH_SIZE
    found = []
    for world_size in (1, num):
        batch = {"TRAIN.GLOBAL_BATCH_SIZE": size, "TRAIN.BATCH_SIZE": size // world_size}
        own = changed(cfg, {**batch, "OUT_DIR": str(Path(cfg.OUT_DIR) / str(world_size))})
        on_processes(world_size, trainer.train_model, own)
        found.append(newest(own.OUT_DIR)["state_dict"])
    for name, tensor in found[0].items():
        _assert_close(name, found[1][name], tensor, tolerance, 10 * tolerance)


def newest(out_dir: str | os.PathLike) -> dict[str, Any]:
    """Return the content of the newest checkpoint of a run."""
    return read_checkpoint(sorted((Path(out_dir) / CHECKPOINTS).glob("*.pth.tar"))[-1], to_resume=True)


def list_rows(out_dir: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without the fields that depend on time."""
    rows = map(json.loads, (Path(out_dir) / METRICS).read_text(encoding="utf-8").splitlines())
    return [{name: value for name, value in row.items() if name not in _TIMED} for row in rows]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what two checkpoints say of the state of a run, bit by bit."""
    for name in (*_COMPARED, *(name for name in expected if name.endswith("_state_dict"))):
        pairs = [tree_leaves(content.get(name)) for content in (found, expected)]
        assert len(pairs[0]) == len(pairs[1]), name
        for own, other in zip(*pairs, strict=True):
            if isinstance(own, torch.Tensor):
                _assert_close(f"{name} after a resume", own, other, 0, 1e-5)
            else:
                assert own == other, f"{name} after a resume: got {own}; expected {other}"


def _assert_close(name: str, own: torch.Tensor, other: torch.Tensor, tolerance: float, rounding: float) -> None:
    """Compare tensors; `rounding` is the share of the largest value up to which a difference looks like rounding."""

    def explain(text: str) -> str:
        if own.shape != other.shape or not own.is_floating_point():
            return f"{name}: {text}"
        ratio = float((own - other).abs().max() / other.abs().max())
        kind = "looks like rounding" if ratio <= rounding else "is more than rounding"
        return f"{name}: {text}\nThe largest difference is {ratio:.1e} of the largest value, which {kind}."

    torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance, equal_nan=tolerance > 0, msg=explain)


def stop_in_step(step: int, function: Callable, *args: Any, by: int = signal.SIGKILL) -> None:
    """Call a function that trains in a process that gets a signal in a step, counted from 0."""
    process = multiprocessing.get_context("fork").Process(target=_train_until, args=(step, by, function, args))
    process.start()
    process.join()
    assert process.exitcode == (-by if by == signal.SIGKILL else 1), f"the run ended before step {step}"


def _train_until(step: int, by: int, function: Callable, args: tuple) -> None:
    take_step, left = trainer.take_step, [step]

    def take_step_or_stop(*given: Any) -> Any:
        if not left[0]:
            os.kill(os.getpid(), by)
        left[0] -= 1
        return take_step(*given)

    trainer.take_step = take_step_or_stop  # type: ignore[assignment]
    torch.set_num_threads(1)  # the threads of the parent do not exist here
    function(*args)


def on_processes(num: int, function: Callable, *args: Any) -> list[Any]:
    """Run function(*args) on forked processes with the variables of a launcher; return the results by rank.

    Raises:
        AssertionError: a process raised an exception, died without a result, or had none after `RESULT_S`.
    """
    context, port, running = multiprocessing.get_context("fork"), find_free_port(), []
    for rank in range(num):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, num, port, function, args, sender))
        process.start()
        sender.close()
        running.append((process, receiver))
    results = [_receive(rank, process, receiver) for rank, (process, receiver) in enumerate(running)]
    errors = [result for succeeded, result in results if not succeeded]
    assert not errors, "\n".join(errors)
    return [result for _, result in results]


def _run(rank: int, num: int, port: int, function: Callable, args: tuple, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    gc.freeze()  # freeing an object of the parent, e.g. a store, would wait for threads that do not exist here
    torch.set_num_threads(1)
    try:
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))


def _receive(rank: int, process: Any, receiver: Connection) -> tuple[bool, Any]:
    """Return whether the function of a process succeeded, and its result or its traceback."""
    if not receiver.poll(RESULT_S):
        process.kill()
        return False, f"process {rank} had no result after {RESULT_S} s"
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        return False, f"process {rank} ended without a result, exit status {process.exitcode}"
    finally:
        process.join()
