"""Files of torchvision's data sets: a damaged one is reported by name, and no pickle is read without its checksum."""

import pickle

import pytest
from torchvision.datasets.mnist import FashionMNIST

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.torchvision_sets import open_source

RAW = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]


def test_a_damaged_file_is_one_error(tmp_path):
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    assert FashionMNIST.mirrors
    start = b"\0\0\x08\x03"
    for content in (b"", start, b"\xff" * 64, start + b"\xff" * 12, b"\0\0\x08\x01" + bytes(4), b"\0" * 64):
        for name in RAW:
            (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"TRAIN.DATASET: FashionMNIST .*{tmp_path}") as error:
            open_source("FashionMNIST", str(tmp_path), "TRAIN.DATASET", False, train=True)
        assert "\n" not in str(error.value)


class Attack:
    def __reduce__(self):
        return pytest.fail, ("the pickle was read",)


def test_a_pickle_of_others_is_not_read(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ConfigError, match="TRAIN.DATASET: CIFAR10 is not in"):
        open_source("CIFAR10", str(tmp_path), "TRAIN.DATASET", False, train=True)
