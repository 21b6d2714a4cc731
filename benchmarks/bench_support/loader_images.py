"""Synthetic JPEGs with the decoding cost of photographs: ImageNet's sizes, 100 KB on average, a natural spectrum."""

import numpy as np
from PIL import Image

SIZES = ((500, 375), (500, 375), (375, 500), (500, 333), (640, 480), (400, 300))
# Of files of 10 KB.
SMALL = tuple((round(0.28 * width), round(0.28 * height)) for width, height in SIZES)


def make_jpegs(root, num: int, sizes=SIZES) -> None:
    """Write `num` images in ten classes to root/train/CLASS/NUMBER.jpg and root/val, deterministically."""
    random = np.random.default_rng(0)
    for number in range(num):
        width, height = sizes[number % len(sizes)]
        light = 50 * _noise(random, height, width, 1.4)
        channels = [
            128 + light + 20 * _noise(random, height, width, 1.6) + 4 * random.standard_normal((height, width))
            for _ in range(3)
        ]
        image = Image.fromarray(np.stack(channels, -1).clip(0, 255).astype(np.uint8))
        for split in ("train", "val"):
            folder = root / split / f"class_{number % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number:05d}.jpg", quality=95)


def _noise(random: np.random.Generator, height: int, width: int, exponent: float) -> np.ndarray:
    """Return noise with amplitude 1 / frequency ** exponent, as in photographs; mean 0, standard deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    spectrum = np.fft.rfft2(random.standard_normal((height, width))) / frequency**exponent
    noise = np.fft.irfft2(spectrum, s=(height, width))
    return (noise - noise.mean()) / noise.std()
