"""CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST, read and downloaded by torchvision."""

from pathlib import Path

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.files.locks import take_turn

# Seconds to wait for another process that downloads.
DOWNLOAD_WAIT_S = 3600


class TorchvisionSet(ImageDataset):
    """A set that torchvision loads into memory; TRAIN.DATASET or TEST.DATASET is its root."""

    crop = "pad"
    has_splits = False
    # Name of the class in torchvision.datasets.
    source = ""

    def __init__(self, root: str, train: bool, download: bool):
        import numpy as np

        try:
            data = self._open(root, train, download)
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            problem = f"{self.source} is not in {root} and cannot be downloaded: {reason}"
            raise ConfigError(f"{'TRAIN' if train else 'TEST'}.DATASET: {problem}") from error
        except (ValueError, LookupError, TypeError, AssertionError, EOFError) as error:  # torchvision's own parsers
            problem = f"{self.source} in {root} is damaged: {type(error).__name__}; fix: delete it, download it again"
            raise ConfigError(f"{'TRAIN' if train else 'TEST'}.DATASET: {problem}") from error
        self.classes = tuple(data.classes)
        # Arrays, not lists: counting the references of a list's elements would copy it into each loader worker.
        self._pixels = np.asarray(data.data)
        self.labels = np.asarray(data.targets)

    def _open(self, root: str, train: bool, download: bool):
        """Return torchvision's data set; one of several processes downloads it while the others wait."""
        import torchvision.datasets

        dataset = getattr(torchvision.datasets, self.source)
        try:
            return dataset(root, train=train)
        except (RuntimeError, OSError):
            if not download:
                raise
        with take_turn(Path(root) / f".{self.source}", DOWNLOAD_WAIT_S):
            return dataset(root, train=train, download=True)

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "TorchvisionSet":
        """Return the training or the test images."""
        return cls(cfg.TRAIN.DATASET if train else cfg.TEST.DATASET, train, cfg.DATA.DOWNLOAD)

    def read(self, index: int):
        """Return the pixels of image `index`: uint8 (H, W) or (H, W, 3)."""
        return self._pixels[index]


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
    """MNIST (LeCun et al., 1998): 60,000 + 10,000 gray images of 28 px in 10 classes."""

    source, num_classes = "MNIST", 10
    mean, std = (0.1307,) * 3, (0.3081,) * 3


@DATASETS.register("fashion_mnist")
class FashionMnist(TorchvisionSet):
    """Fashion-MNIST (Xiao et al., arXiv 1708.07747): 60,000 + 10,000 gray images of 28 px in 10 classes."""

    source, num_classes = "FashionMNIST", 10
    mean, std = (0.2860,) * 3, (0.3530,) * 3
