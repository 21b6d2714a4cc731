"""Jobs of a sweep on a Slurm cluster: each submission is an array job, each of its tasks one job of the sweep.

    OUT_DIR/slurm/NAME.json        (trial, seed, epoch) of the jobs of the array NAME, in the order of its tasks
    OUT_DIR/slurm/NAME.sh          its script
    OUT_DIR/slurm/NAME_3.status    exit status of task 3; NAME_3.log: messages of Slurm about it

Slurm requeues a task of an array alone: after a preemption, a lost node or the end of its time limit. The state of
tasks is read from these files and from squeue, not from an accounting database.
"""

import contextlib
import json
import logging
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.files.atomic_file import open_for_writing, replacing
from distribuuuu.files.locks import lock_file
from distribuuuu.launch.nproc import without_nproc
from distribuuuu.launch.signals import REQUEUE

if TYPE_CHECKING:  # imports torch
    from distribuuuu.commands.sweep.trials import Job, Sweep

logger = logging.getLogger(__name__)

# Options of sbatch that --sbatch may override; tasks of an array on clusters with Slurm's own limit.
_DEFAULTS, _MAX_TASKS = ("--requeue", "--signal=USR1@120"), 1000
# Seconds between two calls of squeue; until a task that is not in the queue counts as lost; for a command of Slurm.
POLL_S, LOST_S, _TIMEOUT_S = 5.0, 15.0, 120.0

# A status above 2 is not written: the task was stopped. Either Slurm starts it again, or it leaves the queue.
_SCRIPT = """#!/usr/bin/env bash
set -u
status_file={stem}_$SLURM_ARRAY_TASK_ID.status
rm -f "$status_file"
case $SLURM_ARRAY_TASK_ID in
{cases}
esac
srun ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} --wait=60 "${{command[@]}}" >>"$console" 2>&1
status=$?
if [[ $status -eq {requeue} ]]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
elif [[ $status -le 2 ]]; then
    echo "$status" >"$status_file.tmp" && mv "$status_file.tmp" "$status_file"
fi
exit "$status"
"""


def check_slurm(partition: str, texts: Sequence[str]) -> list[str]:
    """Check the flags --slurm and --sbatch, and return the options of sbatch in `texts`; nothing is started.

    Raises:
        ConfigError: Slurm is not installed or does not answer, or refuses the partition or the options.
    """
    if missing := [name for name in ("sbatch", "squeue") if not shutil.which(name)]:
        fix = "fix: run the sweep on a login node of the cluster"
        raise ConfigError(Problem("--slurm", f"got {partition}; {missing[0]} is not installed here; {fix}"))
    try:
        options = [word for text in texts for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(Problem("--sbatch", f"got {texts[-1]}; {error}")) from error
    is_accepted, answer = _run("sbatch", "--test-only", *_DEFAULTS, *options, f"--partition={partition}", "--wrap=true")
    if not is_accepted:
        got = f"got {partition} with --sbatch {shlex.join(options)!r}"
        raise ConfigError(Problem("--slurm", f"{got}; {answer}"))
    return options


class SlurmExecutor:
    """Starter of jobs on a Slurm cluster; see `trials.Executor`.

    The jobs continue when the sweep process ends. The next one finds them by their names.

    Args:
        sweep: the sweep; the nodes share the file system of its folder.
        partition: the partition of the jobs.
        options: further options of sbatch.
        max_jobs: jobs in the queue at a time, waiting or running; None: all.

    Attributes:
        running: the jobs in the queue, and the name of the array and the number of the task of each, e.g. NAME_3.
    """

    def __init__(self, sweep: "Sweep", partition: str, options: Sequence[str], max_jobs: int | None):
        self._folder, nproc = sweep.out_dir.resolve() / "slurm", sweep.inputs["nproc"]
        self._folder.mkdir(parents=True, exist_ok=True)
        processes = [f"--ntasks={nproc}"] if nproc > 1 else []
        self._options = [*_DEFAULTS, *processes, *options, f"--partition={partition}", "--open-mode=append"]
        self._max_jobs, self._polled_at = min(max_jobs or _MAX_TASKS, _MAX_TASKS), float("-inf")
        self._array_ids: dict[str, str] = {}
        self._missing_since: dict[Job, float] = {}
        with self._locked():
            self.running: dict[Job, str] = self._read_submissions(sweep)

    def update(self, wanted: Sequence["Job"]) -> dict["Job", int]:
        """Submit jobs that are not in the queue yet as one array; return the statuses of those that have ended.

        Raises:
            ConfigError: sbatch refuses the first submission.
        """
        is_due = self.running and time.monotonic() - self._polled_at >= POLL_S
        ended = self._find_ended() if is_due else {}
        new = [job for job in wanted if job not in self.running]
        self.running = {job: task for job, task in self.running.items() if job not in ended}
        if new := new[: max(0, self._max_jobs - len(self.running))]:
            self._submit(new)
        return {job: status for job, status in ended.items() if status is not None}

    def stop(self, signum: int) -> None:
        """Leave the jobs in the queue, and report how to cancel them."""
        if self.running:
            ids = " ".join(sorted({self._array_ids.get(task, "") for task in self.running.values()}))
            queued = f"{counted(len(self.running), 'job')} in the Slurm queue will continue"
            logger.warning("%s; rerun the same command to continue the sweep; to cancel: scancel %s", queued, ids)
        self.running = {}

    def _submit(self, jobs: Sequence["Job"]) -> None:
        """Submit an array. Its files precede it, so that a sweep that is killed now finds it later."""
        number, cases = len(list(self._folder.glob("*.json"))), []
        name = f"sweep-{number:04d}-{os.urandom(4).hex()}"
        stem = self._folder / name
        for index, job in enumerate(jobs):
            job.folder.mkdir(parents=True, exist_ok=True)
            console, command = shlex.quote(str(job.folder.resolve() / "console.log")), without_nproc(job.command)
            cases.append(f"{index}) console={console}; command=({shlex.join(command)}) ;;")
        script = _SCRIPT.format(stem=shlex.quote(str(stem)), cases="\n".join(cases), requeue=REQUEUE)
        with replacing(stem.with_suffix(".sh"), "w") as file:
            file.write(script)
        output = f"--output={str(stem).replace('%', '%%')}_%a.log"
        command = ["sbatch", "--parsable", *self._options, f"--job-name={name}", f"--array=0-{len(jobs) - 1}", output]
        with self._locked() as lock:
            with replacing(stem.with_suffix(".json"), "w") as file:
                json.dump([(job.trial, job.seed, job.epoch) for job in jobs], file)
            is_submitted, answer = _run(*command, str(stem.with_suffix(".sh")), locks=[lock])
        if not is_submitted and number == 0:
            stem.with_suffix(".json").unlink()
            raise ConfigError(Problem("--slurm", f"sbatch failed: {answer}"))
        tasks = {job: f"{name}_{index}" for index, job in enumerate(jobs)}
        self.running |= tasks
        if is_submitted:
            self._array_ids |= dict.fromkeys(tasks.values(), answer.partition(";")[0])
        else:  # unless squeue lists them, they are wanted again
            logger.warning("sbatch failed: %s; trying again in %.0f s", answer, LOST_S)

    def _read_submissions(self, sweep: "Sweep") -> dict["Job", str]:
        """Return the jobs of earlier sweep processes without a status; of each run the newest, others have ended."""
        newest: dict[tuple[int, int], tuple[Job, str]] = {}
        for path in sorted(self._folder.glob("*.json")):
            for index, (trial, seed, epoch) in enumerate(json.loads(path.read_text())):
                newest[trial, seed] = sweep.job(trial, seed, epoch), f"{path.stem}_{index}"
        return {job: task for job, task in newest.values() if not (self._folder / f"{task}.status").exists()}

    def _find_ended(self) -> dict["Job", int | None]:
        """Return the jobs that have ended, with their statuses: -1: lost by Slurm; None: never submitted after all."""
        self._polled_at = now = time.monotonic()
        is_answered, answer = _run("squeue", "--noheader", "--array", "--me", "--format=%F %j_%K")
        if not is_answered:  # the jobs may still be in the queue
            logger.warning("squeue failed: %s", answer)
        queued = {task: array for array, _, task in (line.partition(" ") for line in answer.splitlines())}
        self._array_ids |= queued if is_answered else {}
        missing = [job for job, task in self.running.items() if task not in queued and is_answered]
        self._missing_since = {job: self._missing_since.get(job, now) for job in missing}
        lost = [job for job in missing if now - self._missing_since[job] > LOST_S]
        ended = {job: -1 if self.running[job] in self._array_ids else None for job in lost}
        for job, task in self.running.items():
            with contextlib.suppress(OSError, ValueError):
                ended[job] = int((self._folder / f"{task}.status").read_text())
        return ended

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Wait until no sbatch of this sweep is running, even one whose sweep process was killed."""
        with open_for_writing(self._folder / ".lock", "ab") as file:
            lock_file(file.fileno(), timeout_s=math.inf)
            yield file.fileno()


def _run(*command: str, locks: Sequence[int] = ()) -> tuple[bool, str]:
    """Run a command of Slurm; return True and its output, or False and the first line of its error."""
    # The sweep itself may be a job, whose variables must not reach its jobs.
    env = {name: value for name, value in os.environ.items() if name[:6] != "SLURM_" or name == "SLURM_CONF"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL,
                              pass_fds=locks, timeout=_TIMEOUT_S, start_new_session=True)  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"no answer in {_TIMEOUT_S:.0f} s"
    error = next((line.strip() for line in done.stderr.splitlines() if line.strip()), f"status {done.returncode}")
    return (True, done.stdout.strip()) if done.returncode == 0 else (False, error)
