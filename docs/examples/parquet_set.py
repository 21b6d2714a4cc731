"""A data set in a parquet file: a column with the bytes of images, and one with their labels.

pip install pyarrow

Measured: a run on shapes has bitwise the weights of the same run on class folders (DATA.NAME imagefolder).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import setting
from distribuuuu.data.datasets.base import ImageDataset


@DATASETS.register("parquet_rows")
class ParquetSet(ImageDataset):
    """TRAIN.DATASET/SPLIT.parquet; the classes are the sorted labels of the training file.

    A row group is read when an image of it is needed, and the last one is kept. As the order is random, nearly each
    image reads one: write the file with small row groups.
    """

    @dataclass
    class Settings:
        image: str = setting("image", "column with the bytes of the image file, or with {bytes, path}")
        label: str = setting("label", "column with the name or the number of the class")

    def __init__(self, path: Path, image: str, label: str, classes: tuple[str, ...] | None = None):
        self.path, self.image = path, image
        columns = self.open().schema_arrow.names
        if missing := sorted({image, label} - set(columns)):
            message = f"{path} has no column {', '.join(missing)}; expected one of {', '.join(columns)}"
            raise ConfigError(f"DATA.KWARGS: {message}; fix: set DATA.KWARGS.image and DATA.KWARGS.label")
        names = [str(name) for name in self.open().read([label])[label].to_pylist()]
        self.classes = classes or tuple(sorted(set(names)))
        numbers = {name: number for number, name in enumerate(self.classes)}
        if unknown := sorted(set(names) - set(numbers)):
            raise ConfigError(f"TEST.DATASET: {path} has classes that the training data lacks: {', '.join(unknown)}")
        self.labels = [numbers[name] for name in names]
        metadata = self.open().metadata
        self.groups = [(group, row) for group in range(metadata.num_row_groups)
                       for row in range(metadata.row_group(group).num_rows)]  # fmt: skip
        self.last: tuple[int, list[Any]] = (-1, [])

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> ImageDataset:
        """Return the training or the evaluation set."""
        columns = vars(cls.read_settings(cfg))
        training = cls(Path(cfg.TRAIN.DATASET, f"{cfg.TRAIN.SPLIT}.parquet"), **columns)
        if train:
            return training
        return cls(Path(cfg.TEST.DATASET, f"{cfg.TEST.SPLIT}.parquet"), **columns, classes=training.classes)

    def open(self) -> Any:
        """Return the open file.

        Raises:
            ConfigError: pyarrow is not installed, or the file cannot be read.
        """
        try:
            import pyarrow.parquet

            return pyarrow.parquet.ParquetFile(self.path)
        except ImportError as error:
            raise ConfigError("DATA.NAME: parquet_rows needs pyarrow; fix: pip install pyarrow") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"TRAIN.DATASET: {self.path} cannot be read: {error}") from error

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        group, row = self.groups[index]
        last = self.last
        if last[0] != group:
            last = self.last = group, self.open().read_row_group(group, [self.image])[self.image].to_pylist()
        value = last[1][row]
        return value["bytes"] if isinstance(value, dict) else value
