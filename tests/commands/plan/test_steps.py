"""plan --steps: measurements, diagnosis of the bottleneck; the warning about waiting for data."""

import json
import subprocess
import types

import pytest
import torch
from support.processes import on_processes
from support.runs import run_python, run_tool, small_options
from support.tables import slow

from distribuuuu.commands.plan import steps as measurement
from distribuuuu.config import load_cfg

PARTS = ("forward_backward", "optimizer", "step", "loader", "together")


def hurry(monkeypatch=None) -> None:
    for name, seconds in {"MEASURE_S": 0.04, "BLOCK_S": 0.02, "WARM_UP_S": 0.01}.items():
        (monkeypatch.setattr if monkeypatch else setattr)(measurement, name, seconds)


def run_hurried(*args) -> subprocess.CompletedProcess:
    """Run tools/time_net.py in a process of its own, each part for a moment."""
    code = (
        "import runpy, sys\nimport distribuuuu.commands.plan.steps as timing\n"
        "timing.MEASURE_S, timing.BLOCK_S, timing.WARM_UP_S = 0.04, 0.02, 0.01\n"
        f"sys.argv = ['time_net.py', *{[str(arg) for arg in args]!r}]\n"
        "runpy.run_path('tools/time_net.py', run_name='__main__')\n"
    )
    return run_python("-c", code)


def check_result(result: dict, num_processes: int, global_batch: int) -> None:
    assert result["processes"] == num_processes
    for name in PARTS:
        part = result[name]
        assert part["images_per_s"] == pytest.approx(part["images"] / part["seconds"]) and part["seconds"] > 0
        assert part["images"] == global_batch
    assert 0 <= result["wait"] <= 1 and ("not_exchanged" in result) == (num_processes > 1)


@pytest.mark.slow
def test_the_tool_shows_every_part_and_touches_no_run(image_folder, tmp_path):
    out_dir = tmp_path / "out"
    args = small_options(image_folder, out_dir, "OPTIM.MAX_EPOCH", 1)
    assert run_tool("train_net.py", *args).returncode == 0
    before = {path: path.read_bytes() for path in out_dir.rglob("*") if path.is_file()}
    done = run_hurried(*args, "TRAIN.WORKERS", 1, "MODEL.WEIGHTS", out_dir / "best.pth.tar")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stderr for name in measurement._NAMES.values()) and "resumed" not in done.stderr
    table = done.stderr[done.stderr.index("per step") : done.stderr.index("finished in")]
    assert max(map(len, table.splitlines())) <= 80
    after = {path: path.read_bytes() for path in out_dir.rglob("*") if path.is_file()}
    result = json.loads(after.pop(out_dir / "timing.json"))
    assert after == before
    check_result(result, 1, 12)


@pytest.mark.parametrize("args", [["TRAIN.WORKERS", 2, "DATA.WORKER_KIND", "thread"],
                                  slow(["DATA.LOADER", "device", "TRAIN.GLOBAL_BATCH_SIZE", 24])])  # fmt: skip
def test_every_kind_of_loader_is_measured(small_cfg, monkeypatch, args):
    hurry(monkeypatch)
    cfg = small_cfg(*args)
    result = measurement.measure_steps(cfg)
    check_result(result, 1, 24 if "TRAIN.GLOBAL_BATCH_SIZE" in args else 12)
    bound = result["verdict"].split(":")[0]
    assert bound in ("loader-bound", "model-bound", "balanced")
    is_slow = result["loader"]["images_per_s"] < 2 * result["step"]["images_per_s"]
    assert (bound == "loader-bound") == (is_slow and result["wait"] >= measurement.MAX_DATA_FRACTION)
    assert result["workers"] == (cfg.TRAIN.WORKERS if cfg.DATA.LOADER == "host" else 0)


def time_on_process(args: list[str]) -> dict:
    hurry()
    return measurement.measure_steps(load_cfg(None, args))


@pytest.mark.slow
def test_two_processes_measure_the_same_and_their_exchange(image_folder, tmp_path):
    args = small_options(image_folder, tmp_path / "out", "MODEL.SYNCBN", True, "TRAIN.WORKERS", 1)
    results = on_processes(2, time_on_process, [*args, "DIST.COMPRESS", "bf16"])
    for result in results:
        check_result(result, 2, 24)
    assert results[0] == results[1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["timing.json"]


def test_calls_are_timed_when_compiling_and_recording_are_over(monkeypatch):
    now, calls = [0.0], []

    def call():
        calls.append(now[0])
        now[0] += {1: 60.0, 2: 5.0, 3: 1.0}.get(len(calls), 0.01)

    monkeypatch.setattr(measurement, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    assert measurement.time_calls(call, torch.device("cpu")) == pytest.approx(0.01)
    assert len(calls) > 100, "a block is as long as the calls are fast"


class Files(list):
    has_files, holds_files = True, False


@pytest.mark.parametrize("speeds, workers, most, words, said", [
    ((38, 410, 0.01), 4, 4, "", "model-bound: the model processes 38, the loader provides 410 images/s"),
    ((91, 235, 0.15), 1, 2, "", "model-bound: "),
    ((1000, 950, 0.07), 2, 8, "", "balanced: "),
    ((3100, 2400, 0.25), 4, 8, "", "fix: TRAIN.WORKERS 6, a packed data set (distribuuuu pack), DATA.LOADER device"),
    ((3100, 2400, 0.25), 4, 5, "", "fix: TRAIN.WORKERS 5, "),
    ((3100, 2400, 0.25), 8, 8, "DATA.NAME packed", "fix: DATA.LOADER device or an option of "),
    ((3100, 1000, 0.75), 0, 8, "TRAIN.IM_SIZE 9999 TEST.IM_SIZE 9999", "WORKERS 4, a packed data set (distribuuuu"),
    ((3000, 950, 0.7), 0, 0, "DATA.LOADER device", "fix: DATA.LOADER host"),
])  # fmt: skip
def test_the_diagnosis_follows_from_the_measured_speeds(speeds, workers, most, words, said):
    diagnosis = measurement.diagnose_bottleneck(load_cfg(None, words.split()), Files([0] * 9), *speeds, workers, most)
    assert said in diagnosis, diagnosis
