"""Process group: devices, rendezvous, missing processes; collectives, and batch norm over processes."""

import contextlib
import copy
import functools
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from support.processes import free_port, on_processes
from support.tables import slow
from timm.layers import BatchNormAct2d
from torch import nn

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed import rendezvous
from distribuuuu.distributed.process_group import pick_device, process_group
from distribuuuu.distributed.rendezvous import join
from distribuuuu.distributed.replicas import broadcast_buffers
from distribuuuu.distributed.sync_batchnorm import ProcessBatchNorm, convert_sync_batchnorm
from distribuuuu.launch.detect import Launch, detect_launch


def test_a_process_takes_its_own_card_or_the_only_one_it_sees(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for visible, local_rank, index in ((8, 3, 3), (1, 3, 0), (2, 1, 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert pick_device(local_rank) == torch.device("cuda", index) == chosen[-1]
    with pytest.raises(ConfigError, match="process 3 of this node has no GPU: 2 are visible"):
        pick_device(2)


def test_a_backend_that_the_device_lacks_is_an_error():
    with pytest.raises(ConfigError, match="DIST.BACKEND: nccl needs CUDA"):
        process_group(Launch("test"), torch.device("cpu"), 1, "nccl").__enter__()


def test_processes_that_share_a_gpu_are_refused_together_before_nccl(monkeypatch):
    monkeypatch.setattr(rendezvous.torch_dist, "init_process_group", mock.Mock(side_effect=InterruptedError))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid=f"GPU-{device.index}"))

    def join(store, backend: str, rank: int, index: int) -> BaseException | None:
        group = rendezvous.join_group(Launch("test", rank, rank, 2), store, backend, torch.device("cuda", index))
        with pytest.raises((ConfigError, InterruptedError)) as caught:
            group.__enter__()
        return caught.value

    shared = "DIST.BACKEND: several processes use GPU GPU-0, which nccl refuses; fix: start one per GPU"
    for backend, indices, message in (("nccl", (0, 1), ""), ("gloo", (0, 0), ""), ("nccl", (0, 0), shared)):
        with ThreadPoolExecutor(2) as pool:
            errors = list(pool.map(functools.partial(join, torch_dist.HashStore(), backend), range(2), indices))
        assert all(isinstance(error, ConfigError) == bool(message) and message in str(error) for error in errors)
    assert all(error.on_all_processes for error in errors)


@pytest.mark.parametrize(("size", "kind", "is_left"), [
    (1, None, True), (1, OSError, True), (2, None, True), (2, OSError, False), (2, KeyboardInterrupt, True),
    (2, type("SharedError", (OSError,), {"on_all_processes": True}), True),
])  # fmt: skip
def test_a_group_is_left_unless_the_other_processes_may_not_know_of_the_error(monkeypatch, size, kind, is_left):
    monkeypatch.setattr(rendezvous, "torch_dist", torch_of := mock.Mock())
    group = rendezvous.join_group(Launch("test", 1, 1, size), torch_dist.HashStore(), "gloo", CPU)
    with pytest.raises(kind) if kind else contextlib.nullcontext(), group:
        assert (dist.rank(), dist.GroupState.host_group) == (1, torch_of.new_group.return_value)
        if kind:
            raise kind
    torch_of.barrier.assert_called_once_with(group=torch_of.new_group.return_value)
    limits = torch_of.init_process_group.call_args.args[2], torch_of.new_group.call_args.kwargs["timeout"]
    assert limits == (rendezvous.BACKEND_TIMEOUT,) * 2, "a suspended process must not end the others"
    assert torch_of.destroy_process_group.call_count == is_left
    assert (dist.rank(), dist.GroupState.host_group) == (0, None)


def sign(store, launch: Launch, timeout_s: float) -> str:
    wait = functools.partial(rendezvous._wait, launch, timeout_s, time.monotonic() + timeout_s)
    return rendezvous._sign(store, launch, wait)


def join_all(store, world_size: int, seed: int) -> list[str]:
    """Return what each process takes for the name of this start; they come one after the other."""
    rng = random.Random(seed)

    def one(rank: int) -> str:
        time.sleep(rng.uniform(0, 0.1))
        return sign(store, Launch("test", rank, rank, world_size), 60)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


@pytest.mark.slow
def test_what_an_earlier_start_left_in_the_store_is_not_taken_for_a_process():
    store, seen = torch_dist.HashStore(), set()
    for number, world_size in enumerate((3, 1, 2, 3)):
        names = join_all(store, world_size, number)
        assert len(set(names)) == 1 and names[0] not in seen
        seen.add(names[0])
    for rank in (0, 1):  # a start that was killed leaves its name, and a process of it has signed
        with pytest.raises(ConfigError, match="did not all join within 1 s"):
            sign(store, Launch("test", rank, rank, 3), 1)
    assert join_all(store, 3, 4)[0] not in seen


def test_a_taken_port_is_an_error_with_a_fix():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_PORT {port} on 127.0.0.1: .*in use.*fix: set MASTER_PORT"):
            join(Launch("test", 0, 0, 2, "127.0.0.1", port), 2)


def test_a_process_that_never_comes_is_named_by_one_process_of_each_node():
    lost = "1 of 3 .* missing: rank 0: cannot connect to the rendezvous at 127.0.0.1:"
    places = ((0, 0, 1.0, "2 of 3 .* missing: rank 1, 2"), (1, 1, 0.2, lost), (2, 0, 0.2, lost), (2, 2, 0.2, lost))
    for rank, local_rank, timeout_s, said in places:
        launch = Launch("test", rank, local_rank, 3, "127.0.0.1", free_port(), "mine")
        with pytest.raises(ConfigError, match=rf"within {timeout_s:.0f} s \(DIST.TIMEOUT_S\); {said}") as caught:
            join(launch, timeout_s)
        assert caught.value.one_process == (local_rank < 2) and caught.value.status == 1
        rendezvous._wait(launch, timeout_s, 0.0, [])  # the last one came in time


def use_collectives(log: Path) -> tuple[list[torch.Tensor], list[float], str, str]:
    """Return the buffers of a model, means, whether this process fetched a file or read it, and the error of rank 0."""

    def fetch() -> str:
        if log.exists():
            return "read"
        log.write_text("here")
        return "fetched"

    with process_group(detect_launch(), torch.device("cpu"), 60):
        time.sleep(0.2 * dist.rank())
        log.with_name(f"came_{dist.rank()}").touch()
        dist.barrier()
        assert len([*log.parent.glob("came_*")]) == 3
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


CPU = torch.device("cpu")


def make_images(mean: float = 5, std: float = 3) -> torch.Tensor:
    return torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * std + mean


def make_layer(momentum: float | None) -> nn.BatchNorm2d:
    torch.manual_seed(1)
    layer = nn.BatchNorm2d(3, momentum=momentum)
    nn.init.uniform_(layer.weight)
    return layer


def run_layer(layer: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = layer(images)
    (out**3).sum().backward()
    statistics = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    return out.detach(), images.grad, layer.weight.grad, layer.bias.grad, *statistics


def run_share(momentum: float | None, mean: float, std: float) -> tuple[torch.Tensor, ...]:
    with process_group(detect_launch(), CPU, 60):
        layer = make_layer(momentum)
        converted = convert_sync_batchnorm(layer)
        assert isinstance(converted, ProcessBatchNorm) and list(converted.state_dict()) == list(layer.state_dict())
        images = make_images(mean, std)
        share = images[:4] if dist.rank() == 0 else images[4:]  # of different sizes
        return run_layer(converted, share.requires_grad_())


@pytest.mark.parametrize(("momentum", "mean", "std"), [slow(0.1, 5, 3), slow(None, 5, 3), (1.0, 30, 0.01)])
def test_it_equals_batch_norm_over_the_whole_batch(momentum, mean, std):
    """In float64 of the rounded images; a variance that is small beside the mean is not lost."""
    images = make_images(mean, std).double().requires_grad_()
    expected = run_layer(make_layer(momentum).double(), images)
    shares = on_processes(2, run_share, momentum, mean, std)
    out, grad = (torch.cat([share[number] for share in shares]).double() for number in (0, 1))
    tolerance = 20 * max(mean / std, 1) * torch.finfo(torch.float32).eps  # of the rounded mean
    torch.testing.assert_close(out, expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(grad, expected[1], rtol=0, atol=tolerance * grad.abs().max().item())
    for number in (2, 3):
        both = (shares[0][number] + shares[1][number]).double()
        torch.testing.assert_close(both, expected[number], rtol=0, atol=10 * tolerance * expected[2].abs().max().item())
    for share in shares:
        torch.testing.assert_close(share[4].double(), expected[4], rtol=1e-6, atol=0)
        torch.testing.assert_close(share[5].double(), expected[5], rtol=1e-3, atol=0)
        assert share[6] == 1


def convert_timm_and_odd() -> tuple[bool, str]:
    with process_group(detect_launch(), CPU, 60):

        class OwnNorm(nn.BatchNorm2d):
            pass

        fused = BatchNormAct2d(3).eval()
        images = make_images()
        before = fused(images)
        same = torch.equal(convert_sync_batchnorm(nn.Sequential(fused)).eval()(images), before)
        try:
            convert_sync_batchnorm(nn.Sequential(OwnNorm(3)))
        except ConfigError as error:
            return same, str(error)


def test_timms_batch_norm_keeps_its_activation_and_an_unknown_one_is_refused():
    for same, error in on_processes(2, convert_timm_and_odd):
        assert same and "OwnNorm cannot be synchronized" in error


def compile_layers() -> list[list]:
    with process_group(detect_launch(), CPU, 280):
        net = nn.Sequential(nn.Conv2d(3, 3, 3), convert_sync_batchnorm(nn.BatchNorm2d(3)), nn.ReLU(),
                            convert_sync_batchnorm(nn.BatchNorm2d(3))).train()  # fmt: skip
        images, results = make_images()[slice(0, 4) if dist.rank() == 0 else slice(4, 6)], []
        for compiled in (False, True):
            one = copy.deepcopy(net)
            if compiled:
                one.compile(dynamic=False)
            out = one(images)
            (out**3).sum().backward()
            results.append([out.detach(), *(weight.grad for weight in one.parameters()), *one.buffers()])
        return results


@pytest.mark.slow
def test_a_compiled_model_has_the_same_statistics():
    for eager, compiled in on_processes(2, compile_layers):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
