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


def statistics_of_a_share() -> torch.Tensor:
    net, launch = make_net(), detect_launch()
    with process_group(launch, torch.device("cpu"), 60):
        compute_precise_statistics(net, whole_set()[launch.rank :: launch.world_size].split(5))
    return torch.stack([net[1].running_mean, net[1].running_var])


def test_the_images_of_all_processes_count():
    inputs = make_net()[0](whole_set())
    expected = torch.stack([inputs.mean((0, 2, 3)), inputs.var((0, 2, 3))])
    for share in (*on_processes(1, statistics_of_a_share), *on_processes(3, statistics_of_a_share)):
        torch.testing.assert_close(share, expected, rtol=1e-5, atol=1e-5)


def test_a_run_evaluates_and_saves_precise_statistics(small_cfg, tmp_path):
    words = [("MODEL.PRECISE_BN", num, "EMA.HALF_LIFE", 50, "OUT_DIR", tmp_path / str(num)) for num in (0, 48)]
    moving, precise = (train_and_read(small_cfg(*some)) for some in words)
    # The weights are the same: training normalizes by the batch.
    assert torch.equal(moving["state_dict"]["fc.weight"], precise["state_dict"]["fc.weight"])
    names = [name for name in precise["state_dict"] if name.endswith("running_var")]
    for key in ("state_dict", "ema_state_dict"):
        assert names and not any(torch.equal(moving[key][name], precise[key][name]) for name in names)
