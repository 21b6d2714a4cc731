"""Scripts of benchmarks: certificates of the loop, what gpu_check.py checks on a CPU, gpu.py without a GPU."""

import json
import re
import subprocess

import certificates
import gpu_check
import pytest
from bench_support import gpu_speed
from bench_support.small_training import draw_images
from support.runs import ROOT, run_python

pytestmark = pytest.mark.slow
NAMES = list(certificates.CERTIFICATES)
# The benchmark trains 50 steps, the tests 30: with 10 in an epoch, each schedule has changed the rate by then.
NUM_STEPS = 30
HAS_AVERAGE = {name: entry.reference.average_decay is not None for name, entry in certificates.CERTIFICATES.items()}
# Each difference in one certificate: the first one that has an average.
PLANTED = [(next(name for name in NAMES if HAS_AVERAGE[name]), planted) for planted in certificates.PLANTED]


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_trains_as_the_reference(name, monkeypatch):
    if "float16" in name:  # takes a minute with larger images: convolutions in float16 are slow on a CPU
        monkeypatch.setitem(certificates.COMMON, "TRAIN.IM_SIZE", 16)
    found = certificates.certify(name, NUM_STEPS)
    assert found.steps == NUM_STEPS and found.largest <= certificates.CERTIFICATES[name].tolerance, found


@pytest.mark.parametrize(("name", "planted"), PLANTED)
def test_a_planted_difference_is_found(name, planted):
    found = certificates.certify(name, NUM_STEPS, planted)
    assert found.largest > certificates.CERTIFICATES[name].tolerance, found


def test_batches_on_the_device_have_the_pixels_of_the_host(tmp_path):
    draw_images(tmp_path / "data")
    assert [passed for *_, passed in gpu_check.check_batches(tmp_path)] == [True, True]


def test_the_end_of_a_process_is_noticed(tmp_path):
    draw_images(tmp_path / "data")
    assert [passed for *_, passed in gpu_check.check_killed_rank(tmp_path)] == [True]


def test_what_applies_without_a_gpu_is_measured(tmp_path, monkeypatch):
    for name in ("MEASURE_S", "WARM_UP_S"):  # the check sets them
        monkeypatch.setattr(gpu_speed.steps, name, 0.1)
    for check in (gpu_speed.check_gaps, gpu_speed.check_jpegs, gpu_speed.check_resnet20):
        lines = list(check(tmp_path))
        assert lines and all(passed is None and re.search(r"\d", seen) for _, seen, _, passed in lines), lines
    skipped = [*gpu_speed.check_airbench(tmp_path, None, None), *gpu_speed.check_devices(tmp_path, print, print)]
    assert [passed for *_, passed in skipped] == [None, None]


def test_traces_are_read():
    kernels = [{"ph": "X", "cat": "kernel", "ts": start, "dur": 1000, "name": "k"} for start in (0, 500, 4500, 6000)]
    labels = [{"ph": "X", "cat": "user_annotation", "ts": 0, "dur": 3000, "name": name} for name in ("data", "forward")]
    launches = [{"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 1, "name": "cudaLaunchKernel"}] * 4
    found = gpu_speed.read_trace([*kernels, *labels, *launches, {"ph": "M", "name": "x"}], 2)
    assert found == {"busy": 3.5 / 7, "launches": 2, "host_ms": 1.5, "gaps_ms": [3.0, 0.5]}


def test_the_seconds_of_airbench_are_those_of_all_epochs_but_the_first(tmp_path):
    printed = (("epoch", "time"), (0, 0.5), (1, 1.25), (2, 2.0), ("eval", 2.5))
    rows = "".join(f"|  0  |  {epoch}  |  1.5  |  0.9  |  0.9  |  0.94  |  {time}  |\n" for epoch, time in printed)
    assert gpu_speed.read_author(2 * rows) == [(1.5, 94.0, 0.0)] * 2
    row = {"kind": "train", "step": 9, "wait": 0.5, "count": 8, "images_per_s": 4.0}
    records = [row | {"epoch": epoch, "time": time} for epoch, time in ((1, 10.0), (1, 20.0), (2, 23.0), (3, 30.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (tmp_path / "results.json").write_text(json.dumps({"accuracy": {"raw": {"last": {"top1": 94.0}}}}))
    assert gpu_speed.read_run(tmp_path) == (10.0, 94.0, 0.2)


def test_a_check_that_hangs_fails(tmp_path):
    def check_sleep(folder):
        yield subprocess.run(["sleep", "600"], check=True)

    ((*_, seen, _, passed),) = gpu_check.catching(check_sleep, tmp_path, 0.2)
    assert (seen, passed) == ("timeout: 0 s are over", False)


def test_the_loops_are_compared_without_a_gpu():
    """Each step is logged, like the first one of a block that begins more than 15 seconds after the last block."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import gpu; sys.exit(gpu.main())"
    words = "--device cpu --arch resnet8 --im-size 32 --batch 8 --classes 10 --steps 3 --blocks 2 --threads 1"
    log_all = "from distribuuuu.records import run_log; run_log.LOG_INTERVAL_S = 0;"
    done = run_python("-c", log_all + code, *words.split(), "--no-compile")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ours +\d+\.\d", done.stdout, re.MULTILINE) and "no bar: no reference script ran" in done.stdout
