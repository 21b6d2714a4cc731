"""TRAIN.BATCH_SIZE auto: search, config, limits of memory; the weights are those of a number set by hand."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.commands import command_module
from support.runs import TRAIN_NET, assert_same_run, run_tool, small_options

from distribuuuu import api
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.reader import read_cfg
from distribuuuu.engine import auto_batch_size
from distribuuuu.engine.auto_batch_size import Peak, list_micro_batches, search, with_number
from distribuuuu.engine.out_of_memory import OutOfMemory
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.records import memory_limits
from distribuuuu.records.run_config import hash_config, list_overrides
from distribuuuu.trainer import take_step, train_model

AUTO = ("TRAIN.BATCH_SIZE", "auto", "TRAIN.GLOBAL_BATCH_SIZE")
SIZES = [2**power for power in range(9)]


@pytest.mark.parametrize("room, expected", [(10**6, 256), (1340, 64), (1339, 32), (740, 4), (739, 2), (710, 1)])
def test_the_largest_size_that_fits_is_found_without_large_trials_that_do_not(room, expected):
    tried = []

    def measure(size: int) -> Peak | str:
        tried.append(size)
        return Peak(700 + 10 * size) if 700 + 10 * size <= 2 * room else "killed"

    assert search(SIZES, measure, lambda peak: peak.own <= room) == expected
    assert all(700 + 10 * size <= room for size in tried if size > 16)
    assert len(tried) <= 6


def test_a_trial_may_fail_and_workers_count_on_the_host():
    assert search([1, 2, 4, 8, 16], lambda size: Peak(1) if size < 16 else "killed", lambda peak: True) == 8
    said = r"TRAIN.BATCH_SIZE: .*micro-batch of 3 does not fit.*killed; fix: "
    with pytest.raises(OutOfMemory, match=said) as caught:
        search([3, 6], lambda size: "killed", lambda peak: True)
    assert caught.value.status == 1
    assert Peak(5, workers=3).used == 8 and Peak(5, workers=3, limit=9).used == 5
    assert Peak(10, 0, 100).scaled(Peak(20, 4, 300), 2.0) == Peak(30, 8, 500)


def test_the_parent_of_the_trials_creates_no_cuda_context(small_cfg, monkeypatch):
    """Its memory would be missing in the trials, and be counted twice."""
    measure_run = command_module("plan.measure_run")

    def create_context(*args: object) -> None:
        raise AssertionError("CUDA is used in the parent")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", create_context)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", create_context, raising=False)
    tried, found = [], {"peak": Peak(5, limit=9), "images": {"train": 48, "val": 37}}

    def in_fresh_process(function: Callable, *args: Any) -> Any:
        tried.append(function)
        return found.copy() if function is measure_run.measure_run else Peak(5, limit=9)

    monkeypatch.setattr(auto_batch_size, "in_fresh_process", in_fresh_process)
    monkeypatch.setattr(measure_run, "in_fresh_process", in_fresh_process)
    cfg = small_cfg(*AUTO, 8)
    with api._preserved_random_state():
        assert auto_batch_size.resolve_batch_size(cfg, take_step).TRAIN.BATCH_SIZE == 8
        assert measure_run.measure_and_plan(cfg, 2)["memory"]["of"] == "cuda"
    assert tried.count(auto_batch_size.measure_steps) >= 3 and tried[-1] is measure_run.measure_run
    with pytest.raises(AssertionError, match="CUDA is used"):
        auto_batch_size.pick_device(0)


def test_auto_needs_the_global_batch_and_is_the_only_word():
    for key, word, said in (
        ("TRAIN.BATCH_SIZE", "auto", "auto without TRAIN.GLOBAL_BATCH_SIZE; fix: set TRAIN.GLOBAL_BATCH_SIZE"),
        ("TRAIN.BATCH_SIZE", "Auto", r"got 'Auto'; expected an integer or auto \("),
        ("TEST.BATCH_SIZE", "auto", r"got 'auto'; expected an integer \("),
    ):
        with pytest.raises(ConfigError, match=f"{key} .*{said}"):
            load_cfg(None, [key, word])


def test_the_number_of_a_machine_does_not_change_the_recipe(small_cfg, tmp_path):
    cfg = small_cfg(*AUTO, 12)
    found = [with_number(cfg, number, "a reason") for number in (4, 6)]
    assert len({hash_config(one) for one in (cfg, *found)}) == 1
    assert hash_config(found[0]) != hash_config(small_cfg("TRAIN.BATCH_SIZE", 4, "TRAIN.GLOBAL_BATCH_SIZE", 12))
    assert "TRAIN.BATCH_SIZE" not in list_overrides(found[0])
    (tmp_path / "config.yaml").write_text(found[0].dump())
    assert read_cfg(str(tmp_path / "config.yaml"))[0].TRAIN.BATCH_SIZE == 4


def test_sizes_divide_the_share_and_problems_are_found_early(small_cfg):
    cfg = small_cfg(*AUTO, 12)
    assert list_micro_batches(cfg, 1) == [1, 2, 3, 4, 6, 12] and list_micro_batches(cfg, 3) == [1, 2, 4]
    assert list_micro_batches(small_cfg(*AUTO, 12, "AUG.MIXUP", 0.2), 1) == [2, 4, 6, 12]
    assert list_micro_batches(small_cfg(*AUTO, 12, "MODEL.COMPILE", "reduce-overhead"), 2) == [6]
    assert not find_run_problems(cfg, train=True)
    (problem,) = find_run_problems(cfg, train=True, nproc=5)
    assert "got 12 on 5 processes" in str(problem)
    with pytest.raises(ConfigError, match="TRAIN.BATCH_SIZE: got auto; expected a number"):
        train_model(cfg)


@pytest.mark.parametrize("names", memory_limits._GROUP_FILES, ids=["version 2", "version 1"])
def test_the_limit_of_a_control_group_is_known_without_its_file_cache(tmp_path, monkeypatch, names):
    for name, text in zip((*names, "memory.stat"), ("5000", "4000", "anon 1\ninactive_file 500\n"), strict=True):
        (tmp_path / name).write_text(text)
    (unlimited := tmp_path / "parent").mkdir()
    (unlimited / "memory.max").write_text("max")
    monkeypatch.setattr(memory_limits, "_list_memory_groups", lambda: [tmp_path, unlimited])
    assert (5000, 1500) in memory_limits.list_memory_limits() and auto_batch_size.available_memory() == 1500


@pytest.mark.slow
def test_two_processes_take_the_same_number_and_a_resume_keeps_it(image_folder, tmp_path):
    def run(out: str, *words) -> str:
        options = small_options(image_folder, tmp_path / out, "OPTIM.MAX_EPOCH", 1, *words)
        done = run_tool("train_net.py", "--nproc", 2, *options)
        assert done.returncode == 0, done.stderr
        return done.stderr

    said = run("auto", *AUTO, 8)
    assert said.count("TRAIN.BATCH_SIZE auto: micro-batch of 4: ") == 1
    assert "TRAIN.BATCH_SIZE 4: auto, the largest" in said
    run("hand", "TRAIN.BATCH_SIZE", 4, "TRAIN.GLOBAL_BATCH_SIZE", 8)
    assert_same_run(tmp_path / "auto", tmp_path / "hand")
    again = run("auto", *AUTO, 8, "OPTIM.MAX_EPOCH", 2)
    assert "TRAIN.BATCH_SIZE 4: auto, kept from the run" in again and "auto: micro-batch of" not in again


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v")
def test_a_run_with_a_limit_on_its_memory_takes_fewer_images_at_once(image_folder, tmp_path):
    large = ("TRAIN.IM_SIZE", 96, "TEST.IM_SIZE", 96, "TEST.BATCH_SIZE", 1, "MODEL.KWARGS.width", 64)
    large = (*large, "OPTIM.MAX_EPOCH", 1, "OPTIM.WARMUP_EPOCHS", 0)
    cfg = load_cfg(None, small_options(image_folder, tmp_path / "trial", *large))
    plan = auto_batch_size.plan_batches(4, 8, 1)
    peak = auto_batch_size.in_fresh_process(
        auto_batch_size.measure_steps, cfg, take_step, auto_batch_size.Launch("trial"), plan
    )
    # The address space of equal runs differs by up to 7 %, because their heaps are fragmented differently.
    limit_kib = int(peak.address_space / auto_batch_size.HEADROOM / 1024) + 250_000
    words = [sys.executable, str(TRAIN_NET), *small_options(image_folder, tmp_path / "auto", *large, *AUTO, 48)]
    command = f"ulimit -v {limit_kib} && OMP_NUM_THREADS=1 {shlex.join(words)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    number = read_cfg(str(tmp_path / "auto" / "config.yaml"))[0].TRAIN.BATCH_SIZE
    assert 2 <= number <= 24
    sizes = ("TRAIN.BATCH_SIZE", number, "TRAIN.GLOBAL_BATCH_SIZE", 48)
    train_model(load_cfg(None, small_options(image_folder, tmp_path / "hand", *large, *sizes)))
    assert_same_run(tmp_path / "auto", tmp_path / "hand")
