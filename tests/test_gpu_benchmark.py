"""The end-to-end measurement of benchmarks/gpu.py: its blocks of batches, and its output without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_support.gpu_end_to_end import BlockLoader

from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch

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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_block_is_read_across_epochs_and_leaves_the_workers_idle(small_cfg, num_workers):
    options = ("TRAIN.BATCH_SIZE", 12, "DATA.WORKER_KIND", "thread", "TRAIN.WORKERS")
    alone, loader = (
        build_loader(small_cfg(*options, num), Launch("alone"), torch.device("cpu"), True) for num in (0, num_workers)
    )
    epochs = [[images for images, *_ in alone.batches_from(0, epoch, 0)] for epoch in range(6)]
    blocks, workers = BlockLoader(loader, num_workers, num_steps=3), loader._batches.pool
    num_epochs = {0: 1, 2: 3}[num_workers]  # 3 batches, or 3 and 4 before and after them; an epoch has 4
    for number in range(2):
        blocks.begin_block()
        assert not workers._pending, "no batch is made before its block"
        blocks.skip_batches()
        taken = [next(blocks.batches_from(0, 0, 0))[0] for _ in range(3)]
        # With workers, the last batch taken ends the second epoch of the block.
        ahead = [one.sampler.epoch % num_epochs for one, _ in workers._pending]
        assert ahead == [2] * blocks.num_ahead, "the workers run ahead into the next epoch"
        expected = sum(epochs[number * num_epochs : (number + 1) * num_epochs], [])[1:][blocks.num_ahead :][:3]
        assert all(map(torch.equal, taken, expected))
        assert blocks.pop_data_time() > 0
        blocks.finish_block()
        assert not workers._pending and next(blocks.batches_from(0, 0, 0), None) is None


@pytest.mark.slow
@pytest.mark.parametrize("source, flags", [("synthetic", "--images 16 --packed"), ("folder", "--worker-kind thread")])
def test_the_loader_is_measured_with_the_model_and_alone(image_folder, source, flags):
    folder = str(image_folder) if source == "folder" else source
    run = run_script("--loader", folder, "--workers", "2", *flags.split())
    assert run.returncode == 0, run.stderr
    _, _, text = run.stdout.partition("\nend to end: ")
    assert "2 blocks of 4 steps" in text, "rounded up to a multiple of the workers"
    names = re.findall(r"^(\w[\w, ]*\w) +\d+\.\d +\d+\.\d{3} \(", text, re.MULTILINE)
    assert names == ["ours, no loader", "loader alone", "ours with loader"]
    assert re.search(r"^waiting for data: \d+\.\d% \(", text, re.MULTILINE)
    assert "(ideal: 1.00); no bar: this is not a GPU, so the workers and the step share the cores" in text


@pytest.mark.slow
def test_images_that_do_not_fit_the_arguments_are_an_error_without_a_traceback(image_folder):
    run = run_script("--loader", str(image_folder), "--batch", "49")
    assert run.returncode and "expected at most 48" in run.stderr and "Traceback" not in run.stderr, run.stderr
