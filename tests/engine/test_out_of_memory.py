"""Out-of-memory errors name the process, the memory and the options to change; no checkpoint is lost."""

import re

import pytest
import torch
from support.failing_models import Idle, hungry
from support.runs import FAILING_MODELS, TRAIN_NET, run_tool, small_options

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config.registry import MODELS
from distribuuuu.engine.run import OutOfMemory, is_out_of_memory
from distribuuuu.trainer import evaluate_weights as evaluate_run
from distribuuuu.trainer import train_model

CPU_SAID = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
TRAINING = r"a smaller TRAIN.BATCH_SIZE .*MODEL.ACT_CHECKPOINT.*TRAIN.AMP.*fsdp"


class HungryInEvaluation(Idle):
    """A net whose evaluation of more than one image fails for want of memory."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) if self.training or len(images) == 1 else torch.empty(2**52)


@pytest.fixture(autouse=True)
def hungry_models(monkeypatch):
    assert "resnet8" in MODELS
    monkeypatch.setitem(MODELS._table, "hungry", hungry)
    monkeypatch.setitem(MODELS._table, "hungry_in_evaluation", HungryInEvaluation)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--nproc", 2, "MODEL.KWARGS.rank", 1)], ids=["alone", "one of two"])
def test_a_step_that_runs_out_of_memory_ends_the_run_with_one_message(image_folder, tmp_path, words):
    hungry = ("MODEL.ARCH", "hungry", "CHECKPOINT.EVERY_STEPS", 2, "TRAIN.GLOBAL_BATCH_SIZE", 12)
    words = [*words, *small_options(image_folder, tmp_path / "out", *hungry)]
    done = run_tool(FAILING_MODELS, TRAIN_NET, *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("out of memory") == 1
    assert re.search(f"out of memory: hungry, process .*{TRAINING}", done.stderr)
    assert CPU_SAID in done.stderr
    assert (tmp_path / "out" / "train.log").read_text().count("out of memory") == 1
    newest = CheckpointManager(tmp_path / "out").find_latest()
    if words[0] == "--nproc":  # the main process, asked to end, gives its save two seconds
        assert newest.name in ("ckpt_ep_000_step_000001.pth.tar", "ckpt_ep_000_step_000002.pth.tar")
    else:
        assert newest.name == "ckpt_ep_000_step_000002.pth.tar", "a save that was under way is whole"


def test_an_evaluation_says_so_and_the_epoch_is_kept(small_cfg):
    cfg = small_cfg("MODEL.ARCH", "hungry_in_evaluation")
    said = r"memory: \w+, process 0 on .*TEST.BATCH_SIZE"
    with pytest.raises(OutOfMemory, match=said):
        train_model(cfg)
    (saved,) = CheckpointManager(cfg.OUT_DIR).list()
    assert saved.name == "ckpt_ep_000_step_000004.pth.tar"
    with pytest.raises(OutOfMemory, match=said):
        evaluate_run(small_cfg("MODEL.ARCH", "hungry_in_evaluation", "MODEL.WEIGHTS", saved))


@pytest.mark.parametrize(("error", "is_one"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True), (MemoryError(), True),
    (RuntimeError("CUDA error: out of memory"), True), (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False), (ValueError("out of memory"), False),
])  # fmt: skip
def test_what_counts_as_out_of_memory(error, is_one):
    assert is_out_of_memory(error) is is_one
