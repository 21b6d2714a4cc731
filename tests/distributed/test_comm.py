"""Collectives, and buckets and compression of gradients."""

import pytest
import torch
from support.processes import on_processes
from support.runs import small_options

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import load_cfg
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import process_group
from distribuuuu.launch.detect import detect_launch
from distribuuuu.trainer import train_model


def group_of_a_barrier() -> tuple[str, bool]:
    with process_group(detect_launch(), torch.device("cpu"), 60), pytest.MonkeyPatch.context() as patch:
        used = []
        patch.setattr(dist.torch_dist, "barrier", lambda group=None: used.append(group))
        dist.barrier()
        return torch.distributed.get_backend(used[0]), used[0] is not None


def test_a_barrier_needs_no_device():
    """nccl would have to guess the device, and says so."""
    assert on_processes(2, group_of_a_barrier) == [("gloo", True)] * 2


def test_buckets_and_compression_of_gradients(image_folder, tmp_path):
    """Two numbers have one sum, whatever the buckets; shorter numbers round it."""
    weights = {}
    for name, words in {
        "plain": (), "small": ("DIST.BUCKET_MB", 0.01), "bf16": ("DIST.COMPRESS", "bf16"),
        "fp16": ("DIST.COMPRESS", "fp16"),
    }.items():  # fmt: skip
        settings = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "OPTIM.MAX_EPOCH", 1, *words)
        on_processes(2, train_model, load_cfg(None, small_options(image_folder, tmp_path / name, *settings)))
        weights[name] = read_checkpoint(tmp_path / name / "best.pth.tar")["state_dict"]
    plain = weights.pop("plain")
    assert all(torch.equal(plain[key], weights["small"][key]) for key in plain)
    for name in ("bf16", "fp16"):
        difference = max((plain[key] - weights[name][key]).abs().max().item() for key in plain if "num" not in key)
        assert 0 < difference < 0.01, name
