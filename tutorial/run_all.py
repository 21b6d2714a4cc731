"""Run the lessons on this machine, in the order of the course: a tick, the seconds, and what the lesson asserted.

    python tutorial/run_all.py             all of them
    python tutorial/run_all.py p2p zero    some of them

What is run is what the docstring of a lesson says after "Run:". The exit status is 1 if a lesson failed.
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
    "Part 1: talking": "p2p store collectives ring_all_reduce parameter_server",
    "Part 2: training": "snsc snmc_dp mnmc_ddp_launch mnmc_ddp_mp mnmc_ddp_slurm imagenet ddp_by_hand elastic syncbn",
    "Part 3: fitting": "memory amp grad_accumulation activation_checkpointing zero cpu_offload",
    "Part 4: splitting the model": "model_parallel pipeline tensor_parallel two_d",
}
LESSONS = " ".join(PARTS.values()).split()


def commands_of(name, title="Run:"):
    """Return the lines of a section of a lesson's docstring: the commands that run it, or "Also:", or "Look at:"."""
    lines = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))).splitlines()
    rest = lines[lines.index(title) + 1 :] if title in lines else []
    return [line.strip() for line in itertools.takewhile(lambda line: line.startswith("    "), rest)]


def why_not(command):
    """Return why a command cannot run on this machine, or None if it can."""
    if not command.startswith("srun"):
        return None
    if not (shutil.which("srun") and shutil.which("sinfo")):
        return "there is no srun here"
    try:
        nodes = subprocess.run(["sinfo", "-h", "-t", "idle,mix", "-o", "%N"], capture_output=True, timeout=10).stdout
    except subprocess.TimeoutExpired:
        nodes = b""
    return None if nodes.strip() else "srun reaches no Slurm cluster"


def end(process):
    """End a process group: SIGTERM lets a launcher end its workers, which torchrun does within 30 s; then SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, 40), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run(command, timeout_s=TIMEOUT_S):
    """Run a command from the repository's root with this interpreter; return (exit status, stdout, stderr)."""
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
        end(process)
        out, err = process.communicate()
        err += f"\nended after {timeout_s} s, its time-out"
    finally:
        end(process)
    return process.returncode, out, err


def claim_of(out):
    """Return the last line of an output that starts with "ok: ", or None."""
    return next((line for line in reversed(out.splitlines()) if line.startswith("ok: ")), None)


def run_lesson(name):
    """Run a lesson, print its line, and the end of its output if it failed; return "passed", "failed" or "skipped"."""
    columns, start = shutil.get_terminal_size().columns, time.monotonic()
    for command in commands_of(name):
        if reason := why_not(command):
            print(f"- {name:24} skipped: {reason}"[:columns], flush=True)
            return "skipped"
        status, out, err = run(command)
        claim = claim_of(out)
        if status or not claim:
            print(f"✗ {name:24} {time.monotonic() - start:5.1f} s  {command}"[:columns])
            print(*(out + err).splitlines()[-20:], f"exit status {status}", sep="\n    ", flush=True)
            return "failed"
    print(f"✓ {name:24} {time.monotonic() - start:5.1f} s  {claim}"[:columns], flush=True)
    return "passed"


def main(names):
    """Run the lessons of these names, or all."""
    if unknown := set(names) - set(LESSONS):
        sys.exit(f"no lesson is called {', '.join(sorted(unknown))}; there are: {', '.join(LESSONS)}")
    results, start = [], time.monotonic()
    for title, lessons in PARTS.items():
        chosen = [name for name in lessons.split() if name in names or not names]
        if chosen:
            print(title)
        results += [run_lesson(name) for name in chosen]
    counts = ", ".join(f"{results.count(word)} {word}" for word in ("passed", "skipped", "failed"))
    print(f"{counts} in {time.monotonic() - start:.0f} s")
    return 1 if "failed" in results else 0


if __name__ == "__main__":
    sys.exit(main([Path(name).stem for name in sys.argv[1:]]))
