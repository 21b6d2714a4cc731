"""Small image folders on disk, real data sets below DATA_ROOT, and the pixels of images."""

import io
import os
import random
import struct
import time
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from distribuuuu.config.options import OPTIONAL_DECODERS


def draw_folder(root: Path, split: str, counts: dict[str, int], size: tuple[int, int] = (40, 36)) -> None:
    """Write JPEGs of noise around a color of each class, `counts[name]` into ROOT/SPLIT/NAME; size: (width, height)."""
    for number, (name, count) in enumerate(counts.items()):
        folder = root / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            noise = random.Random(f"{split}/{name}/{index}")
            base = [60 + 60 * ((number + channel) % 3) for channel in range(3)]
            tiny = Image.new("RGB", (5, 5))
            tiny.putdata([tuple(value + noise.randrange(-50, 50) for value in base) for _ in range(25)])
            tiny.resize(size).save(folder / f"{index:03d}.jpg", quality=90)


def scene(width: int, height: int, seed: int = 0) -> Image.Image:
    """Draw something like a photograph: smooth colors, edges and a little noise."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (max(2, height // 12), max(2, width // 12), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int64)
    return Image.fromarray((smooth + draw.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8))


def needs(decoder: str) -> None:
    """Skip the test if DATA.DECODER needs a package that is not installed; it is not imported."""
    module = OPTIONAL_DECODERS.get(decoder, "torch")
    if not (find_spec(module.partition(".")[0]) and find_spec(module)):
        pytest.skip(f"{module} is not installed")


def write_label_lists(image_folder: Path, root: Path) -> Path:
    """Write train.csv and val.csv in ROOT, which give each image of a folder none, one or two of three labels."""
    for split in ("train", "val"):
        paths = sorted((image_folder / split).rglob("*.jpg"))
        lines = [f"{path},{['', 'ant', 'bee;cat', 'cat'][number % 4]}" for number, path in enumerate(paths)]
        (root / f"{split}.csv").write_text("\n".join(["image,labels", *lines]) + "\n")
    return root


def write_file(path: Path, content: bytes = b"") -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def age(root: Path, seconds: float = 100) -> None:
    """Date all folders back, so that an index relies on them."""
    for parent, _, _ in os.walk(root):
        os.utime(parent, (time.time() - seconds,) * 2)


def with_png_size(png: bytes, width: int, height: int) -> bytes:
    """Return a PNG whose header claims another size."""
    header = struct.pack(">II", width, height) + png[24:29]
    return png[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + png[33:]


def encode(image: Image.Image, kind: str = "JPEG", **settings) -> bytes:
    """Return the bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def tensor_of(image: Image.Image) -> torch.Tensor:
    """Return the pixels of an image in RGB: uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean absolute difference of two images, of 255."""
    assert one.shape == other.shape
    return float((one.int() - other.int()).abs().float().mean())


def deep_png(size: int = 4) -> bytes:
    """Return a PNG of 16-bit RGB, which PIL cannot write."""
    rows = b"".join(b"\0" + bytes(range(6)) * size for _ in range(size))
    chunks = {b"IHDR": struct.pack(">IIBBBBB", size, size, 16, 2, 0, 0, 0), b"IDAT": zlib.compress(rows), b"IEND": b""}
    parts = (
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
