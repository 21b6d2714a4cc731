"""TRAIN.BATCH_SIZE auto: the largest micro-batch that fits into memory, found by training steps in fresh processes."""

import contextlib
import itertools
import logging
import multiprocessing
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.options import GRAPH_MODES
from distribuuuu.config.plugins import FoundConfig, import_plugins
from distribuuuu.config.reader import read_cfg
from distribuuuu.data.batch_plan import BatchPlan, plan_batches, plan_of
from distribuuuu.data.loader import build_loaders
from distribuuuu.data.workers import LoaderWorkerError
from distribuuuu.distributed.comm import PeerError
from distribuuuu.distributed.process_group import find_device, pick_device
from distribuuuu.distributed.rendezvous import exchange
from distribuuuu.distributed.sharding import inference
from distribuuuu.engine.build import build_run, set_backends
from distribuuuu.engine.out_of_memory import OutOfMemory, is_out_of_memory
from distribuuuu.engine.resume import capture
from distribuuuu.engine.run import Run
from distribuuuu.launch.detect import Launch, detect_launch, list_jobs
from distribuuuu.launch.host import tune_malloc
from distribuuuu.launch.processes import die_with_parent
from distribuuuu.records.environment import local_peak_bytes
from distribuuuu.records.memory_limits import address_space_limit, list_memory_limits, read_sizes
from distribuuuu.records.run_log import logging_to

logger = logging.getLogger(__name__)

T = TypeVar("T")
TakeStep = Callable[..., object]

# Share of the available memory that a run may take, and the factor by which a trial may exceed the largest so far.
HEADROOM, GROWTH = 0.9, 8
# Messages of other errors that a lack of memory causes.
_NO_MEMORY = ("can't start new thread", "Cannot allocate memory", "bad_alloc")
# A trial measures this many steps: the first one creates the state of the optimizer.
_STEPS = 2


def list_micro_batches(cfg, world_size: int) -> list[int]:
    """Return the micro-batches that divide the images per process and step, ascending; even ones if images are mixed.

    Raises:
        ConfigError: the global batch is not divisible by the processes.
    """
    share = plan_of(cfg, world_size).per_process
    if cfg.MODEL.COMPILE in GRAPH_MODES:  # no accumulation, see `check_accumulation`
        return [share]
    step = 2 if cfg.AUG.MIXUP or cfg.AUG.CUTMIX else 1
    return [size for size in range(step, share + 1, step) if share % size == 0]


@dataclass(frozen=True)
class Peak:
    """Peak memory of a training process, in bytes.

    Attributes:
        own: allocated on its GPU, else resident on the host.
        workers: memory on the host that its loader workers do not share with it.
        address_space: virtual memory, which `ulimit -v` limits; 0: unknown.
        limit: what the process may use on its GPU; 0: it runs on the CPU.
    """

    own: float
    workers: float = 0
    address_space: float = 0
    limit: float = 0

    @property
    def used(self) -> float:
        """Memory of the process, on the CPU with its workers."""
        return self.own if self.limit else self.own + self.workers

    def scaled(self, other: "Peak", factor: float) -> "Peak":
        """Return the peak on the line from this one (factor 0) through another one (factor 1)."""
        values = ((value, getattr(other, name)) for name, value in vars(self).items())
        return Peak(*(value + factor * (end - value) for value, end in values))


def resolve_batch_size(cfg: Config, take_step: TakeStep) -> Config:
    """Return the config with a number for TRAIN.BATCH_SIZE auto; the same on all processes, which must all call this.

    A run that is resumed keeps its number. On the CPU, the first process of each machine searches for all of them.

    Args:
        cfg: the config.
        take_step: the function of trainer.py, (run, batches, step).

    Raises:
        ConfigError: no micro-batch fits (`OutOfMemory`), or the config contradicts the data or the model.
    """
    if cfg.TRAIN.BATCH_SIZE != AUTO:
        return cfg
    launch = detect_launch()
    # Without a CUDA context here, whose memory the trials would lack.
    is_cuda = find_device(launch.local_rank).type == "cuda"
    sizes, limits = list_micro_batches(cfg, launch.world_size), (cfg.DIST.TIMEOUT_S, cfg.DIST.STARTUP_TIMEOUT_S)
    if kept := exchange(launch, _find_kept(cfg, sizes), *limits)[0]:
        return with_number(cfg, kept, "kept from the run in OUT_DIR")
    hosts, number, failure = exchange(launch, zlib.crc32(socket.gethostname().encode()), *limits), sizes[-1], None
    try:
        if is_cuda or launch.local_rank == 0:
            number = search_here(cfg, take_step, launch, sizes, hosts.count(hosts[launch.rank]))
    except ConfigError as error:
        number, failure = 0, error
        failure.one_process = launch.local_rank == 0
    number = min(exchange(launch, number, *limits))
    if failure:
        raise failure
    if not number:
        raise PeerError("TRAIN.BATCH_SIZE: got auto, but another process found no micro-batch that fits")
    return with_number(cfg, number, "the largest that fits into memory")


def with_number(cfg: Config, number: int, reason: str = "") -> Config:
    """Return a frozen copy with this TRAIN.BATCH_SIZE, which was found for the reason."""
    return changed(cfg, {"TRAIN.BATCH_SIZE": number}, f"{AUTO}, {reason}")


def _find_kept(cfg: Config, sizes: Sequence[int]) -> int:
    """Return the micro-batch of the run in OUT_DIR that is resumed; 0: there is none, or it does not divide a step."""
    if not ((cfg.TRAIN.AUTO_RESUME or list_jobs(only_restarted=True)) and CheckpointManager(cfg.OUT_DIR).list()):
        return 0
    number = read_cfg(FoundConfig(Path(cfg.OUT_DIR) / cfg.CFG_DEST))[0].TRAIN.BATCH_SIZE
    return number if number in sizes else 0


def search_here(cfg: Config, take_step: TakeStep, launch: Launch, sizes: Sequence[int], num_local: int = 1) -> int:
    """Return the largest micro-batch that fits on this machine for `num_local` processes, or on the process's GPU."""
    memory, space = available_memory() / num_local, address_space_limit()
    local = Launch("trial", local_rank=launch.local_rank, local_world_size=launch.local_world_size)
    share = sizes[-1]

    def fits(peak: Peak) -> bool:
        return peak.used <= HEADROOM * (peak.limit or memory) and peak.address_space <= HEADROOM * space

    def measure(size: int) -> Peak | str:
        plan = plan_batches(size, size * min(2, share // size), 1)
        peak = in_fresh_process(measure_steps, cfg, take_step, local, plan)
        if launch.rank == 0:
            shown = peak if isinstance(peak, str) else f"{peak.used / 2**20:,.0f} MiB"
            logger.info("TRAIN.BATCH_SIZE auto: micro-batch of %d: %s", size, shown)
        return peak

    with logging_to(cfg.OUT_DIR, ""):
        return search(sizes, measure, fits)


def search(sizes: Sequence[int], measure: Callable[[int], Peak | str], fits: Callable[[Peak], bool]) -> int:
    """Return the largest size that fits.

    Memory grows linearly: the line through the smallest and the largest size so far tells which ones are worth a trial.
    So a trial hardly exceeds the memory, which on the CPU would slow down or end other processes too.

    Args:
        sizes: the candidates, ascending.
        measure: returns the peak of a trial, or why it failed for want of memory.
        fits: tells whether a peak leaves enough room.

    Raises:
        OutOfMemory: not even the smallest one fits.
    """
    seen: dict[int, Peak] = {}
    left, best, killed = list(sizes), 0, False
    size = max([size for size in sizes if size <= 4], default=sizes[0])
    while left:
        peak = measure(size)
        if isinstance(peak, str):
            killed = True
        else:
            seen[size] = peak
        if isinstance(peak, str) or not fits(peak):
            left = [other for other in left if other < size]
        else:
            best = size
        if not best:
            size = left[-1] if left else 0
            continue
        above, low, high = [other for other in left if other > best], min(seen), max(seen)
        most = max([best * (GROWTH if high > low else 4), *above[:1]])
        worth = [other for other in above if other <= most]
        if high > low:
            line = {other: seen[low].scaled(seen[high], (other - low) / (high - low)) for other in worth}
            worth = [other for other in worth if fits(line[other])]
        if not worth:
            return best
        size = worth[(len(worth) - 1) // 2 if killed else -1]
    shown = peak if isinstance(peak, str) else f"{peak.used / 2**20:,.0f} MiB"
    fix = "a smaller MODEL.ARCH, TRAIN.IM_SIZE or TEST.BATCH_SIZE; or MODEL.ACT_CHECKPOINT True"
    problem = f"got auto; a micro-batch of {sizes[0]} does not fit into memory: {shown}; fix: {fix}"
    raise OutOfMemory(Problem("TRAIN.BATCH_SIZE", problem))


@contextlib.contextmanager
def trial_run(cfg: Config, launch: Launch, plan: BatchPlan, folder: str) -> Iterator[Run]:
    """Yield a run as in training, but with random weights and one process that takes its share of each step.

    Args:
        cfg: the config.
        launch: the place of this process on its machine; its world size is 1.
        plan: the images of a step, of which the process takes `plan.per_process`.
        folder: OUT_DIR of the run.
    """
    import_plugins(cfg.PLUGINS)  # in a new process
    batch = {"TRAIN.BATCH_SIZE": plan.micro_batch, "TRAIN.GLOBAL_BATCH_SIZE": plan.per_process}
    random = {"MODEL.WEIGHTS": None, "MODEL.PRETRAINED": False, "FINETUNE.WEIGHTS": ""}
    cfg = changed(cfg, {**batch, **random, "OUT_DIR": folder})
    device = pick_device(launch.local_rank)
    set_backends(cfg, device)
    run = build_run(cfg, *build_loaders(cfg, launch, device))
    with run.log:
        yield run


def measure_steps(folder: str, cfg: Config, take_step: TakeStep, launch: Launch, plan: BatchPlan) -> Peak:
    """Return the peak memory of training steps, a checkpoint and an evaluation, in a fresh process."""
    with trial_run(cfg, launch, plan, folder) as run:
        loader, state = run.train_loader, run.state
        batches = loader.batches_from(state.stream_seed, 0, 0)
        run.model.train()
        for step in range(min(_STEPS, loader.steps_of(0))):
            take_step(run, batches, step)
            state.finish_step(loader.num_steps)
        run.checkpoints.save(capture(run))
        evaluate_batch(run)
        return read_peak(loader.device)


def evaluate_batch(run: Run) -> None:
    """Evaluate a batch."""
    run.state.model.eval()
    with inference(run.state.model):
        for batch in itertools.islice(run.val_loader, 1):
            run.task.eval_step(run.state.model, batch)


def read_peak(device: torch.device) -> Peak:
    """Return the peak memory of this process so far."""
    if device.type == "cuda":
        limit = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return Peak(torch.cuda.max_memory_allocated(device), limit=limit)
    own = read_sizes("/proc/self/status")
    workers = (read_sizes(f"/proc/{process.pid}/smaps_rollup") for process in multiprocessing.active_children())
    private = sum(sizes.get("Private_Dirty", 0) + sizes.get("Private_Clean", 0) for sizes in workers)
    # Not `ru_maxrss`: it includes the memory that the parent had when it started this process.
    return Peak(own.get("VmHWM", local_peak_bytes(device)), private, own.get("VmPeak", 0))


def available_memory() -> float:
    """Return the bytes of host memory that this process and those that it starts may still take."""
    return min(free for _, free in list_memory_limits())


def in_fresh_process(function: Callable[..., T], *args: Any) -> T | str:
    """Return function(folder, *args) of a new process, where `folder` is temporary; a text if memory did not suffice.

    If the system runs out of memory, it ends that process, not this one.

    Raises:
        ConfigError: as raised by the function, or it failed with another exception.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="distribuuuu_trial_") as folder:
        process = context.Process(target=_send_result, args=(sender, function, folder, *args))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            process.join()
            result = f"the trial ended with status {process.exitcode}"
        process.join()
    if isinstance(result, ConfigError):
        raise result
    return result


def _send_result(sender: Connection, function: Callable, *args: Any) -> None:
    die_with_parent()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    tune_malloc()
    logging.getLogger("distribuuuu").addHandler(logging.NullHandler())
    logging.getLogger("distribuuuu").propagate = False
    try:
        result = function(*args)
    except Exception as error:
        in_memory = isinstance(error, (OutOfMemory, LoaderWorkerError)) or is_out_of_memory(error)
        in_memory = in_memory or any(message in str(error) for message in _NO_MEMORY)
        text = str(error).strip().partition("\n")[0][:300]
        result = error if isinstance(error, ConfigError) else ConfigError(f"{type(error).__name__}: {text}")
        result = text if in_memory else result
    sender.send(result)
