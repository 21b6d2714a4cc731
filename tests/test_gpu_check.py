"""benchmarks/gpu_check.py: its verdicts, exit status and comparisons, what it checks on a CPU; gpu.py without a GPU."""

import re
from pathlib import Path

import gpu_check
import pytest
import torch
from bench_support.small_training import draw_images
from support.runs import ROOT, run_python


def save_weights(out_dir: Path, value: float) -> Path:
    (out_dir / "checkpoints").mkdir(parents=True)
    content = {"state_dict": {"weight": torch.full((2,), value)}, "epoch": 0}
    torch.save(content, out_dir / "checkpoints" / "ckpt_ep_001.pth.tar")
    return out_dir


def test_weights_are_compared_with_a_tolerance(tmp_path):
    one, other = save_weights(tmp_path / "one", 1.0), save_weights(tmp_path / "other", 1.5)
    assert gpu_check.compare("check", one, one, 0.0)[3] is True
    assert gpu_check.compare("check", one, other, 0.5)[3] is True
    assert gpu_check.compare("check", one, other, 0.4)[1:] == (
        "weights differ by 0.5", "weights differ by at most 0.4", False,
    )  # fmt: skip
    assert gpu_check.compare("check", one, tmp_path / "none", 1.0)[3] is False


def test_batches_on_the_device_have_the_pixels_of_the_host(tmp_path):
    draw_images(tmp_path / "data")
    assert [passed for *_, passed in gpu_check.check_batches(tmp_path)] == [True, True]


@pytest.mark.slow
def test_the_end_of_a_process_is_noticed(tmp_path):
    draw_images(tmp_path / "data")
    assert [passed for *_, passed in gpu_check.check_killed_rank(tmp_path)] == [True]


@pytest.mark.slow
def test_the_loops_are_compared_without_a_gpu():
    """Each step is logged, like the first one of a block that begins more than 15 seconds after the last block."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import gpu; sys.exit(gpu.main())"
    words = "--device cpu --arch resnet8 --im-size 32 --batch 8 --classes 10 --steps 3 --blocks 2 --threads 1"
    log_all = "from distribuuuu.records import run_log; run_log.LOG_INTERVAL_S = 0;"
    done = run_python("-c", log_all + code, *words.split(), "--no-compile")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ours +\d+\.\d", done.stdout, re.MULTILINE) and "no bar: no reference script ran" in done.stdout
