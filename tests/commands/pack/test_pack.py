"""Packed data: the same images in a few large files, whole or refused, whatever ended the packing."""

import fcntl
import io
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.archives import files_of
from support.images import draw_folder
from support.packs import pack
from support.runs import message_of, run_python

from distribuuuu.commands.pack import encode
from distribuuuu.config import get_cfg
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.decode import DecodeOptions, decode
from distribuuuu.data.packed import format as pack_file
from distribuuuu.data.packed.dataset import Packed

# A shard of it holds a few of the images below.
TINY_MB = 0.004


class Pixels(ImageDataset):
    """Twenty gray and colored images without files, of an odd size, of every type that a set may return."""

    mean, std, crop = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "pad"
    classes = ("even", "odd")
    labels = np.arange(20) % 2

    @classmethod
    def from_cfg(cls, cfg, train):
        return cls()

    @staticmethod
    def pixels(index):
        shape = (9, 13, 1) if index in (3, 4) else (9, 13, 3)
        return np.random.default_rng(index).integers(0, 256, shape, np.uint8)

    def read(self, index):
        pixels = self.pixels(index)
        return {3: pixels[:, :, 0], 5: torch.from_numpy(pixels).permute(2, 0, 1)}.get(index, pixels)


@pytest.fixture
def pixels(monkeypatch):
    DATASETS.get("dummy")
    monkeypatch.setitem(DATASETS._table, "pixels", Pixels)
    return ["DATA.NAME", "pixels"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of 14 training and 5 evaluation images; one class has none for the evaluation."""
    root = tmp_path_factory.mktemp("folder")
    draw_folder(root, "train", {"ant": 5, "bee": 4, "cat": 5})
    draw_folder(root, "val", {"ant": 2, "cat": 3})
    return root


def source(root) -> list[str]:
    return ["TRAIN.DATASET", str(root)]


def test_files_are_kept_byte_by_byte_with_labels_and_names(folder, tmp_path):
    pack(tmp_path, "--shard-mb", TINY_MB, *source(folder), split="both")
    assert len([*(tmp_path / "train").glob("shard-*.bin")]) > 2
    cfg = get_cfg()
    cfg.TRAIN.DATASET = cfg.TEST.DATASET = str(tmp_path)
    for train, split in ((True, "train"), (False, "val")):
        packed, images = Packed.from_cfg(cfg, train), ImageFolder(folder, split, ("ant", "bee", "cat"))
        assert len(packed) == len(images) and packed.classes == ("ant", "bee", "cat")
        for index in range(len(images)):
            file = Path(images.describe(index))
            assert bytes(packed.read(index)) == file.read_bytes()
            assert packed.label(index) == images.label(index)
            place = f"{file.relative_to(folder)} (image {index} of {tmp_path / split})"
            assert packed.describe(index) == place


@pytest.mark.filterwarnings("error:The given buffer")
def test_files_are_read_without_a_copy_or_a_warning_and_copies_open_their_own_maps(folder, tmp_path):
    pack(tmp_path, *source(folder))
    packed = Packed(tmp_path, "train")
    image, again = (torch.frombuffer(packed.read(1), dtype=torch.uint8) for _ in range(2))
    assert image.data_ptr() == again.data_ptr()
    image.zero_()
    copy = pickle.loads(pickle.dumps(packed))
    assert len(pickle.dumps(packed)) < 1000 and copy.label(5) == packed.label(5) == 1
    assert bytes(copy.read(1)) == (folder / "train/ant/001.jpg").read_bytes()


def test_smaller_jpegs_can_be_decoded_by_rows_and_nothing_is_enlarged(folder, tmp_path, monkeypatch):
    pack(tmp_path, "--shorter-side", 18, "--quality", 80, *source(folder))
    data = bytes(Packed(tmp_path, "train").read(0))
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (20, 18))
        assert image.info.get("progressive") is None
        assert image.layer[0][1:3] == (2, 2), "4:2:0"
        wanted = Image.open(folder / "train/ant/000.jpg").resize((20, 18), Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(image, int) - np.asarray(wanted, int)).mean() < 8
    assert b"\xff\xdd\x00\x04\x00\x02" in data, "a restart marker after each row of two blocks"
    pack(tmp_path / "a", "--quality", 50, "--shorter-side", 300, *source(folder))
    assert decode(Packed(tmp_path / "a", "train").read(2)).shape == (3, 36, 40)
    monkeypatch.setattr(encode, "MAX_RECORD", 100)
    assert "bytes; a pack holds images of at most 100" in message_of(pack, tmp_path / "c", *source(folder))


def test_exif_is_applied_where_pixels_are_packed(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "data")
    exif = Image.Exif()
    exif[0x0112] = 6
    for path in sorted((tmp_path / "data").rglob("*.jpg")):
        with Image.open(path) as image:
            image.copy().save(path, exif=exif)
    for name, words, size in [
        ("files", [], (36, 40)),
        ("raw", ["--format", "raw"], (36, 40)),
        ("rotated", ["--format", "raw", "DATA.EXIF_ROTATE", "True"], (40, 36)),
        ("encoded", ["--quality", 90, "DATA.EXIF_ROTATE", "True"], (40, 36)),
        ("kept", ["DATA.EXIF_ROTATE", "True"], (36, 40)),
    ]:
        pack(tmp_path / name, *words, *source(tmp_path / "data"))
        packed = Packed(tmp_path / name, "train").read(0)
        assert (packed.shape[:2] if name in ("raw", "rotated") else decode(packed).shape[1:]) == size
        # What is still to be rotated is rotated as it is read; what has lost its orientation cannot be.
        cfg = get_cfg()
        cfg.TRAIN.DATASET, cfg.DATA.EXIF_ROTATE, cfg.MODEL.NUM_CLASSES = str(tmp_path / name), True, 3
        assert ("DATA.EXIF_ROTATE" in dict(Packed.find_problems(cfg, train=True))) == (name == "raw")
    assert files_of(tmp_path / "files/train") == files_of(tmp_path / "kept/train")
    words = ["--format", "raw", *source(tmp_path / "data")]
    assert "exif rotate True, now None" in message_of(pack, tmp_path / "rotated", *words)


def test_a_set_without_files(pixels, tmp_path):
    pack(tmp_path, "--format", "raw", *pixels)
    packed = Packed(tmp_path, "train")
    assert (packed.mean, packed.std, packed.crop) == (Pixels.mean, Pixels.std, "pad")
    assert packed.classes == ("even", "odd") and packed.describe(2).startswith("image 2 (image 2 of ")
    for index in range(20):
        expected = np.broadcast_to(Pixels.pixels(index), (9, 13, 3))
        assert np.array_equal(packed.read(index), expected) and packed.label(index) == index % 2
    assert "the data set has pixels but no files" in message_of(pack, tmp_path / "b", *pixels)
    pack(tmp_path / "b", "--quality", 90, *pixels)
    assert decode(Packed(tmp_path / "b", "train").read(0)).shape == (3, 9, 13)


def test_evaluation_labels_by_the_training_classes(folder, tmp_path):
    draw_folder(tmp_path / "other", "val", {"bee": 1, "cat": 2})
    pack(tmp_path / "a", *source(folder))
    pack(tmp_path / "b", "TEST.DATASET", tmp_path / "other", split="val")
    cfg = get_cfg()
    cfg.TRAIN.DATASET, cfg.TEST.DATASET, cfg.MODEL.NUM_CLASSES = str(tmp_path / "a"), str(tmp_path / "b"), 3
    packed = Packed.from_cfg(cfg, train=False)
    assert [packed.label(index) for index in range(3)] == [1, 2, 2]
    assert list(Packed.find_problems(cfg, train=False)) == []
    cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT = str(tmp_path / "b"), "val"
    cfg.TEST.DATASET, cfg.TEST.SPLIT = str(tmp_path / "a"), "train"
    assert "classes that the training data lacks: ant" in dict(Packed.find_problems(cfg, train=False))["TEST.SPLIT"]
    assert "lacks: ant" in message_of(Packed.from_cfg, cfg, False)


def test_what_a_full_disk_or_a_kill_has_left_is_replaced_by_the_next_run(folder, tmp_path, capsys):
    words, limits = ["--shard-mb", TINY_MB, *source(folder)], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        message = message_of(pack, tmp_path, *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large; the pack is incomplete; fix: free some space and run the same command again" in message
    assert "packing is not finished" in message_of(Packed, tmp_path, "train")
    (tmp_path / "train" / "shard-00099.bin").write_bytes(b"of a pack with more shards")
    (tmp_path / "train" / "shard-00000.part").write_bytes(b"of an older version")
    pack(tmp_path, *words)
    pack(tmp_path / "whole", *words, workers=2)
    assert files_of(tmp_path / "train") == files_of(tmp_path / "whole" / "train"), "workers change no byte"
    pack(tmp_path, *words)
    assert "nothing to do" in capsys.readouterr().out


def test_other_options_or_another_source_are_refused(folder, tmp_path):
    pack(tmp_path, *source(folder))
    before = files_of(tmp_path / "train")
    message = message_of(pack, tmp_path, "--shorter-side", 18, *source(folder))
    assert "shorter side None, now 18; quality None, now 90" in message and "or remove this one" in message
    shutil.copytree(folder, tmp_path / "copy")
    assert f"now {tmp_path / 'copy'}" in message_of(pack, tmp_path, *source(tmp_path / "copy"))
    assert files_of(tmp_path / "train") == before
    (folder := tmp_path / "copy/train/cat").joinpath("003.jpg").rename(folder / "006.jpg")  # as many as before
    pack(tmp_path / "new", *source(tmp_path / "copy"))
    (folder / "006.jpg").rename(folder / "003.jpg")
    assert "digest of names and labels" in message_of(pack, tmp_path / "new", *source(tmp_path / "copy"))


def test_a_folder_of_other_things_or_of_another_command_is_left_alone(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "data")
    assert "holds other files, e.g. ant" in message_of(pack, tmp_path / "data", *source(folder))
    assert sorted(os.listdir(tmp_path / "data" / "train")) == ["ant", "bee", "cat"]
    assert "is the source itself" in message_of(pack, tmp_path / "data", *source(tmp_path / "data"))
    (tmp_path / "train").mkdir()
    number = os.open(tmp_path / "train", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    assert "another command is packing into it" in message_of(pack, tmp_path, *source(folder))
    os.close(number)
    pack(tmp_path, *source(folder))


def test_a_broken_image_stops_the_packing_or_is_left_out(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "data")
    message = message_of(pack, tmp_path / "out", "DATA.MAX_PIXELS", 40 * 36 - 1, *source(folder))
    assert "ant/000.jpg: 40 x 36 pixels are more than DATA.MAX_PIXELS 1439" in message
    path = tmp_path / "data/train/bee/002.jpg"
    path.write_bytes(path.read_bytes()[:300])
    broken = ["--shard-mb", TINY_MB, *source(tmp_path / "data")]
    message = message_of(lambda: pack(tmp_path / "out", *broken, workers=2))
    assert "broken image: " in message and "bee/002.jpg" in message and "DATA.ON_BAD_IMAGE skip" in message
    pack(tmp_path / "out", *broken, "DATA.ON_BAD_IMAGE", "skip", workers=2)
    packed, printed = Packed(tmp_path / "out", "train"), capsys.readouterr()
    assert len(packed) == 13 and packed.meta["num_skipped"] == 1
    assert "bee/003.jpg" in packed.describe(7) and packed.label(7) == 1
    assert "bee/002.jpg" in printed.err and "13 images of 3 classes, 1 broken left out" in printed.out


def test_a_worker_that_is_killed_is_reported(folder, tmp_path, monkeypatch):
    parent = os.getpid()

    def read(self, index):
        if os.getpid() != parent and index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return Path(self.describe(index)).read_bytes()

    monkeypatch.setattr(ImageFolder, "read", read)
    message = message_of(lambda: pack(tmp_path, "--shard-mb", TINY_MB, *source(folder), workers=2))
    assert "a worker process was killed" in message and "fewer --workers" in message


@pytest.fixture
def several(folder, tmp_path) -> Path:
    pack(tmp_path / "out", "--shard-mb", TINY_MB, *source(folder))
    return tmp_path / "out"


@pytest.mark.parametrize(("how", "said"), [
    ("cut", "shard-00001.bin has "), ("lost", "shard-00001.bin: No such file"),
    ("exchanged", "does not belong to this pack"), ("index", "index.bin: not a valid pack"),
])  # fmt: skip
def test_a_pack_that_is_not_sound_is_refused(several, how, said):
    packed = Packed(several, "train")
    index = list(packed.columns["shard"]).index(1)
    path = several / "train" / ("index.bin" if how == "index" else "shard-00001.bin")
    data = bytearray(path.read_bytes())
    data[{"exchanged": 20, "index": -2}.get(how, 0)] ^= 4
    path.write_bytes(data[:-10] if how == "cut" else data)
    if how == "lost":
        path.unlink()
    if how == "exchanged":
        assert said in message_of(packed.read, index)
    else:
        assert said in message_of(Packed, several, "train")


def problems_of(root, num_classes=3, split="train") -> dict[str, str]:
    cfg = get_cfg()
    cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT, cfg.MODEL.NUM_CLASSES = str(root), split, num_classes
    return dict(Packed.find_problems(cfg, train=True))


def test_what_is_wrong_with_a_pack_is_reported_before_the_start(several, folder, monkeypatch):
    assert problems_of(several) == {}
    assert "has no index.bin: it is not a packed data set" in problems_of(folder)["TRAIN.SPLIT"]
    assert "has 3 classes; set MODEL.NUM_CLASSES 3" in problems_of(several, 5)["MODEL.NUM_CLASSES"]
    assert "did you mean out?" in problems_of(several.parent / "ot")["TRAIN.DATASET"]
    assert "it has train; fix: set TRAIN.SPLIT train" in problems_of(several, split="trian")["TRAIN.SPLIT"]
    monkeypatch.setattr(pack_file, "VERSION", 2)
    assert "of version 1, not packed images of version 2" in problems_of(several)["TRAIN.SPLIT"]
    monkeypatch.undo()
    (several / "train/index.bin").unlink()
    assert "packing is not finished: run the same" in problems_of(several)["TRAIN.SPLIT"]


WRONG = {
    "": "name the folder of the packed data first", "TRAIN.DATASET x": "folder of the packed data first",
    "OUT --format jpg": "invalid choice", "OUT --format raw --quality 90": "stores pixels",
    "OUT --quality 101": "1 to 100", "OUT --workers -1": "got -1; expected 0 or more",
    "OUT TRAIN.DATASET /no/such": "no such folder: /no/such", "s3://bucket/set": "expected a local path",
}  # fmt: skip


def test_a_mistake_is_answered_with_its_remedy_and_without_torch(folder, tmp_path):
    code = (
        "import sys; from distribuuuu.commands.main import start_command\n"
        "for line in sys.argv[1:]:\n"
        "    print('status', start_command('pack', 'pack', line.split()), 'torch' in sys.modules, file=sys.stderr)\n"
    )
    lines = [line.replace("OUT", str(tmp_path / "out"), 1) for line in WRONG]
    answers = run_python("-c", code, *lines).stderr.split("status 2 False\n")
    assert len(answers) == len(WRONG) + 1 and "Traceback" not in str(answers), answers
    for said, answer in zip(WRONG.values(), answers[:-1], strict=True):
        assert said in answer, answer
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", [False, True])
def test_images_of_other_channels_and_types_are_read_as_they_were_packed(tmp_path, monkeypatch, own):
    for name in ("mean", "std") if own else ():  # statistics of the data set's own
        monkeypatch.setattr(ImageFolder, name, (0.5,) * 5)
    for split in ("train", "val"):
        for number, name in enumerate(("ant", "bee")):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            np.save(tmp_path / "images" / split / name / "0.npy", np.full((8, 8, 5), 1000 * number, np.uint16))
    words = [*source(tmp_path / "images"), "DATA.CHANNELS", 5, "DATA.PIXELS", "uint16"]
    assert "DATA.MEAN (command line): got" in message_of(pack, tmp_path / "x", *words, "DATA.MEAN", "[1]")
    pack(tmp_path / "out", *words)  # without DATA.MEAN, which only a training needs
    packed = Packed(tmp_path / "out", "train")
    assert decode(packed.read(1), options=DecodeOptions(channels=5, pixels="uint16"))[0, 0, 0] == 1000
    assert not own or packed.mean == (0.5,) * 5
