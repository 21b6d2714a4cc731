"""Pictures of the evaluated images of a run, as data URIs: thumbnails of what the model sees."""

import base64
import contextlib
import io
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from distribuuuu.commands.report.explanations import draw_attention
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.config import ConfigError
from distribuuuu.config.config_node import changed
from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.base import read_file
from distribuuuu.inference.load_run import find_run, open_data
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.records.predictions import name_of

# Largest side of a thumbnail, and the side below which its pixels are shown as squares, in pixels.
_SIDE, _TINY = 160, 64
# First letters of the data sets whose images have names, but may not be files.
_WITHOUT_FILES = ("archive", "imagenet", "packed", "parquet", "torchvision/")


def find_reader(content: Predictions, cfg) -> Any:
    """Return a function from the index of an evaluation image to its bytes or pixels; ConfigError: it is other data."""
    folder = content.meta.get("folder") or ""
    if folder and not str(content.meta.get("data")).startswith(_WITHOUT_FILES):
        return lambda index: _read_within(os.path.join(folder, str(content.path[index])), image_folder(content))
    images = open_data(changed(cfg, {"TEST.DATASET": folder or cfg.TEST.DATASET}))
    if images.has_files and not folder:  # a config names files that the predictions do not
        raise ConfigError("the predictions do not record the folder of the images")
    step = max(1, len(content) // 100)
    for index in range(0, len(content), step):
        if len(images) != len(content) or name_of(images, index, folder) != content.path[index]:
            raise ConfigError(f"the data now holds {counted(len(images), 'other image')}")
    return images.read


def image_folder(content: Predictions, nearest: Collection[str] = ()) -> str:
    """Return the only folder of which files are shown: it holds all images and `nearest` ones; links are followed."""
    own = str(content.meta.get("images") or content.meta.get("folder") or "")
    return os.path.commonpath([os.path.realpath(path) for path in (own, *nearest)]) if own and nearest else own


def _read_within(path: str, folder: str) -> bytearray:
    """Return the bytes of an image; PermissionError: it is outside of a folder, or that is above the user's files."""
    root, home = (Path(os.path.realpath(each)) for each in (folder, Path.home()))
    if home.is_relative_to(root) or not Path(os.path.realpath(path)).is_relative_to(root):
        raise PermissionError(f"not in {folder}, the recorded folder of the images")
    return read_file(path)


def make_pictures(
    out_dir: Path, content: Predictions, mistakes: Mapping[int, Sequence[str]]
) -> tuple[dict[str, str], list[str]]:
    """Return pictures of mistakes of a run, name -> data URI, and why others are missing.

    `mistakes` has the paths of nearest images, by index, which are shown beside the image and where the model looked.
    """
    pictures, failed, notes = dict[str, str](), list[str](), list[str]()
    if not mistakes:
        return {}, []
    try:
        run = find_run(out_dir)
        read = find_reader(content, run.cfg)
    except (ConfigError, OSError, ImportError) as error:
        return pictures, [f"No thumbnails: {' '.join(str(error).split())}"]
    folder = image_folder(content, [path for paths in mistakes.values() for path in paths])
    for index, nearest in mistakes.items():
        name = str(content.path[index])
        try:
            crop = run.transform(read(index))
            strip = [_show(crop, run)]
        except Exception as error:  # decoders raise nearly anything
            failed.append(f"{name}: {' '.join(str(error).split())}")
            continue
        try:
            strip += draw_attention(run, crop, strip[0], int(content.predicted[index]))
        except Exception as error:  # captum is missing, or cannot differentiate the model
            notes = [f"Where the model looked is not shown: {error}"]
        with contextlib.suppress(Exception):  # the names of the nearest images are in the text
            strip += [_show(run.transform(_read_within(path, folder)), run) for path in nearest]
        pictures[name] = to_uri(np.concatenate(strip, axis=1), len(strip))
    if failed:
        where = f"moved or changed since in {content.meta.get('folder') or 'the data set'}, or outside of it"
        notes.append(f"No thumbnails of {counted(len(failed), 'image')}, {where}, e.g. {failed[0]}")
    return pictures, notes


def _show(crop: torch.Tensor, run: LoadedRun) -> np.ndarray:
    """Return a normalized crop (C, H, W) of a run as uint8 (H, W, 3).

    Of other numbers of channels than 1 and 3, the first three or the first one are shown. Of other pixels than 8 bits,
    black and white are 2.5 standard deviations below and above the mean.
    """
    num, transform = 3 if len(crop) >= 3 else 1, run.transform
    values = crop[:num].double()
    if transform.options.pixels == "uint8":
        mean, std = (torch.tensor(numbers[:num]).view(num, 1, 1) for numbers in (transform.mean, transform.std))
        values = values * std + mean
    else:
        values = values / 5 + 0.5
    pixels = (values * 255).round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1)
    return pixels.permute(1, 2, 0).contiguous().numpy()


def to_uri(pixels: np.ndarray, num: int) -> str:
    """Return `num` images side by side as a data URI without metadata."""
    image, file, kind = Image.fromarray(pixels), io.BytesIO(), "PNG" if pixels.shape[0] < _TINY else "JPEG"
    image.thumbnail((num * _SIDE, _SIDE), Image.Resampling.LANCZOS)
    image.save(file, kind, quality=82)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
