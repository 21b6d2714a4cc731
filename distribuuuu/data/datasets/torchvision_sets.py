"""CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST, read and fetched by torchvision's own classes."""

import fcntl
import os

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset


class TorchvisionSet(ImageDataset):
    """A set that torchvision reads whole into memory; TRAIN.DATASET or TEST.DATASET is its root."""

    crop = "pad"
    has_splits = False
    # Name of the class in torchvision.datasets.
    source = ""

    def __init__(self, root: str, train: bool, download: bool):
        import numpy as np

        try:
            data = self._open(root, train, download=False)
        except (RuntimeError, OSError) as error:
            if not download:
                raise self._missing(root, train, error) from error
            data = self._fetch(root, train)
        self.classes = tuple(data.classes)
        # Arrays, no list of objects: each loader worker would make a copy of that as it counts references.
        self._pixels = np.asarray(data.data)
        self._labels = np.asarray(data.targets)

    def _open(self, root: str, train: bool, download: bool):
        import torchvision.datasets

        return getattr(torchvision.datasets, self.source)(root, train=train, download=download)

    def _fetch(self, root: str, train: bool):
        """Download the set; of several processes one does, and the others wait and find it there."""
        try:
            os.makedirs(root, exist_ok=True)
            with open(os.path.join(root, f".{self.source}.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return self._open(root, train, download=True)
        except (RuntimeError, OSError) as error:
            raise self._missing(root, train, error) from error

    def _missing(self, root: str, train: bool, error: Exception) -> ConfigError:
        key, why = f"{'TRAIN' if train else 'TEST'}.DATASET", " ".join(str(error).split())
        return ConfigError(f"{key}: {self.source} is not in {root} and cannot be fetched: {why}")

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "TorchvisionSet":
        """Return the training or the test images."""
        return cls(cfg.TRAIN.DATASET if train else cfg.TEST.DATASET, train, cfg.DATA.DOWNLOAD)

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int):
        """Return the pixels of image `index`: uint8 (H, W) or (H, W, 3)."""
        return self._pixels[index]

    def label(self, index: int) -> int:
        """Return the class of image `index`, from 0."""
        return int(self._labels[index])


@DATASETS.register("cifar10")
class Cifar10(TorchvisionSet):
    """CIFAR-10 (Krizhevsky, 2009): 50,000 + 10,000 images of 32 px in 10 classes."""

    source, num_classes = "CIFAR10", 10
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@DATASETS.register("cifar100")
class Cifar100(TorchvisionSet):
    """CIFAR-100 (Krizhevsky, 2009): 50,000 + 10,000 images of 32 px in 100 classes."""

    source, num_classes = "CIFAR100", 100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


@DATASETS.register("mnist")
class Mnist(TorchvisionSet):
    """MNIST (LeCun et al., 1998): 60,000 + 10,000 grey images of 28 px in 10 classes."""

    source, num_classes = "MNIST", 10
    mean, std = (0.1307,) * 3, (0.3081,) * 3


@DATASETS.register("fashion_mnist")
class FashionMnist(TorchvisionSet):
    """Fashion-MNIST (Xiao et al., arXiv 1708.07747): 60,000 + 10,000 grey images of 28 px in 10 classes."""

    source, num_classes = "FashionMNIST", 10
    mean, std = (0.2860,) * 3, (0.3530,) * 3
