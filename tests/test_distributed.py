"""Devices and the traffic of gradients."""

import pytest
import torch
from conftest import on_processes, small_words

from distribuuuu import distributed as dist
from distribuuuu.checkpoint_file import read_checkpoint
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.launch import Launch, detect_launch
from distribuuuu.trainer import train_model


@pytest.mark.parametrize("visible, local_rank, index", [(8, 3, 3), (1, 3, 0), (2, 1, 1)])
def test_a_process_takes_its_own_card_or_the_only_one_it_sees(monkeypatch, visible, local_rank, index):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert dist.pick_device(local_rank) == torch.device("cuda", index) == chosen[0]


def test_more_processes_than_cards_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="process 3 of this node has no GPU: 2 are visible"):
        dist.pick_device(2)


def test_a_backend_that_the_device_lacks_is_an_error():
    group = dist.process_group(Launch("test"), torch.device("cpu"), 10, "nccl")
    with pytest.raises(ConfigError, match="DIST.BACKEND: nccl needs CUDA"):
        group.__enter__()


def group_of_a_barrier() -> tuple[str, bool]:
    with dist.process_group(detect_launch(), torch.device("cpu"), 60), pytest.MonkeyPatch.context() as patch:
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
        on_processes(2, train_model, load_cfg(None, small_words(image_folder, tmp_path / name, *settings)))
        weights[name] = read_checkpoint(tmp_path / name / "best.pth.tar")["state_dict"]
    plain = weights.pop("plain")
    assert all(torch.equal(plain[key], weights["small"][key]) for key in plain)
    for name in ("bf16", "fp16"):
        difference = max((plain[key] - weights[name][key]).abs().max().item() for key in plain if "num" not in key)
        assert 0 < difference < 0.01, name
