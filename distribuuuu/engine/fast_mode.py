"""The fastest mode of a model on this machine: memory format and autocast, measured in a few seconds."""

import copy
import statistics
import time

import torch
from torch import nn

from distribuuuu.distributed.sharding import inference
from distribuuuu.optim.precision import Precision

# MODEL.CHANNELS_LAST and TRAIN.AMP of each mode, the plainest first.
MODES = ((False, "none"), (True, "none"), (True, "bf16"))
# Seconds per mode; a mode must be this much faster than a plainer one, and its logits must point in the same direction.
_SECONDS, _MIN_GAIN, _MIN_COSINE = 1.0, 1.1, 0.99


def find_fast_mode(model: nn.Module, images: torch.Tensor) -> dict[str, object]:
    """Return MODEL.CHANNELS_LAST, TRAIN.AMP, the `speedup` over the plainest mode, and the seconds of an image.

    A mode is used only if its logits agree with those of the plainest one.

    Args:
        model: a model in evaluation mode, on the device; it is not changed.
        images: normalized images (N, 3, H, W) on the device.
    """
    best: dict[str, object] = {}
    expected, plain, fastest = torch.empty(0), 0.0, 0.0
    for channels_last, amp in MODES:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        own, inputs = copy.deepcopy(model).to(memory_format=layout), images.contiguous(memory_format=layout)
        with inference(own), Precision(amp, images.device).autocast():
            logits, seconds = own(inputs).float(), time_passes(own, inputs)
        expected = expected if len(expected) else logits
        plain = plain or seconds
        agrees = torch.nn.functional.cosine_similarity(logits, expected, dim=1).min() >= _MIN_COSINE
        if not best or agrees and _MIN_GAIN * seconds < fastest:
            fastest = seconds
            best = {"MODEL.CHANNELS_LAST": channels_last, "TRAIN.AMP": amp, "speedup": round(plain / seconds, 2),
                    "image_s": seconds / len(images)}  # fmt: skip
    return best


def time_passes(model: nn.Module, images: torch.Tensor) -> float:
    """Return the median of the seconds of forward passes."""
    seconds = list[float]()
    while len(seconds) < 3 or sum(seconds) < _SECONDS:
        started = time.perf_counter()
        model(images)
        if images.is_cuda:
            torch.cuda.synchronize(images.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
