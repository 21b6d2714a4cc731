"""TRAIN.BATCH_SIZE auto: search, config; the weights are those of a number set by hand."""

from collections.abc import Callable

import pytest
from support.runs import assert_same_run, run_tool, small_options

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.engine import auto_batch_size
from distribuuuu.engine.auto_batch_size import Peak, list_micro_batches
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.engine.run import OutOfMemory
from distribuuuu.trainer import take_step, train_model

AUTO = ("TRAIN.BATCH_SIZE", "auto", "TRAIN.GLOBAL_BATCH_SIZE")


@pytest.mark.parametrize("room, expected", [(10**6, 12), (70, 6), (69, 4), (20, 1), (19, 0)])
def test_the_largest_size_that_fits_is_found(small_cfg, monkeypatch, room, expected):
    def in_fresh_process(function: Callable, cfg, take_step, launch, plan) -> Peak | str:
        assert plan.global_batch == min(2 * plan.micro_batch, 12)
        return "killed" if plan.micro_batch == 12 and room < 10**6 else Peak(10 * plan.micro_batch + 10)

    monkeypatch.setattr(auto_batch_size, "in_fresh_process", in_fresh_process)
    monkeypatch.setattr(auto_batch_size, "available_memory", lambda: room / auto_batch_size.HEADROOM)
    cfg = small_cfg(*AUTO, 12)
    if expected:
        assert auto_batch_size.resolve_batch_size(cfg, take_step).TRAIN.BATCH_SIZE == expected
    else:
        with pytest.raises(OutOfMemory, match=r"TRAIN.BATCH_SIZE: .*micro-batch of 1 does not fit.*; fix: ") as caught:
            auto_batch_size.resolve_batch_size(cfg, take_step)
        assert caught.value.status == 1


def test_auto_needs_the_global_batch_and_is_the_only_word():
    for key, word, said in (
        ("TRAIN.BATCH_SIZE", "auto", "auto; it needs TRAIN.GLOBAL_BATCH_SIZE"),
        ("TRAIN.BATCH_SIZE", "Auto", r"got 'Auto'; expected an integer or auto \("),
        ("TEST.BATCH_SIZE", "auto", r"got 'auto'; expected an integer \("),
    ):
        with pytest.raises(ConfigError, match=f"{key} .*{said}"):
            load_cfg(None, [key, word])


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
