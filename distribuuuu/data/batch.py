"""A batch, as workers make it, as loaders yield it on the device, and as tasks receive it; copies to the device."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Geometry(NamedTuple):
    """Origin of the pixels of a view, so that dense targets, e.g. masks, can follow them.

    Attributes:
        box: top, left, height and width of the crop, float32 (N, 4), in pixels of the image; it may extend beyond it.
        flipped: whether the crop was then flipped horizontally and vertically, bool (N, 2).
        size: height and width of the image in pixels, int64 (N, 2).
    """

    box: torch.Tensor
    flipped: torch.Tensor
    size: torch.Tensor


class Batch(NamedTuple):
    """Images with their targets. Read the fields by name: further ones may follow.

    Attributes:
        images: normalized, float32 (N, C, H, W); with several views of each image a tuple of them, see `Task.views`.
        targets: int64 (N,), or float32 (N, classes) where an image has several labels; of structured targets a dict or
            a tuple of tensors (N, ...), see `ImageDataset.targets`.
        index: the index of each image in the data set, int64 (N,); None if it is unknown, e.g. in a measurement.
        extra: the batches of the further loaders of the task, by name, see `Task.extra_loaders`.
        broken: which images of an evaluation could not be read and are black, bool (N,); None if all were read.
        geometry: a `Geometry`, with several views a tuple of them; None unless `Task.needs_geometry`.
    """

    images: Any
    targets: Any
    index: torch.Tensor | None = None  # type: ignore[assignment]  # in place of the method of tuples
    extra: Mapping[str, "Batch"] = {}
    broken: torch.Tensor | None = None
    geometry: Any = None

    @property
    def first_images(self) -> torch.Tensor:
        """The images of the first view."""
        return self.images if isinstance(self.images, torch.Tensor) else self.images[0]


def map_leaves(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested dicts and tuples, e.g. a Batch, with a function applied to each leaf of a type."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {name: map_leaves(kind, function, item) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [map_leaves(kind, function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device without waiting for pending work of a GPU, as a copy from pageable memory would.

    torch's allocator keeps the page-locked copy until the transfer ends.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
