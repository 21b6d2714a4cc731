"""benchmarks/gpu.py: its output without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"
SMALL = "--device cpu --arch resnet8 --im-size 32 --batch 8 --classes 10 --steps 3 --blocks 2 --threads 1 --no-compile"


# Each step is logged, like the first one of a block that begins more than 15 seconds after the last block.
START = (
    "import runpy, sys; sys.path.insert(0, {!r}); from distribuuuu.records import run_log; run_log.LOG_INTERVAL_S = 0"
)


def run_script(*args: str) -> subprocess.CompletedProcess:
    code = f"{START.format(str(SCRIPT.parent))}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, *SMALL.split(), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_loops_are_compared_without_a_gpu():
    run = run_script()
    assert run.returncode == 0, run.stderr
    assert re.search(r"^ours +\d+\.\d", run.stdout, re.MULTILINE) and "no bar: no reference script ran" in run.stdout
