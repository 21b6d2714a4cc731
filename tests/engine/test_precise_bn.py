"""Batch norm's statistics over many batches against those of all images at once."""

import torch
from support.processes import on_processes
from support.runs import train_and_read
from torch import nn

from distribuuuu.distributed.process_group import process_group
from distribuuuu.engine.precise_bn import compute_precise_statistics
from distribuuuu.launch.detect import detect_launch


def make_net(**norm) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, **norm), nn.Dropout(0.5), nn.ReLU(), nn.BatchNorm2d(6))


def whole_set() -> torch.Tensor:
    return torch.randn(37, 3, 7, 7, generator=torch.Generator().manual_seed(2)) * 3 + 1


def assert_statistics_of(layer: nn.BatchNorm2d, inputs: torch.Tensor) -> None:
    torch.testing.assert_close(layer.running_mean, inputs.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_var, inputs.var((0, 2, 3)), rtol=1e-5, atol=1e-5)


def test_the_first_layer_has_the_statistics_of_the_whole_set():
    for sizes in [[37], [12, 12, 13], [1] * 37]:
        net = make_net()
        compute_precise_statistics(net, whole_set().split(sizes))
        assert_statistics_of(net[1], net[0](whole_set()))


def statistics_of_a_share() -> torch.Tensor:
    net, launch = make_net(), detect_launch()
    with process_group(launch, torch.device("cpu"), 60):
        compute_precise_statistics(net, whole_set()[launch.rank :: launch.world_size].split(5))
    return torch.stack([net[1].running_mean, net[1].running_var])


def test_the_images_of_all_processes_count():
    shares = on_processes(3, statistics_of_a_share)
    net = make_net()
    compute_precise_statistics(net, [whole_set()])
    for share in shares:
        torch.testing.assert_close(share, torch.stack([net[1].running_mean, net[1].running_var]), rtol=1e-5, atol=1e-5)


def test_a_run_evaluates_and_saves_precise_statistics(small_cfg, tmp_path):
    words = [("MODEL.PRECISE_BN", num, "EMA.HALF_LIFE", 50, "OUT_DIR", tmp_path / str(num)) for num in (0, 48)]
    moving, precise = (train_and_read(small_cfg(*some)) for some in words)
    # The weights are the same: training normalizes by the batch.
    assert torch.equal(moving["state_dict"]["fc.weight"], precise["state_dict"]["fc.weight"])
    names = [name for name in precise["state_dict"] if name.endswith("running_var")]
    for key in ("state_dict", "ema_state_dict"):
        assert names and not any(torch.equal(moving[key][name], precise[key][name]) for name in names)
