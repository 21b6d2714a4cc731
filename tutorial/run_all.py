"""Runner for the lessons: one line per lesson with its result, its duration and the claim that it asserted.

    python tutorial/run_all.py             all lessons
    python tutorial/run_all.py p2p zero    selected lessons

The commands are those after "Run:" in the docstring of each lesson. The exit status is 1 if a lesson failed.
"""

import ast
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 120
PARTS = {
    "Part 1: communication": "p2p store collectives ring_all_reduce parameter_server",
    "Part 2: data parallelism": (
        "snsc snmc_dp mnmc_ddp_launch mnmc_ddp_mp mnmc_ddp_slurm imagenet ddp_by_hand elastic syncbn"
    ),
    "Part 3: memory": "memory amp grad_accumulation activation_checkpointing zero cpu_offload",
    "Part 4: model parallelism": "model_parallel pipeline tensor_parallel two_d",
}
LESSONS = " ".join(PARTS.values()).split()


def read_section(name, title="Run:"):
    """Return the lines of the section `title` of a lesson's docstring."""
    lines = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))).splitlines()
    rest = lines[lines.index(title) + 1 :] if title in lines else []
    return [line.strip() for line in itertools.takewhile(lambda line: line.startswith("    "), rest)]


def skip_reason(command):
    """Return why a command cannot run on this machine, or None if it can."""
    if not command.startswith("srun"):
        return None
    if not (shutil.which("srun") and shutil.which("sinfo")):
        return "srun is not installed"
    try:
        nodes = subprocess.run(["sinfo", "-h", "-t", "idle,mix", "-o", "%N"], capture_output=True, timeout=10).stdout
    except subprocess.TimeoutExpired:
        nodes = b""
    return None if nodes.strip() else "no Slurm cluster is available"


def stop(process):
    """Stop a process group: SIGTERM, on which torchrun stops its workers within 30 s, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, 40), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run(command, timeout_s=TIMEOUT_S):
    """Run a command in the repository root with this interpreter; return (exit status, stdout, stderr)."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    process = subprocess.Popen(
        shlex.split(command, comments=True),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        cwd=FOLDER.parent, start_new_session=True,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        stop(process)
        out, err = process.communicate()
        err += f"\nstopped after the time-out of {timeout_s} s"
    finally:
        stop(process)
    return process.returncode, out, err


def find_claim(out):
    """Return the last line that starts with "ok: ", or None."""
    return next((line for line in reversed(out.splitlines()) if line.startswith("ok: ")), None)


def run_lesson(name):
    """Run a lesson and print its result; return "passed", "failed" or "skipped"."""
    columns, start = shutil.get_terminal_size().columns, time.monotonic()
    for command in read_section(name):
        if reason := skip_reason(command):
            print(f"- {name:24} skipped: {reason}"[:columns], flush=True)
            return "skipped"
        status, out, err = run(command)
        claim = find_claim(out)
        if status or not claim:
            print(f"✗ {name:24} {time.monotonic() - start:5.1f} s  {command}"[:columns])
            print(*(out + err).splitlines()[-20:], f"exit status {status}", sep="\n    ", flush=True)
            return "failed"
    print(f"✓ {name:24} {time.monotonic() - start:5.1f} s  {claim}"[:columns], flush=True)
    return "passed"


def main(names):
    """Run the given lessons, or all; return the exit status."""
    if unknown := set(names) - set(LESSONS):
        sys.exit(f"unknown lesson: {', '.join(sorted(unknown))}; expected one of: {', '.join(LESSONS)}")
    results, start = [], time.monotonic()
    for title, lessons in PARTS.items():
        selected = [name for name in lessons.split() if name in names or not names]
        if selected:
            print(title)
        results += [run_lesson(name) for name in selected]
    counts = ", ".join(f"{results.count(outcome)} {outcome}" for outcome in ("passed", "skipped", "failed"))
    print(f"{counts} in {time.monotonic() - start:.0f} s")
    return 1 if "failed" in results else 0


if __name__ == "__main__":
    sys.exit(main([Path(name).stem for name in sys.argv[1:]]))
