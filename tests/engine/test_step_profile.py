"""Parts of training steps, train --profile, and the time line at the end of a run."""

import gzip
import json
import re
from types import SimpleNamespace

import pytest
import torch
from support.batches import ALONE, CPU
from support.runs import GROUP_NORM, assert_same_run, small_options, train_model
from torch import nn
from torch.autograd import DeviceType

from distribuuuu.commands.main import start_command
from distribuuuu.data.loader import build_loader
from distribuuuu.engine.build import build_training
from distribuuuu.engine.flops import count_forward, log_utilization, measure_utilization, utilization
from distribuuuu.engine.step_profile import find_gaps


def profile(image_folder, out_dir, num: str, *words) -> int:
    args = small_options(image_folder, out_dir, *words)
    return start_command("train", "distribuuuu train", ["--profile", num, *args])


@pytest.mark.slow
def test_a_profiled_run_writes_a_trace_and_is_the_same_run(image_folder, small_cfg, tmp_path):
    assert profile(image_folder, tmp_path / "out", "3") == 0  # over the end of an epoch of four steps
    with gzip.open(tmp_path / "out/profile/trace_rank0.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert [names.count(part) for part in ("data", "forward", "backward", "optimizer")] == [3, 3, 3, 3]
    log = (tmp_path / "out/train.log").read_text()
    assert re.search(r"profile of 3 steps of [\d.]+ ms: data \d+%, forward \d+%, backward \d+%, optimizer \d+%, o", log)
    table = log[log.index("profile of") : log.index("trace, for https://ui.perfetto.dev")]
    assert "Self CPU" in table and re.search(r"aten::\w*conv\w* ", table)
    assert re.search(r"longest gaps without an operation: (\d+\.\d\d ms before [\w: ]+, ){9}\d", table)
    parts = r"\(waiting for data (\d+)%, forward (\d+)%, backward (\d+)%, optimizer (\d+)%\)"
    found = re.search(rf"time: training (\d+)% {parts}, evaluation (\d+)%, checkpoints \d+%", log)
    training, *of_training, evaluation = map(int, found.groups())
    assert max(of_training) > 0 and sum(of_training) <= training + 3 and training + evaluation <= 101, "rounded"
    train_model(small_cfg("OUT_DIR", tmp_path / "plain"))
    assert_same_run(tmp_path / "out", tmp_path / "plain")


def test_gaps_are_those_of_the_gpu_or_of_the_thread_of_the_steps():
    # fmt: off
    rows = [("forward", 1, 0, 90e3, "CPU", True), ("a", 1, 0, 5e3, "CPU", False), ("b", 1, 1e3, 2e3, "CPU", False),
            ("other", 2, 5e3, 70e3, "CPU", False), ("c", 1, 9e3, 10e3, "CPU", False), ("k", 1, 2e3, 3e3, "CUDA", False),
            ("m", 7, 2e3, 8e3, "CUDA", False), ("n", 1, 20e3, 21e3, "CUDA", False), ("data", 1, 0, 3e4, "CUDA", True)]
    events = [SimpleNamespace(name=name, thread=thread, time_range=SimpleNamespace(start=start, end=end),
                              device_type=getattr(DeviceType, kind), is_user_annotation=is_label)
              for name, thread, start, end, kind, is_label in rows]
    # fmt: on
    assert find_gaps(events, on_cuda=False) == [(4.0, "c")] and find_gaps(events, on_cuda=True) == [(12.0, "n")]


def test_the_utilization_of_a_known_card_follows_from_the_flops_and_bytes_of_the_model(small_cfg, monkeypatch, caplog):
    caplog.set_level("INFO")
    cfg = small_cfg("TRAIN.AMP", "bf16")
    loader = build_loader(cfg, ALONE, CPU, train=True)
    training = build_training(cfg, loader, loader.zero_images(2), latest=None)
    # Reads 2 x 4 inputs, 12 weights and 3 biases, writes 2 x 3 outputs; then the ReLU, which reads and writes those.
    net = nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.ReLU())
    assert count_forward(net, torch.zeros(2, 4)) == (2 * 2 * 4 * 3, 4 * (8 + 12 + 3 + 6 + 2 * 6))
    assert measure_utilization(training, 1e6) == {}, "a CPU"
    with training.task.autocast():
        counts = count_forward(training.state.model, loader.zero_images(12))
    per_image, moved = (3 * count / 12 for count in counts)
    training.state.timing.update(images=4e9, seconds=2e3)
    shares = f"{2e6 * per_image / 312e12:.0%} of the dense peak (MFU), {2e6 * moved / 2.039e12:.0%} of the memory bandw"
    for card, trains, said in (("NVIDIA A100-SXM4-80GB", True, shares), ("X", True, ""), ("NVIDIA H200", False, "")):
        next(training.state.model.parameters()).requires_grad = trains
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_name", lambda device, card=card: card)
            patch.setattr(loader, "device", torch.device("cuda"))
            patch.setattr(loader, "zero_images", lambda num: torch.zeros(num, 3, 16, 16))
            log_utilization(training)
        assert said in caplog.text and bool(said) == bool(caplog.text)
        caplog.clear()
    found = utilization("NVIDIA H200", "none", 1e9, 1e6, 4e4)
    assert (found["mfu"], found["bandwidth"]) == pytest.approx((3e9 * 4e4 / 494.5e12, 3e6 * 4e4 / 4.8e12))
    assert found["utilization"].endswith("; the nearer limit is the peak")


@pytest.mark.parametrize("num, flags, left", [("6", (), 8), ("2", ("--stop-epoch", "1"), 4)])
def test_a_run_that_is_too_short_is_not_profiled(image_folder, tmp_path, capsys, num, flags, left):
    args = [*flags, "--profile", num, *small_options(image_folder, tmp_path / "out")]
    assert start_command("train", "distribuuuu train", args) == 2
    assert f"--profile: got {num}; the run has {left} steps left, and the first 3 are not" in capsys.readouterr().err


def test_a_run_that_ends_before_the_last_profiled_step_says_so(small_cfg, tmp_path):
    train_model(small_cfg(*GROUP_NORM, "OPTIM.MAX_EPOCH", 3, "TRAIN.PATIENCE", 1, "OPTIM.BASE_LR", 1e-9), profile=7)
    assert "--profile: no trace; this start took fewer than 10 steps" in (tmp_path / "out/train.log").read_text()
    assert not [*tmp_path.glob("out/profile/*")] and not torch.autograd._profiler_enabled()
