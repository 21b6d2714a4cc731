"""Executors of jobs: on this machine, where they share its GPUs or cores evenly, and on a Slurm cluster."""

import contextlib
import hashlib
import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from distribuuuu.commands.sweep.trials import CONSOLE_FILE, Job
from distribuuuu.config.run_files import LOCK
from distribuuuu.files.atomic_file import open_for_writing
from distribuuuu.files.locks import try_lock
from distribuuuu.launch.host import count_cores
from distribuuuu.launch.nproc import without_nproc
from distribuuuu.launch.processes import start_child

# Messages of srun, in the folder of a run.
SLURM_LOG = "slurm.log"


class LocalExecutor:
    """Starter of jobs on this machine. A job whose OUT_DIR is locked is started when it is free.

    When this process dies, the kernel signals the jobs, which save a checkpoint and exit.

    Args:
        num: number of jobs at a time.
        nproc: processes of a job; each has its own GPU, if there are GPUs.
    """

    def __init__(self, num: int, nproc: int = 1):
        cores = sorted(_list_cores())[: count_cores()]
        self._num, self._slots = num, plan_slots(num, nproc, cores, list_gpus())
        self._active: dict[int, tuple[Job, subprocess.Popen]] = {}

    @property
    def running(self) -> Collection[Job]:
        """The running jobs."""
        return [job for job, _ in self._active.values()]

    def update(self, wanted: Sequence[Job]) -> dict[Job, int]:
        """Start jobs in free slots; return the exit status of each job that has ended since the last call.

        0: the epoch was reached; 1 or 2: an error that a restart does not solve; others: the job was killed or
        stopped, e.g. by a signal, and is to be started again.

        Args:
            wanted: jobs in the order of their priority, of runs without a running job; those for which there is no
                room are passed again.
        """
        statuses = {slot: process.poll() for slot, (_, process) in self._active.items()}
        ended = {self._active.pop(slot)[0]: status for slot, status in statuses.items() if status is not None}
        free = [slot for slot in range(self._num) if slot not in self._active]
        for job in wanted:
            if free and not is_locked(job.folder):
                job.folder.mkdir(parents=True, exist_ok=True)
                slot = free.pop(0)
                self._active[slot] = job, self._start(job, slot)
        return ended

    def stop(self, signum: int) -> None:
        """Send a signal to the jobs; afterwards, `update` is called until none is running."""
        for _, process in self._active.values():
            process.send_signal(signum)

    def _start(self, job: Job, slot: int) -> subprocess.Popen:
        cores, env = self._slots[slot]
        before = _list_cores()
        _use_cores(cores)  # inherited
        try:
            with open_for_writing(job.folder / CONSOLE_FILE, "ab") as console:
                return start_child(job.command, "sweep", env, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        finally:
            _use_cores(before)


class SlurmExecutor(LocalExecutor):
    """Starter of jobs on a Slurm cluster: each is an srun with an allocation of its own.

    Args:
        num: number of jobs in the queue at a time, waiting or running.
        out_dir: OUT_DIR of the sweep, on a file system of the nodes.
        options: options of srun.
    """

    def __init__(self, num: int, out_dir: Path, options: Sequence[str]):
        name = f"sweep-{hashlib.sha256(str(out_dir.resolve()).encode()).hexdigest()[:12]}"
        # Those that a killed sweep has left save their checkpoints.
        subprocess.run(["scancel", "--me", f"--name={name}"], check=False, stdin=subprocess.DEVNULL)
        self._srun = ["srun", *options, f"--job-name={name}", "--wait=60"]
        self._num, self._active = num, {}

    def update(self, wanted: Sequence[Job]) -> dict[Job, int]:
        """Start jobs; status 1 may also be that of a canceled srun, and is no reason not to try again."""
        return {job: -1 if status == 1 else status for job, status in super().update(wanted).items()}

    def stop(self, signum: int) -> None:
        """Stop the jobs; srun would not pass a SIGINT on."""
        super().stop(signal.SIGTERM)

    def _start(self, job: Job, slot: int) -> subprocess.Popen:
        command = [*self._srun, "sh", "-c", 'exec "$@" 2>&1', "sh", *without_nproc(job.command)]
        console, log = (open_for_writing(job.folder / name, "ab") for name in (CONSOLE_FILE, SLURM_LOG))
        with console, log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=log, start_new_session=True
            )


def _list_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {*range(count_cores())}


def _use_cores(cores: set[int]) -> None:
    """Limit this process and those that it starts to some cores, on systems that can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def is_locked(folder: Path) -> bool:
    """Tell whether a training, e.g. of a killed sweep, still runs in a folder; False without file locks."""
    with contextlib.suppress(OSError), open(folder / LOCK, "r+") as file:
        return try_lock(file, is_inherited=False) is False
    return False


def plan_slots(
    num: int, nproc: int, cores: Sequence[int], gpus: Sequence[str]
) -> list[tuple[set[int], dict[str, str]]]:
    """Return the cores and the environment of each of `num` jobs of `nproc` processes; too few are shared.

    OMP_NUM_THREADS, unless it is set, divides the cores of a job among its processes.
    """
    slots = []
    for slot in range(num):
        own = _share(cores, slot, max(1, len(cores) // num))
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, len(own) // nproc))}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(_share(gpus, slot, min(nproc, len(gpus))))
        slots.append((set(own), env))
    return slots


def _share(items: Sequence, slot: int, size: int) -> list:
    return [items[(slot * size + index) % len(items)] for index in range(size)]


def list_gpus() -> list[str]:
    """Return the GPUs that this process may use, as for CUDA_VISIBLE_DEVICES."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    num = torch.cuda.device_count()
    return visible.split(",")[:num] if visible else [str(index) for index in range(num)]
