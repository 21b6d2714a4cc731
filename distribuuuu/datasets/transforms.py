"""From a PIL image to a uint8 tensor; the cast and the normalisation come later, on the device."""

from collections.abc import Callable, Sequence

from torchvision.transforms import v2 as T
from torchvision.transforms.functional import InterpolationMode


def train_transform(
    im_size: int, crop: str, crop_scale: Sequence[float] = (0.08, 1.0), crop_padding: int = 4, flip: float = 0.5
) -> Callable:
    """Return the training transform: a PIL image of any size to uint8 (3, im_size, im_size).

    Args:
        im_size: side of the result, in pixels.
        crop: "resized" (random area and aspect ratio, Szegedy et al., arXiv 1409.4842) or "pad" (resize to
            `im_size` if it is not that size, pad with black, random crop, He et al., arXiv 1512.03385).
        crop_scale: least and greatest share of the area for "resized".
        crop_padding: pixels on each side for "pad".
        flip: probability of a horizontal flip.
    """
    if crop == "resized":
        crops = [T.RandomResizedCrop(im_size, scale=tuple(crop_scale), interpolation=InterpolationMode.BILINEAR)]
    else:
        crops = [T.Resize(im_size), T.RandomCrop(im_size, padding=crop_padding)]
    return T.Compose([*crops, T.RandomHorizontalFlip(flip), T.PILToTensor()])


def eval_transform(im_size: int, crop_size: int) -> Callable:
    """Return the evaluation transform: resize the shorter side to `im_size`, cut out the middle `crop_size` square."""
    return T.Compose([T.Resize(im_size), T.CenterCrop(crop_size), T.PILToTensor()])
