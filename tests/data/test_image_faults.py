"""Images that cannot be read: damaged ones, and intact ones that need an option, a higher limit or a package."""

import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from support.images import draw_folder, encode
from support.tables import each_row

from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import BadImageError
from distribuuuu.data.datasets.file_check import check_file
from distribuuuu.data.decode import DEFAULTS, decode
from distribuuuu.data.image_faults import describe_unread, explain_fault
from distribuuuu.data.loader import build_loader
from distribuuuu.inference.forward_chunks import UnlabeledImages
from distribuuuu.launch.detect import detect_launch

scan = pytest.importorskip("distribuuuu.commands.scan.scan", reason="the commands that scan have been deleted")
BROKEN, INTACT, measure_image, scan_images = scan.BROKEN, scan.INTACT, scan.measure_image, scan.scan_images
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 20, 3), np.uint8)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:07\nsize 46827520\n"
DAMAGED, INTACT_ONE = True, False


def encoded(kind: str, pixels: np.ndarray = PIXELS, **words) -> bytes:
    return encode(Image.fromarray(pixels), kind, **words)


def tiff(pixels: np.ndarray = PIXELS, **words) -> bytes:
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, **words)
    return file.getvalue()


def with_text(num: int) -> bytes:
    text = PngImagePlugin.PngInfo()
    text.add_text("parameters", "a long prompt " * (num // 14), zip=True)
    return encoded("PNG", pnginfo=text, icc_profile=bytes(2 << 20))


def deep(dtype: type) -> bytes:
    return encoded("TIFF", (PIXELS[..., 0] * 1000.0).astype(dtype))


def other(**words):
    return DEFAULTS._replace(**words)


@each_row(("data", "options", "damaged", "said"), [
    (lambda: b"", DEFAULTS, DAMAGED, "the file is empty"),
    (lambda: encoded("JPEG")[:400], DEFAULTS, DAMAGED, "(?i)truncated"),
    (lambda: b"\n<!DOCTYPE html><html>404", DEFAULTS, DAMAGED, "it is an HTML page"),
    (lambda: b'<?xml version="1.0"?><Error>', DEFAULTS, DAMAGED, "it is an XML or JSON text"),
    (lambda: b"\x1f\x8b rest", DEFAULTS, DAMAGED, "it is a compressed archive"),
    (lambda: POINTER, DEFAULTS, INTACT_ONE, "a pointer of Git LFS.*; fix: git lfs install"),
    (lambda: deep(np.float32), DEFAULTS, INTACT_ONE, "float32 pixels.*fix: set DATA.CHANNELS 1 DATA.PIXELS float32"),
    (lambda: deep(np.int32), DEFAULTS, INTACT_ONE, "32-bit integer.*fix: set DATA.CHANNELS 1 DATA.PIXELS float32"),
    (lambda: deep(np.int32), other(channels=1), INTACT_ONE, "fix: set DATA.CHANNELS 1 DATA.PIXELS float32"),
    (lambda: deep(np.int32), other(channels=1, pixels="uint16"), INTACT_ONE, "got int32.*fix: set DATA.PIXELS float32"),
    (lambda: encoded("PNG"), other(pixels="uint16"), INTACT_ONE, "got uint8 pixels.*fix: set DATA.PIXELS uint8"),
    (lambda: tiff(PIXELS.astype(np.float32), photometric="rgb"), DEFAULTS, INTACT_ONE, "fix: set DATA.CHANNELS 3"),
    (lambda: encoded("PNG"), other(max_pixels=479), INTACT_ONE, "20 x 24 pixels are more than DATA.MAX_PIXELS 479"),
    (lambda: with_text(70 << 20), DEFAULTS, INTACT_ONE, "64 MiB.*the pixels are intact; fix: save the image without"),
])  # fmt: skip
def test_each_cause_has_its_answer_and_only_damage_is_skipped(data, options, damaged, said):
    with pytest.raises((ValueError, OSError)) as caught:
        decode(data(), options=options)
    fault = explain_fault("a.png", caught.value)
    assert fault.is_damaged is damaged
    assert describe_unread("b.png", fault.reason).startswith("broken image: b.png" if damaged else "cannot read b.png")
    with pytest.raises(BadImageError, match=said) as raised:
        raise fault.error(can_skip=True)
    assert ("repair or remove it, or set DATA.ON_BAD_IMAGE skip" in str(raised.value)) is damaged
    assert str(raised.value).count("; fix: ") == 1


@pytest.mark.parametrize("package, kind, said", [
    ("imagecodecs", "lzw", "compression needs imagecodecs, which is not installed; fix: pip install 'distribuuuu.tiff"),
    ("tifffile", "jpegxl", "needs tifffile, which is not installed; fix: pip install 'distribuuuu.tiff"),
    ("pillow_heif", "HEIF", "a HEIC image, which needs pillow-heif; fix: pip install -U pillow 'distribuuuu.heif"),
])  # fmt: skip
def test_an_image_that_needs_a_package_is_read_with_it_and_else_names_it(monkeypatch, package, kind, said):
    module = pytest.importorskip(package, reason=f"{package} is not installed")
    pytest.importorskip("imagecodecs", reason="imagecodecs is not installed")
    if kind == "HEIF":
        module.register_heif_opener()
        data, options = encoded(kind, quality=-1), DEFAULTS
    else:
        pixels = np.dstack([PIXELS, PIXELS]) if kind == "lzw" else PIXELS
        words = {"planarconfig": "contig", "photometric": "minisblack"} if kind == "lzw" else {}
        data, options = tiff(pixels, compression=kind, **words), other(channels=pixels.shape[2])
    whole = decode(data, options=options)
    assert whole.shape == (options.channels, 24, 20)
    if kind == "lzw":
        refusal = ValueError("<COMPRESSION.LZW: 5> requires the 'imagecodecs' package")
        monkeypatch.setattr("tifffile.TiffPage.asarray", lambda *args, **words: (_ for _ in ()).throw(refusal))
    else:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=said) as caught:
        decode(data, options=options)
    assert not explain_fault("a.tif", caught.value).is_damaged


def test_a_long_text_or_color_profile_does_not_matter():
    assert np.array_equal(decode(with_text(3 << 20)).permute(1, 2, 0), PIXELS)
    avif = pytest.importorskip("PIL.AvifImagePlugin", reason="Pillow has no AVIF")
    if avif.SUPPORTED:
        assert decode(encoded("AVIF")).shape == (3, 24, 20)


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_intact_image_stops_a_run_that_skips_damaged_ones(small_cfg, tmp_path, split):
    for name in ("train", "val"):
        draw_folder(tmp_path, name, {"ant": 8, "bee": 8})
    words = ("TRAIN.DATASET", tmp_path, "MODEL.NUM_CLASSES", 2, "DATA.ON_BAD_IMAGE", "skip", "TRAIN.BATCH_SIZE", 16)
    path = tmp_path / split / "ant" / "000.jpg"
    path.write_bytes(b"torn")
    cfg, cpu = small_cfg(*words), torch.device("cpu")
    assert sum(len(batch.targets) for batch in build_loader(cfg, detect_launch(), cpu, split == "train")) == 16
    path.write_bytes(POINTER)
    with pytest.raises(BadImageError, match=r"^cannot read .*ant/000\.jpg: it is a pointer of Git LFS"):
        list(build_loader(cfg, detect_launch(), cpu, split == "train"))
    with pytest.raises(ValueError, match="Git LFS"):
        check_file(str(path), "auto", DEFAULTS)
    scan = scan_images({"all": UnlabeledImages([str(path), PIXELS])}, DEFAULTS, 0, lambda num: None)
    assert scan.records["flags"].tolist() == [BROKEN | INTACT, 0] and "Git LFS" in scan.reasons[0]
    with pytest.raises(ValueError, match="float32"):
        measure_image(deep(np.float32), DEFAULTS, {})


@each_row(("name", "content", "said"), [
    ("w.pth", POINTER, "is a pointer of Git LFS.*fix: git lfs"),
    ("w.safetensors", POINTER, "is a pointer of Git LFS.*fix: git lfs"),
    ("w.pth", b"<html>sign in</html>", "is an HTML page.*fix: download the file again"),
    ("w.pth", b"", "is empty; fix: download the file again"),
    ("w.pth", b"PK\3\4" + bytes(400), "it ends early: an incomplete download or copy; fix: download or copy"),
])  # fmt: skip
def test_a_file_that_is_no_weights_is_never_to_be_unpickled(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_checkpoint(tmp_path / name)
    assert isinstance(caught.value, ConfigError) and "weights_only" not in str(caught.value)
