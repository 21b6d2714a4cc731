"""DistributedDataParallel: settings by the version of torch and the device."""

from typing import Any

import pytest
import torch

from distribuuuu.distributed import ddp


class Old:
    """DDP of an older torch."""

    def __init__(self, module: Any, device_ids: Any = None, broadcast_buffers: bool = True, **settings: Any):
        self.settings = {"broadcast_buffers": broadcast_buffers, **settings}


class New(Old):
    """DDP of a torch that copies the gradients of a bucket at once."""

    def __init__(self, module: Any, forward_sync_buffers: Any = None, batched_grad_copy: bool = False, **settings: Any):
        super().__init__(module, **settings)
        self.settings |= {"forward_sync_buffers": forward_sync_buffers, "batched_grad_copy": batched_grad_copy}


@pytest.mark.parametrize("kind, device, expected", [
    (New, "cuda:0", {"forward_sync_buffers": False, "batched_grad_copy": True}),
    (New, "cpu", {"forward_sync_buffers": False, "batched_grad_copy": False}),
    (Old, "cuda:0", {"broadcast_buffers": False}),
])  # fmt: skip
def test_gradients_are_copied_together_on_cuda_where_torch_can(monkeypatch, kind, device, expected):
    monkeypatch.setattr(ddp, "DistributedDataParallel", kind)
    monkeypatch.setattr(ddp, "is_distributed", lambda: True)
    monkeypatch.setattr(ddp, "all_reduce_max", lambda values: values)
    monkeypatch.setattr(ddp, "_warm_up_buckets", lambda *args: None)
    wrapped = ddp.wrap_model(torch.nn.Linear(2, 2), torch.device(device), torch.zeros(2, 2))
    assert wrapped.settings.items() >= expected.items()
    assert ("batched_grad_copy" in wrapped.settings) == (kind is New)
