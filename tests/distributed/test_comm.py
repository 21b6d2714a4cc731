"""Collectives, and buckets and compression of gradients."""

from pathlib import Path

import pytest
import torch
from support.processes import on_processes
from support.runs import small_options
from torch import nn

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import load_cfg
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import broadcast_buffers
from distribuuuu.distributed.process_group import process_group
from distribuuuu.launch.detect import detect_launch
from distribuuuu.trainer import train_model


def use_collectives(log: Path) -> tuple[list[torch.Tensor], list[float], str, str]:
    """Return the buffers of a model, means, whether this process fetched a file or read it, and the error of rank 0."""

    def fetch() -> str:
        if log.exists():
            return "read"
        log.write_text("here")
        return "fetched"

    with process_group(detect_launch(), torch.device("cpu"), 60):
        model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(2))
        for number, buffer in enumerate(model.buffers()):
            buffer.fill_(10 * dist.rank() + number)
        broadcast_buffers(model)
        mean, ones = dist.scaled_all_reduce([torch.tensor([float(dist.rank())]), torch.ones(2)])
        fetched = dist.local_main_first(fetch)
        with pytest.raises((ZeroDivisionError, dist.PeerError)) as raised:
            dist.local_main_first(lambda: 1 / 0)
        error = f"{raised.type.__name__}: {raised.value}"
        return list(model.buffers()), [mean.item(), *ones.tolist()], fetched, error


def test_collectives_of_three_processes(tmp_path):
    for rank, (buffers, means, fetched, error) in enumerate(on_processes(3, use_collectives, tmp_path / "log")):
        assert [buffer.shape for buffer in buffers] == [(3,), (3,), (), (2,), (2,), ()]
        assert all(bool((buffer == number).all()) for number, buffer in enumerate(buffers)), "those of the main one"
        assert means == [1.0, 1.0, 1.0]
        assert fetched == ("read" if rank else "fetched")
        assert error == ("PeerError" if rank else "ZeroDivisionError") + ": division by zero"


def test_buckets_and_compression_of_gradients(image_folder, tmp_path):
    """Shorter numbers round the sums, whatever the buckets."""
    weights = {}
    for name, words in {"plain": (), "fp16": ("DIST.COMPRESS", "fp16", "DIST.BUCKET_MB", 0.01)}.items():
        settings = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "OPTIM.MAX_EPOCH", 1, *words)
        on_processes(2, train_model, load_cfg(None, small_options(image_folder, tmp_path / name, *settings)))
        weights[name] = read_checkpoint(tmp_path / name / "best.pth.tar")["state_dict"]
    plain = weights["plain"]
    difference = max((plain[key] - weights["fp16"][key]).abs().max().item() for key in plain if "num" not in key)
    assert 0 < difference < 0.01
