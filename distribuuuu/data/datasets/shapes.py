"""The embedded default: small JPEGs of ten shapes, drawn once into the cache folder."""

from collections.abc import Iterator

from distribuuuu.config.model_names import cache_folder
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.draw_shapes import draw_shapes
from distribuuuu.data.datasets.imagefolder import ImageFolder


@DATASETS.register("shapes")
class Shapes(ImageFolder):
    """The shapes, in the layout and through the decoder of any other folder of images."""

    num_classes, num_images = 10, 2000
    has_splits = False
    # The folder is known as drawn by what it holds, which must be nothing else.
    index_in_root = False
    mean, std = (0.489, 0.495, 0.491), (0.233, 0.256, 0.229)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield a wrong number of classes; the folder needs no check, since it is drawn when it is not whole."""
        yield from super(ImageFolder, cls).find_problems(cfg, train)

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images that are drawn."""
        return cls.num_images

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "Shapes":
        """Return the set, drawn if it is not there yet."""
        root = draw_shapes(cache_folder(cfg.DATA.CACHE_DIR) / "shapes")
        return cls(root, "train" if train else "val", cache_dir=cfg.DATA.CACHE_DIR)
