"""Batch norm over processes, against torch's own over the whole batch."""

import pytest
import torch
from support.processes import on_processes
from torch import nn

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import process_group
from distribuuuu.distributed.sync_batchnorm import ProcessBatchNorm, convert_sync_batchnorm
from distribuuuu.launch.detect import detect_launch

CPU = torch.device("cpu")


def make_images() -> torch.Tensor:
    return torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 3 + 5


def run_share(momentum: float | None) -> tuple[torch.Tensor, ...]:
    """Normalise this process's uneven share of the images; return output, gradients and running statistics."""
    with process_group(detect_launch(), CPU, 60):
        torch.manual_seed(1)
        model = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum))
        nn.init.uniform_(model[0].weight)
        keys = list(model.state_dict())
        model = convert_sync_batchnorm(model, CPU)
        assert isinstance(model[0], ProcessBatchNorm) and list(model.state_dict()) == keys
        images = make_images()[slice(0, 4) if dist.rank() == 0 else slice(4, 6)].requires_grad_()
        out = model(images)
        (out**3).sum().backward()
        statistics = (model[0].running_mean, model[0].running_var, model[0].num_batches_tracked)
        return (out.detach(), images.grad, model[0].weight.grad, model[0].bias.grad, *statistics)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_it_equals_batch_norm_over_the_whole_batch(momentum):
    torch.manual_seed(1)
    whole = nn.BatchNorm2d(3, momentum=momentum)
    nn.init.uniform_(whole.weight)
    images = make_images().requires_grad_()
    out = whole(images)
    (out**3).sum().backward()
    shares = on_processes(2, run_share, momentum)
    expected = (out, images.grad)
    for number, tensor in enumerate(expected):
        torch.testing.assert_close(torch.cat([share[number] for share in shares]), tensor, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shares[0][2] + shares[1][2], whole.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(shares[0][3] + shares[1][3], whole.bias.grad, rtol=1e-4, atol=1e-3)
    for share in shares:
        torch.testing.assert_close(share[4], whole.running_mean)
        torch.testing.assert_close(share[5], whole.running_var)
        assert share[6] == 1


def norm_far_from_zero(mean: float, std: float) -> tuple[torch.Tensor, ...]:
    with process_group(detect_launch(), CPU, 60):
        layer = convert_sync_batchnorm(nn.BatchNorm2d(3, momentum=1.0).train(), CPU)
        images = ((make_images() - 5) / 3 * std + mean)[slice(0, 4) if dist.rank() == 0 else slice(4, 6)]
        images.requires_grad_()
        out = layer(images)
        (out**3).sum().backward()
        return out.detach(), images.grad, layer.running_var


@pytest.mark.parametrize("mean, std", [(100, 0.1), (30, 0.01), (300, 1)])
def test_a_variance_that_is_small_beside_the_mean_is_not_lost(mean, std):
    images = ((make_images() - 5) / 3 * std + mean).double().requires_grad_()  # rounded as the processes see them
    exact = nn.BatchNorm2d(3, momentum=1.0).double()
    expected = exact(images)
    (expected**3).sum().backward()
    shares = on_processes(2, norm_far_from_zero, mean, std)
    out, grad = (torch.cat([share[number] for share in shares]).double() for number in (0, 1))
    tolerance = 20 * mean / std * torch.finfo(torch.float32).eps  # of the rounded mean
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(grad, images.grad, rtol=0, atol=tolerance * images.grad.abs().max().item())
    torch.testing.assert_close(shares[1][2].double(), exact.running_var, rtol=1e-3, atol=0)


def norm_of_half_precision() -> tuple[torch.Tensor, torch.Tensor]:
    with process_group(detect_launch(), CPU, 60):
        layer = convert_sync_batchnorm(nn.BatchNorm2d(3).train(), CPU)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(make_images().bfloat16())
        out.float().square().sum().backward()
        return out.detach(), layer.running_var


def test_half_precision_comes_in_and_goes_out_and_float32_is_summed():
    whole = nn.BatchNorm2d(3).train()
    expected = whole(make_images().bfloat16())
    for out, running_var in on_processes(2, norm_of_half_precision):
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(running_var, whole.running_var, rtol=5e-3, atol=0)  # of twice as many


def convert_timm_and_odd() -> tuple[bool, str]:
    with process_group(detect_launch(), CPU, 60):
        from timm.layers import BatchNormAct2d

        class OwnNorm(nn.BatchNorm2d):
            pass

        fused = BatchNormAct2d(3).eval()
        images = make_images()
        before = fused(images)
        same = torch.equal(convert_sync_batchnorm(nn.Sequential(fused), CPU).eval()(images), before)
        try:
            convert_sync_batchnorm(nn.Sequential(OwnNorm(3)), CPU)
        except ConfigError as error:
            return same, str(error)


def test_timms_batch_norm_keeps_its_activation_and_an_unknown_one_is_refused():
    for same, error in on_processes(2, convert_timm_and_odd):
        assert same and "OwnNorm cannot be synchronized" in error


def test_alone_a_model_stays_as_it_is():
    model = nn.BatchNorm2d(3)
    assert convert_sync_batchnorm(model, CPU) is model
