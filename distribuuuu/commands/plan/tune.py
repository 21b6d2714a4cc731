"""Tuning of a planned run: options that change its speed but not its recipe, measured in alternating blocks of steps.

Other programs make a machine slower for a while. So the two runs that are compared take turns, block by block, and the
result is the median of the ratios of neighboring blocks, with their interquartile range as its spread.
"""

import contextlib
import importlib.util
import multiprocessing
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from distribuuuu.commands.measure.bottleneck import is_in_memory
from distribuuuu.commands.measure.timing import count_calls, endless_batches, time_block
from distribuuuu.commands.plan.measure_run import count_ahead
from distribuuuu.config import Config, ConfigError
from distribuuuu.config.options import OPTIONAL_DECODERS
from distribuuuu.config.reader import CfgFiles, list_files, read_cfg
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.workers import count_workers
from distribuuuu.engine.auto_batch_size import in_fresh_process, trial_run
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import count_cores
from distribuuuu.optim.optimizer import set_lr
from distribuuuu.trainer import take_step

# Pairs of blocks per comparison, and the length of a block in those of measure/timing.py.
PAIRS, BLOCKS = 7, 2
# Gain from which an option is worth its place in a command line.
MIN_GAIN = 0.02
THREADS = "OMP_NUM_THREADS"
_HERE = Launch("tune")


@dataclass(frozen=True)
class Change:
    """A change of a run: an option, or an environment variable (THREADS), and its value."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}" if self.key == THREADS else f"{self.key} {self.value}"


@dataclass(frozen=True)
class Gain:
    """Speed of a run relative to another one: the median over pairs of blocks, and their interquartile range."""

    ratio: float
    spread: float

    @property
    def is_real(self) -> bool:
        """Whether the gain exceeds the spread."""
        return self.ratio - 1 > max(self.spread, MIN_GAIN)

    @property
    def is_loss(self) -> bool:
        """Whether the run is slower by more than the spread."""
        return 1 - self.ratio > max(self.spread, MIN_GAIN)


class Unusable(Exception):
    """A change that this run or this machine does not support."""


class Contestant(Protocol):
    """A run whose blocks of steps are timed."""

    def block(self) -> float:
        """Return the images/s of a block."""

    def close(self) -> None:
        """End the run."""


Open = Callable[[Sequence[Change]], Contestant]


class Process:
    """A run in a process of its own, which trains while it is asked to, and waits otherwise."""

    def __init__(self, cfg: Config, plan: BatchPlan, changes: Sequence[Change]):
        words = [word for change in changes if change.key != THREADS for word in (change.key, change.value)]
        threads = next((int(change.value) for change in changes if change.key == THREADS), 0)
        changed, problems = read_cfg(cfg, words)
        if problems:
            raise Unusable(str(problems[0]))
        self._pipe, remote = multiprocessing.Pipe()
        self._pool = ThreadPoolExecutor(1)
        self._end = self._pool.submit(in_fresh_process, serve_blocks, changed, plan, threads, remote)
        try:
            self._receive()
        except Unusable:
            self.close()
            raise

    def _receive(self) -> Any:
        while not self._pipe.poll(0.1):
            if self._end.done():
                error = self._end.exception()
                reason = error.problems[0].message if isinstance(error, ConfigError) else error or self._end.result()
                raise Unusable(str(reason).partition("\n")[0])
        return self._pipe.recv()

    def block(self) -> float:
        """Return the images/s of a block.

        Raises:
            Unusable: the process has ended.
        """
        self._pipe.send(True)
        return self._receive()

    def close(self) -> None:
        """End the process, and wait for its end."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._pipe.send(False)
        self._pool.shutdown()
        self._pipe.close()


def serve_blocks(folder: str, cfg: Config, plan: BatchPlan, threads: int, pipe: Connection) -> None:
    """Time a block of training steps whenever the other end of the pipe asks for it, and send its images/s.

    Args:
        folder: OUT_DIR.
        cfg: the config.
        plan: the images of a step, of which this process takes its share.
        threads: threads of torch; 0: its default.
        pipe: receives True for each block, and False at the end.
    """
    if threads:
        torch.set_num_threads(threads)
    with trial_run(cfg, _HERE, plan, folder) as run:
        loader = run.train_loader
        set_lr(run.state.optimizer, 0.0)  # the weights, and therefore the speed, stay the same
        run.model.train()
        batches = map(loader.to_device, endless_batches(loader, run.state.stream_seed))
        ahead = count_ahead(run)

        def step() -> None:
            take_step(run, batches, 0)

        num = BLOCKS * count_calls(step, loader.device, ahead)[0]
        pipe.send(None)
        while pipe.recv():
            time_block(step, ahead, loader.device)  # on batches that the workers prepared while this process waited
            pipe.send(plan.per_process / time_block(step, num, loader.device).seconds)
            if loader.device.type == "cuda":  # room for the other process
                torch.cuda.empty_cache()


def measure_gain(reference: Contestant, candidate: Contestant) -> Gain:
    """Return the speed of a candidate relative to a reference, from blocks in the order ab, ba, ab, ..."""
    ratios = []
    for pair in range(PAIRS):
        if pair % 2:
            speed = candidate.block()
            ratios.append(speed / reference.block())
        else:
            speed = reference.block()
            ratios.append(candidate.block() / speed)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Gain(middle, high - low)


def list_candidates(cfg: Config, is_cuda: bool) -> list[Change]:
    """Return the changes that are measured: each other value of an option that does not belong to the recipe."""
    cores, workers = count_cores(), count_workers(cfg.TRAIN.WORKERS, _HERE)
    numbers = {cores: "-1", max(1, cores // 2): str(max(1, cores // 2)), **({} if is_cuda else {0: "0", 1: "1"})}
    values: dict[str, list[str]] = {
        "MODEL.CHANNELS_LAST": [str(not cfg.MODEL.CHANNELS_LAST)],
        "TRAIN.AMP": ["none" if cfg.TRAIN.AMP == "bf16" else "bf16"],
        "MODEL.COMPILE": ["default" if cfg.MODEL.COMPILE == "none" else "none"],
    }
    if cfg.DATA.LOADER == "host":
        values["TRAIN.WORKERS"] = [numbers[number] for number in sorted(numbers) if number != workers]
        values["DATA.WORKER_KIND"] = ["process" if cfg.DATA.WORKER_KIND == "thread" else "thread"]
    if not is_in_memory(cfg):
        others = [name for name in OPTIONAL_DECODERS if name != cfg.DATA.DECODER]
        values["DATA.DECODER"] = [name for name in others if _is_installed(name)]
    if not is_cuda:
        threads = {1, max(1, cores // 2), cores} - {torch.get_num_threads()}
        values[THREADS] = [str(number) for number in sorted(threads)]
    return [Change(key, value) for key, numbered in values.items() for value in numbered]


def _is_installed(decoder: str) -> bool:
    try:
        return importlib.util.find_spec(OPTIONAL_DECODERS[decoder]) is not None
    except ModuleNotFoundError:  # the package that contains it
        return False


def tune(open_run: Open, changes: Iterable[Change], report: Callable[[str], None] = lambda text: None) -> dict:
    """Return which changes make a run faster: each alone, and those that still do when they are added one by one.

    A change is used if its gain exceeds the spread of its measurement. The changes are added in the order of their
    gains; one that makes no difference alone is tried again if another one is used, and one that is slower is not.

    Args:
        open_run: returns a run with some changes; raises Unusable if it cannot.
        changes: the changes to measure.
        report: called with a line about each measurement.

    Returns:
        `options`, in the order of the changes, each with `option`, `gain` and `spread` of it alone, whether it is
        `used`, and why it `failed` or None; `used`, the changes in the order of their use; `gain` and `spread` of all
        used ones together; `images_per_s` of the run without them.
    """
    alone: dict[Change, Gain | str] = {}
    with contextlib.closing(open_run(())) as base:
        speed = statistics.median(base.block() for _ in range(PAIRS))
        for change in changes:
            alone[change] = _try(open_run, base, [change])
            report(f"{change}: {_describe(alone[change])}")
    measured = {change: gain for change, gain in alone.items() if isinstance(gain, Gain)}
    used, together = _combine(open_run, measured, report)
    options = [
        {"option": str(change), "gain": gain.ratio, "spread": gain.spread, "used": change in used, "failed": None}
        if isinstance(gain, Gain)
        else {"option": str(change), "gain": None, "spread": None, "used": False, "failed": gain}
        for change, gain in alone.items()
    ]
    return {"options": options, "used": used, "images_per_s": speed, "gain": together.ratio, "spread": together.spread}


def _try(open_run: Open, reference: Contestant, changes: Sequence[Change]) -> Gain | str:
    """Return the gain of a run with some changes over the reference, or why it cannot be measured."""
    try:
        with contextlib.closing(open_run(changes)) as candidate:
            return measure_gain(reference, candidate)
    except Unusable as error:
        return str(error)


def _combine(open_run: Open, alone: dict[Change, Gain], report: Callable[[str], None]) -> tuple[list[Change], Gain]:
    """Return the changes that are used together, in the order of their use, and their common gain."""
    waiting = sorted((change for change in alone if not alone[change].is_loss), key=lambda one: -alone[one].ratio)
    if not waiting or not alone[waiting[0]].is_real:
        return [], Gain(1.0, 0.0)
    used = [waiting.pop(0)]
    while waiting:
        change = waiting.pop(0)
        if change.key in {other.key for other in used}:
            continue
        with contextlib.closing(open_run(used)) as reference:
            added = _try(open_run, reference, [*used, change])
        report(f"{change} with {', '.join(map(str, used))}: {_describe(added)}")
        if isinstance(added, Gain) and added.is_real:
            used.append(change)
    if len(used) == 1:
        return used, alone[used[0]]
    with contextlib.closing(open_run(())) as base:
        together = _try(open_run, base, used)
    if not isinstance(together, Gain) or not together.is_real:
        return used[:1], alone[used[0]]
    report(f"together: {_describe(together)}")
    return used, together


def _describe(gain: Gain | str) -> str:
    return f"failed: {gain}" if isinstance(gain, str) else f"{gain.ratio:.2f} x, spread {gain.spread:.2f}"


def tune_plan(cfg: Config, planned: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tuning of a planned run, see `tune`, with its `command` or a `problem`; progress is on standard error.

    All images have their largest size.

    Args:
        cfg: the config.
        planned: the plan, see `plan_run`.
        overrides: the KEY VALUE arguments of the command line.
    """
    memory, batch = planned["memory"], planned["batch"]
    if not memory["fits"]:
        return {"problem": "the run does not fit into memory"}
    needed = 2 * (memory["peak_mib"] + memory["workers_mib"])
    if memory["of"] == "host" and needed > memory["free_mib"]:
        shown = f"{needed:,.0f} MiB for two runs at a time, {memory['free_mib']:,.0f} MiB are free"
        return {"problem": f"{shown}; fix: a smaller TRAIN.BATCH_SIZE"}
    plan = BatchPlan(batch["micro_batch"], batch["accum_steps"], batch["world_size"])
    fixed, _ = read_cfg(cfg, ["TRAIN.IM_SIZE_START", "0", "TRAIN.IM_SIZE_EPOCHS", "[]"])
    changes = list_candidates(cfg, memory["of"] == "cuda")
    try:
        tuning = tune(lambda chosen: Process(fixed, plan, chosen), changes, _report)
    except Unusable as error:  # the run without any change
        return {"problem": str(error)}
    command = format_command(planned["config"], plan.world_size, overrides, tuning["used"])
    return {**tuning, "used": [str(change) for change in tuning["used"]], "command": command}


def _report(text: str) -> None:
    print(f"tuning: {text}", file=sys.stderr, flush=True)


def format_command(config: CfgFiles, nproc: int, overrides: Sequence[str], changes: Sequence[Change]) -> str:
    """Return the command that trains with the changes, each of which replaces the option that was given for its key."""
    keys = {change.key for change in changes}
    pairs = zip(overrides[::2], overrides[1::2], strict=True)
    kept = [word for pair in pairs if pair[0] not in keys for word in pair]
    flags = [*(["--cfg", *list_files(config)] if config else []), *(["--nproc", str(nproc)] if nproc > 1 else [])]
    added = [word for change in changes if change.key != THREADS for word in (change.key, change.value)]
    environment = "".join(f"{change} " for change in changes if change.key == THREADS)
    return environment + shlex.join(["distribuuuu", "train", *flags, *kept, *added])


def list_rows(tuning: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a plan about its tuning: name and text."""
    if "problem" in tuning:
        yield "tuning", f"not measured: {tuning['problem']}"
        return
    speed = tuning["images_per_s"]
    yield "tuning", f"{speed:,.0f} images/s now; speed with each option, median of {PAIRS} pairs of blocks:"
    for row in tuning["options"]:
        gain = f"failed: {row['failed']}" if row["failed"] else f"{row['gain']:.2f} x, spread {row['spread']:.2f}"
        yield "", f"{row['option']}: {gain}{'; used' if row['used'] else ''}"
    if not tuning["used"]:
        yield "together", "no option is faster by more than its spread: change nothing"
        return
    shown = f"{tuning['gain']:.2f} x, spread {tuning['spread']:.2f}"
    yield "together", f"{shown}: about {speed * tuning['gain']:,.0f} images/s"
    yield "command", tuning["command"]
