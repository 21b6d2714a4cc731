"""Batch norm over processes, against torch's own over the whole batch."""

import copy

import pytest
import torch
from support.processes import on_processes
from support.runs import assert_close, newest
from torch import nn

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import process_group
from distribuuuu.distributed.sync_batchnorm import ProcessBatchNorm, convert_sync_batchnorm
from distribuuuu.launch.detect import detect_launch
from distribuuuu.trainer import train_model

CPU = torch.device("cpu")


def make_images(mean: float = 5, std: float = 3) -> torch.Tensor:
    return torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * std + mean


def own_share(images: torch.Tensor) -> torch.Tensor:
    """Return the images of this process: four, or the other two."""
    return (images[:4] if dist.rank() == 0 else images[4:]).requires_grad_()


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
        return run_layer(converted, own_share(make_images(mean, std)))


@pytest.mark.parametrize(("momentum", "mean", "std"), [(0.1, 5, 3), (None, 5, 3), (1.0, 30, 0.01)])
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
        total = (shares[0][number] + shares[1][number]).double()
        torch.testing.assert_close(
            total, expected[number], rtol=0, atol=10 * tolerance * expected[2].abs().max().item()
        )
    for share in shares:
        torch.testing.assert_close(share[4].double(), expected[4], rtol=1e-6, atol=0)
        torch.testing.assert_close(share[5].double(), expected[5], rtol=1e-3, atol=0)
        assert share[6] == 1


def convert_timm_and_odd() -> tuple[bool, str]:
    with process_group(detect_launch(), CPU, 60):
        from timm.layers import BatchNormAct2d

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


def test_a_run_in_a_group_of_one_is_that_without_a_group(small_cfg, tmp_path):
    for name, words in {"group": ("MODEL.SYNCBN", True, "DIST.BACKEND", "gloo"), "alone": ()}.items():
        cfg = small_cfg("OPTIM.BASE_LR", 0.01, "OPTIM.MAX_EPOCH", 1, *words, "OUT_DIR", tmp_path / name)
        on_processes(1, train_model, cfg)
    assert_close(newest(tmp_path / "group"), newest(tmp_path / "alone"), 1e-4)
