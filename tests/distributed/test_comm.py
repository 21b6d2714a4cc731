"""Devices and the traffic of gradients."""

import contextlib

import pytest
import torch
from support.processes import on_processes
from support.runs import small_options

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.distributed import comm as dist
from distribuuuu.launch.detect import Launch, detect_launch
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


def enter(monkeypatch, backend: str, world_size: int = 2, shard: str = "none") -> dict:
    """Return what torch's process group is asked for on a machine that pretends to have GPUs."""
    asked = {}

    class Asked(Exception):
        """Ends what comes after."""

    def ask(**words):
        asked.update(words)
        raise Asked

    class Properties:
        uuid = "0000"

    monkeypatch.setattr(dist, "meet", lambda launch, timeout_s: torch.distributed.HashStore())
    monkeypatch.setattr(dist, "refuse_shared_device", lambda *words: asked.update(refused=words))
    monkeypatch.setattr(dist, "_watched", lambda *words: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.distributed, "init_process_group", ask)
    launch = Launch("test", 0, 0, world_size, "127.0.0.1", 1)
    with contextlib.suppress(Asked):
        dist.process_group(launch, torch.device("cuda", 1), 10, backend, shard=shard).__enter__()
    return asked


def test_nccl_is_told_its_device_and_has_it_alone(monkeypatch):
    asked = enter(monkeypatch, "auto", shard="fsdp")
    assert asked["backend"] == "nccl" and asked["device_id"] == torch.device("cuda", 1)
    assert asked["refused"][2] == "GPU 0000"
    asked = enter(monkeypatch, "gloo")
    assert asked["backend"] == "gloo" and asked["device_id"] is None and "refused" not in asked


@pytest.mark.parametrize("shard", ["zero1", "fsdp"])
def test_gloo_does_not_send_shards_of_cuda_tensors(monkeypatch, shard):
    with pytest.raises(ConfigError, match=f"DIST.BACKEND: gloo on CUDA does not go with DIST.SHARD {shard}.*use nccl"):
        enter(monkeypatch, "gloo", shard=shard)
    assert enter(monkeypatch, "gloo", world_size=1, shard=shard) == {}


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
