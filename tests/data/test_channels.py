"""Channels and depths: decoding against PIL, numpy and tifffile, models of any number of channels, and whole runs."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from support.archives import files_of, write_tar
from support.batches import CPU, assert_same_batches, batches_of
from support.images import deep_png, encode
from support.runs import make_cfg
from support.tables import each_row, slow
from timm.models import adapt_input_conv
from torch import nn

from distribuuuu.api import train
from distribuuuu.commands.main import dispatch
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.augment import Erasing
from distribuuuu.data.batch import Normalizer
from distribuuuu.data.crops import WholeImage
from distribuuuu.data.decode import DecodeOptions, open_lazy_image
from distribuuuu.data.loader import build_loader
from distribuuuu.data.transforms import resize
from distribuuuu.inference.load_run import load_run
from distribuuuu.launch.detect import Launch
from distribuuuu.models import build_model
from distribuuuu.models.finetune import load_backbone
from distribuuuu.models.input_channels import adapt_input, find_input, replace_input

BANDS = np.random.default_rng(0).integers(0, 1 << 16, (9, 12, 5)).astype(np.uint16)
FIVE = ("DATA.CHANNELS", 5, "DATA.PIXELS", "uint16", "DATA.MEAN", [0.5] * 5, "DATA.STD", [0.25] * 5)


def options(channels: int, pixels: str = "uint8", **more) -> DecodeOptions:
    return DecodeOptions(channels=channels, pixels=pixels, **more)


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def pixels_of(item, options: DecodeOptions, decoder: str = "auto") -> np.ndarray:
    return open_lazy_image(item, decoder, options).pixels().permute(1, 2, 0).numpy()


@pytest.mark.parametrize("array", [
    BANDS, BANDS.transpose(2, 0, 1), np.asfortranarray(BANDS), BANDS.astype(">u2"), BANDS[::-1],
], ids=["hwc", "chw", "fortran", "big-endian", "strided"])  # fmt: skip
def test_arrays_keep_their_values(array):
    expected = (array if array.shape[2] == 5 else array.transpose(1, 2, 0)).astype(np.float32)
    for item in (npy(array), array):
        assert np.array_equal(pixels_of(item, options(5, "uint16")), expected)
        assert np.array_equal(pixels_of(item, options(5, "float32")), expected)
    small = (array >> 8).astype(np.uint8)
    found = pixels_of(npy(small), options(5))
    assert found.dtype == np.uint8 and np.array_equal(found, expected // 256)


@pytest.mark.parametrize("planar", [None, "contig", "separate"])
def test_tiffs_of_several_bands(planar):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    array = BANDS if planar == "contig" else BANDS.transpose(2, 0, 1) if planar else BANDS[..., 0]
    file = io.BytesIO()
    tifffile.imwrite(file, array, planarconfig=planar, photometric="minisblack", compression="zlib" if planar else None)
    channels = 5 if planar else 1
    assert np.array_equal(pixels_of(file.getvalue(), options(channels, "uint16")), BANDS[..., :channels])
    with pytest.raises(ValueError, match="DATA.CHANNELS|MAX_PIXELS"):
        pixels_of(file.getvalue(), options(4, "uint16"))
    with pytest.raises(ValueError, match="more than DATA.MAX_PIXELS 20"):
        pixels_of(file.getvalue(), options(channels, "uint16", max_pixels=20))


def test_gray_images_and_16_bits_equal_those_of_pil():
    rgb = Image.fromarray((BANDS[..., :3] >> 8).astype(np.uint8))
    deep = Image.fromarray(BANDS[..., 0])
    gray = np.asarray(rgb.convert("L"))
    for item in (rgb, np.asarray(rgb), encode(rgb, "PNG"), encode(rgb.convert("L"), "PNG"), gray):
        assert np.array_equal(pixels_of(item, options(1))[..., 0], gray)
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(pixels_of(encode(deep, kind), options(1, "uint16"))[..., 0], BANDS[..., 0])
        assert np.array_equal(pixels_of(encode(deep, kind), options(1))[..., 0], BANDS[..., 0] >> 8)
    jpeg = encode(rgb, "JPEG")
    image = Image.open(io.BytesIO(jpeg))
    image.draft("L", None)
    for decoder in ("auto", "pil", "torchvision"):
        assert np.array_equal(pixels_of(jpeg, options(1), decoder)[..., 0], np.asarray(image))
    assert np.array_equal(pixels_of(encode(rgb, "PNG"), options(3, "float32")), np.asarray(rgb))
    floats = encode(Image.fromarray(BANDS[..., 0].astype(np.float32) / 7), "TIFF")
    assert np.array_equal(pixels_of(floats, options(1, "float32"))[..., 0], BANDS[..., 0].astype(np.float32) / 7)


HUGE = npy(np.zeros((2, 2), np.uint16)).replace(b"(2, 2)", b"(9, 9)")


@each_row(("item", "wanted", "message"), [
    (npy(BANDS), options(4, "uint16"), "expected 4 channels"),
    (npy(BANDS), options(5), r"got uint16 pixels; expected uint8 \(DATA.PIXELS\)"),
    (npy(np.full((4, 4), np.nan)), options(1, "float32"), "NaN or infinite"),
    (npy(np.array([[None, 1]]), allow_pickle=True), options(1), "expected numbers"),
    (npy(BANDS)[:-3], options(5, "uint16"), "truncated"),
    (HUGE, options(1, "uint16"), "truncated"),
    (npy(BANDS), options(5, "uint16", max_pixels=50), "more than DATA.MAX_PIXELS 50"),
    (b"\x93NUMPY\x07\x00rubbish", options(1), "version|magic"),
    (b"II*\0rubbish", options(5, "uint16"), "TIFF without an image"),
    (deep_png(), options(3, "uint16"), "16-bit color PNG.*convert it to TIFF or .npy"),
    (torch.zeros(5, 8, 8), options(5, "float32", max_pixels=63), "more than DATA.MAX_PIXELS 63"),
])  # fmt: skip
def test_other_images_are_refused_with_the_reason(item, wanted, message):
    with pytest.raises((ValueError, OSError), match=message):
        if isinstance(item, bytes):
            pytest.importorskip("tifffile", reason="tifffile is not installed")
        pixels_of(item, wanted)


@pytest.mark.parametrize("size", [(5, 7), (30, 20)])
def test_floating_point_pixels_are_resized_without_rounding(size):
    values = torch.from_numpy(BANDS.astype(np.float32)).permute(2, 0, 1)
    found = resize(values, *size)
    for channel, plane in enumerate(values.numpy()):
        expected = np.asarray(Image.fromarray(plane).resize(size[::-1], Image.Resampling.BILINEAR))
        assert np.allclose(found[channel].numpy(), expected, rtol=1e-5, atol=0.1)
    assert not torch.equal(found, found.round())
    assert resize(values, *size, "opencv_area").dtype == resize(values, *size, "opencv_linear").dtype == torch.float32


def test_normalization_and_erasing_use_the_range_of_the_pixels():
    pixels = torch.full((2, 5, 4, 6), 65535.0)
    assert torch.allclose(Normalizer(CPU, [0.5] * 5, [0.25] * 5, False, one=65535)(pixels), torch.tensor(2.0))
    for std in (None, (0.1,) * 5):
        erased = Erasing(1.0, (0.5,) * 5, std, 65535)(pixels[0])
        changed = erased != pixels[0]
        assert erased.shape == pixels[0].shape and changed.any() and not changed.all()
        assert abs(float(erased[changed].mean()) / 65535 - 0.5) < 0.1


@pytest.mark.parametrize("channels", [slow(1), slow(2), slow(5)])
def test_the_first_layer_is_adapted_as_in_timm(channels):
    weight = torch.randn(8, 3, 3, 3)
    assert torch.allclose(adapt_input(weight, channels), adapt_input_conv(channels, weight), atol=1e-6)
    words = ["DATA.CHANNELS", channels, "DATA.MEAN", [0] * channels, "DATA.STD", [1] * channels, "MODEL.NUM_CLASSES", 3]
    for arch in ("resnet8", "resnet18", "timm/test_resnet", "torchvision/mobilenet_v3_small", "deit_tiny"):
        model = build_model(make_cfg(*words, "MODEL.ARCH", arch)).eval()
        assert find_input(model, channels) is not None
        assert model(torch.zeros(2, channels, 224, 224)).shape == (2, 3), arch


def test_weights_of_rgb_images_are_adapted():
    rgb = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    gray = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    load_backbone(gray, rgb.state_dict(), ["2"])
    assert torch.equal(gray[0].weight, rgb[0].weight.sum(1, keepdim=True))
    replace_input(rgb, "net", 6, keep_weights={"pretrained"})
    assert rgb[0].weight.shape == (4, 6, 3, 3) and rgb(torch.ones(1, 6, 4, 4)).shape == (1, 2)
    with pytest.raises(ConfigError, match="no convolution of three channels"):
        replace_input(nn.Sequential(nn.Linear(3, 2)), "net", 6, keep_weights=())


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    """A folder of 5-channel 16-bit arrays of two classes."""
    root, draw = tmp_path_factory.mktemp("bands"), np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 6)):
        for number, name in enumerate(("field", "water")):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                base = np.array([2000, 9000, 30000, 500, 60000]) * (1 + number) // 2
                array = draw.normal(base, 300, (30, 40, 5)).clip(0, 65535).astype(np.uint16)
                np.save(root / split / name / f"{index:02d}.npy", array)
    return root


@pytest.fixture
def bands_cfg(bands, small_cfg):
    return lambda *words: small_cfg("TRAIN.DATASET", bands, "MODEL.NUM_CLASSES", 2, "AUG.ERASING", 0.5, *FIVE, *words)


@pytest.mark.parametrize("crop", ["resized", "pad"])
def test_batches_do_not_depend_on_workers(bands_cfg, crop):
    expected = batches_of(bands_cfg("DATA.CROP", crop))
    assert expected[0].images.shape == (12, 5, 16, 16)
    for words in (("TRAIN.WORKERS", 2), ("TRAIN.WORKERS", 2, "DATA.WORKER_KIND", "thread"), ("DATA.LOADER", "device")):
        assert_same_batches(batches_of(bands_cfg("DATA.CROP", crop, *words)), expected)


def test_16_bit_files_are_reported_where_they_are_reduced(tmp_path, small_cfg):
    for name in ("ant", "bee", "cat"):
        (tmp_path / "val" / name).mkdir(parents=True)
        (tmp_path / "val" / name / "a.png").write_bytes(deep_png())
    write_tar(tmp_path / "val.tar", files_of(tmp_path / "val"))
    for name in ("imagefolder", "archive"):
        cfg = small_cfg("DATA.NAME", name, "TRAIN.DATASET", tmp_path, "TEST.DATASET", tmp_path)
        notes = build_loader(cfg, Launch("alone"), CPU, train=False).notes
        assert [note for note in notes if "16-bit images, e.g." in note and "set DATA.PIXELS uint16" in note]


def test_statistics_of_each_channel(bands, capsys):
    words = ["doctor", str(bands), "DATA.CHANNELS", "5", "DATA.PIXELS", "uint16", "--statistics"]
    assert dispatch("distribuuuu", words) == 0
    printed = capsys.readouterr().out
    arrays = np.stack([np.load(path) for path in (bands / "train").rglob("*.npy")]) / 65535
    cfg_file = bands / "statistics.yaml"
    cfg_file.write_text(printed)
    cfg = load_cfg(str(cfg_file), [])
    assert cfg.DATA.CHANNELS == 5 and cfg.DATA.PIXELS == "uint16" and "of 24 training images" in printed
    assert np.allclose(cfg.DATA.MEAN, arrays.mean((0, 1, 2)), rtol=1e-5)
    assert np.allclose(cfg.DATA.STD, arrays.std((0, 1, 2)), rtol=1e-4)


@pytest.mark.slow
def test_five_16_bit_channels_train_resume_export_and_report(bands, tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    out = tmp_path / "out"
    words = [str(word) for word in (
        "MODEL.ARCH", "timm/test_resnet", "MODEL.NUM_CLASSES", 2, "TRAIN.DATASET", bands, "TRAIN.IM_SIZE", [24, 32],
        "TEST.CROP", "squash", "TRAIN.BATCH_SIZE", 8, "TRAIN.WORKERS", 2, "OPTIM.MAX_EPOCH", 3, "AUG.MIXUP", 0.2,
        "OPTIM.WARMUP_EPOCHS", 0, "OUT_DIR", out, *FIVE,
    )]  # fmt: skip
    train(None, words)
    for to in ("onnx", "timm", "safetensors"):
        assert dispatch("distribuuuu", ["export", str(out), "--to", to, str(tmp_path / to)]) == 0, to
    assert load_run(tmp_path / "timm").transform.crop == WholeImage((24, 32), "squash")
    assert dispatch("distribuuuu", ["report", str(out)]) == 0
    capsys.readouterr()
    assert dispatch("distribuuuu", ["predict", str(out), str(bands / "val" / "water")]) == 0
    assert "water" in capsys.readouterr().out
