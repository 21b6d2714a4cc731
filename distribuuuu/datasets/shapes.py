"""The embedded default: small JPEGs of ten shapes, drawn once into the cache folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from distribuuuu.datasets.draw_shapes import draw_shapes
from distribuuuu.datasets.imagefolder import ImageFolder
from distribuuuu.registry import DATASETS


@DATASETS.register("shapes")
class Shapes(ImageFolder):
    """The shapes, in the layout and through the decoder of any other folder of images."""

    num_classes = 10
    mean, std = (0.489, 0.495, 0.491), (0.233, 0.256, 0.229)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield a wrong number of classes; the folder needs no check, since it is drawn when it is not whole."""
        yield from super(ImageFolder, cls).find_problems(cfg, train)

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "Shapes":
        """Return the set, drawn if it is not there yet."""
        root = draw_shapes(cache_folder(cfg.DATA.CACHE_DIR) / "shapes")
        return cls(root, "train" if train else "val")


def cache_folder(chosen: str) -> Path:
    """Return DATA.CACHE_DIR, or the user's cache folder when it is empty."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{base}/distribuuuu").expanduser()
