"""TRAIN.BATCH_SIZE auto: the largest micro-batch that fits into memory, found by training steps in fresh processes."""

import bisect
import contextlib
import itertools
import logging
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.options import GRAPH_MODES
from distribuuuu.config.plugins import import_plugins
from distribuuuu.config.reader import read_cfg
from distribuuuu.data.batch import LoaderWorkerError
from distribuuuu.data.batch_plan import BatchPlan, plan_batches, plan_of
from distribuuuu.data.loader import build_loaders
from distribuuuu.distributed.comm import PeerError
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.distributed.rendezvous import exchange
from distribuuuu.distributed.sharding import inference
from distribuuuu.engine.build import build_run, set_backends
from distribuuuu.engine.out_of_memory import OutOfMemory, is_out_of_memory
from distribuuuu.engine.run import Run, begin_epoch
from distribuuuu.engine.state import local_peak_bytes
from distribuuuu.launch.detect import Launch, detect_launch, list_jobs
from distribuuuu.launch.host import tune_malloc
from distribuuuu.launch.processes import die_with_parent
from distribuuuu.records.run_log import logging_to

logger = logging.getLogger(__name__)

T = TypeVar("T")
TakeStep = Callable[..., object]

# Why a resumed run has a value.
KEPT = "kept from the run in OUT_DIR"
# Share of the available memory that a run may take.
HEADROOM = 0.9
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


class Peak(NamedTuple):
    """Peak memory of a training process, in bytes.

    Attributes:
        used: allocated on its GPU, else resident on the host.
        limit: what the process may use on its GPU; 0: it runs on the CPU.
    """

    used: float
    limit: float = 0


def resolve_batch_size(cfg: Config, take_step: TakeStep) -> Config:
    """Return a config with a number in place of TRAIN.BATCH_SIZE auto; equal on all processes, which all call it.

    A run that is resumed keeps its number. The first process searches for all of them, with trainer.py's `take_step`.

    Raises:
        ConfigError: no micro-batch fits (`OutOfMemory`), or the config contradicts the data or the model.
    """
    launch = detect_launch()
    sizes = list_micro_batches(cfg, launch.world_size)

    def decide() -> tuple[int, str]:
        kept = read_kept(cfg)
        if kept and kept.TRAIN.BATCH_SIZE in sizes:
            return kept.TRAIN.BATCH_SIZE, KEPT
        return search_here(cfg, take_step, launch, sizes), "the largest that fits into memory"

    return with_number(cfg, *decide_for_all(cfg, launch, "TRAIN.BATCH_SIZE", decide))


def decide_for_all(cfg: Config, launch: Launch, key: str, decide: Callable[[], tuple]) -> Sequence[Any]:
    """Return decide() of the first process, as JSON passes it on, on every process, before the process group.

    Raises:
        PeerError: the first process has failed; there, its ConfigError is raised.
    """
    decided: Any = None
    try:
        if launch.rank == 0:
            decided = decide()
    except ConfigError as error:
        error.one_process = True
        raise
    finally:
        decided = exchange(launch, decided, cfg.DIST.TIMEOUT_S, cfg.DIST.STARTUP_TIMEOUT_S)[0]
    if not decided:
        raise PeerError(f"{key}: got auto, but the process that finds a value has failed")
    return decided


def with_number(cfg: Config, number: int, reason: str = "") -> Config:
    """Return a frozen copy with this TRAIN.BATCH_SIZE, which was found for the reason."""
    return changed(cfg, {"TRAIN.BATCH_SIZE": number}, f"{AUTO}, {reason}")


def read_kept(cfg: Config) -> Config | None:
    """Return the config of the run in OUT_DIR that is resumed; None: there is none."""
    path = Path(cfg.OUT_DIR) / cfg.CFG_DEST
    jobs = None if cfg.TRAIN.AUTO_RESUME else list_jobs(only_restarted=True)
    is_resumed = path.is_file() and CheckpointManager(cfg.OUT_DIR).has_any(jobs)
    return read_cfg(FoundConfig(path))[0] if is_resumed else None


def search_here(cfg: Config, take_step: TakeStep, launch: Launch, sizes: Sequence[int]) -> int:
    """Return the largest micro-batch that fits on this machine for all of its processes, or on the process's GPU.

    Raises:
        OutOfMemory: not even the smallest one fits.
    """
    memory, share = available_memory() / launch.local_world_size, sizes[-1]
    local = Launch("trial", local_rank=launch.local_rank, local_world_size=launch.local_world_size)

    def fits(size: int) -> bool:
        plan = plan_batches(size, size * min(2, share // size), 1)
        peak = in_fresh_process(measure_steps, cfg, take_step, local, plan)
        shown = peak if isinstance(peak, str) else f"{peak.used / 2**20:,.0f} MiB"
        logger.info("TRAIN.BATCH_SIZE auto: micro-batch of %d: %s", size, shown)
        return not isinstance(peak, str) and peak.used <= HEADROOM * (peak.limit or memory)

    with logging_to(cfg.OUT_DIR, ""):
        num_fit = bisect.bisect_left(sizes, True, key=lambda size: not fits(size))
    if not num_fit:
        fix = "a smaller MODEL.ARCH, TRAIN.IM_SIZE or TEST.BATCH_SIZE; or MODEL.ACT_CHECKPOINT True"
        problem = f"got auto; a micro-batch of {sizes[0]} does not fit into memory; fix: {fix}"
        raise OutOfMemory(Problem("TRAIN.BATCH_SIZE", problem))
    return sizes[num_fit - 1]


@contextlib.contextmanager
def trial_run(cfg: Config, launch: Launch, plan: BatchPlan, folder: str) -> Iterator[Run]:
    """Yield a run as in training, but with random weights and one process that takes its share of each step."""
    import_plugins(cfg.PLUGINS)  # in a new process
    batch = {"TRAIN.BATCH_SIZE": plan.micro_batch, "TRAIN.GLOBAL_BATCH_SIZE": plan.per_process}
    random = {"MODEL.WEIGHTS": None, "MODEL.PRETRAINED": False, "FINETUNE.WEIGHTS": "", "FINETUNE.HEAD": ""}
    cfg = changed(cfg, {**batch, **random, "OUT_DIR": folder, "LOG.TRACKERS": ()})
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
        begin_epoch(run)
        for step in range(min(_STEPS, loader.steps_of(0))):
            take_step(run, batches, step)
            state.finish_step(loader.num_steps)
        run.save()
        state.model.eval()
        with inference(state.model):
            for batch in itertools.islice(run.val_loader, 1):
                run.task.eval_step(state.model, batch)
        return read_peak(loader.device)


def read_peak(device: torch.device) -> Peak:
    """Return the peak memory of this process so far."""
    if device.type == "cuda":
        limit = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return Peak(torch.cuda.max_memory_allocated(device), limit)
    # Not `ru_maxrss`: it includes the memory that the parent had when it started this process.
    return Peak(_read_sizes("/proc/self/status").get("VmHWM", local_peak_bytes(device)))


def available_memory() -> float:
    """Return the bytes of host memory that this process and those that it starts may still take."""
    return _read_sizes("/proc/meminfo").get("MemAvailable", float("inf"))


def _read_sizes(path: str) -> dict[str, int]:
    """Return the sizes in bytes of a file of /proc with lines such as `VmHWM: 123 kB`; {} if there is no such file."""
    try:
        lines = [line.split() for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}


def in_fresh_process(function: Callable[..., T], *args: Any) -> T | str:
    """Return function(folder, *args) of a new process, where `folder` is temporary; a text if memory did not suffice.

    If the system runs out of memory, it ends that process, not this one.

    Raises:
        ConfigError: as raised by the function, or it failed with another exception.
    """
    with (
        tempfile.TemporaryDirectory(prefix="distribuuuu_trial_") as folder,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin_trial) as pool,
    ):
        try:
            return pool.submit(function, folder, *args).result()
        except BrokenProcessPool:
            return "the system ended the trial"
        except Exception as error:
            in_memory = isinstance(error, (OutOfMemory, LoaderWorkerError)) or is_out_of_memory(error)
            text = str(error).strip().partition("\n")[0][:300]
            if in_memory or any(message in str(error) for message in _NO_MEMORY):
                return text
            raise error if isinstance(error, ConfigError) else ConfigError(f"{type(error).__name__}: {text}") from None


def _begin_trial() -> None:
    die_with_parent()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    tune_malloc()
    logging.getLogger("distribuuuu").addHandler(logging.NullHandler())
    logging.getLogger("distribuuuu").propagate = False
