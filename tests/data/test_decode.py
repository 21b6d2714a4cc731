"""Decoding: every decoder gives PIL's pixels, refuses what is broken, and decodes no more than a crop needs."""

import io
import itertools
import random
import re
import resource
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from support.images import difference, encode, needs, scene, tensor_of, with_png_size
from support.tables import pairwise

from distribuuuu.data import decode as own
from distribuuuu.data.batch import Samples
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.decode import Box, DecodeOptions, EncodedImage, decode, open_lazy_image, read_jpeg_header
from distribuuuu.data.optional_decoders import cut_rows
from distribuuuu.data.raster import pil_to_tensor
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import CenterCrop, random_resized_box, resize

DECODERS = ("auto", "pil", "nvimgcodec")
SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")


@pytest.fixture(params=DECODERS)
def decoder(request) -> str:
    needs(request.param)
    return request.param


def pil_pixels(data: bytes) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a palette with transparency
        return tensor_of(Image.open(io.BytesIO(data)))


def assert_refused(data: bytes, decoder: str, words: str = ".") -> None:
    """Check that an ordinary error says in a few words what is wrong, without addresses in memory."""
    with pytest.raises(Exception, match=words) as caught:
        decode(data, decoder)
    message = str(caught.value)
    assert message and len(message) <= 250 and "\n" not in message, message
    assert not re.search(r"0x[0-9a-f]{6,}| object at |\.cpp", message), message


SCENE = scene(60, 44)
JPEG = encode(SCENE, subsampling="4:2:0")
PNG = encode(SCENE, "PNG")


def as_ycck(cmyk: bytes) -> bytes:
    """Return a CMYK JPEG with the mark of YCCK, which other programs write."""
    mark = cmyk.index(b"Adobe") + 11
    return cmyk[:mark] + b"\x02" + cmyk[mark + 1 :]


def see_through() -> Image.Image:
    image = SCENE.convert("RGBA")
    image.putalpha(SCENE.convert("L"))
    return image


def oriented(kind: str, orientation: int = 6) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(SCENE, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


# Read by every decoder.
FILES = {
    **{f"jpeg {name}": encode(SCENE, subsampling=name) for name in SUBSAMPLINGS},
    **{f"progressive {name}": encode(SCENE, subsampling=name, progressive=True) for name in SUBSAMPLINGS},
    "gray jpeg": encode(SCENE.convert("L")), "restart markers": encode(SCENE, restart_marker_rows=1),
    "jpeg with orientation": oriented("JPEG"), "png": PNG, "png with orientation": oriented("PNG"),
    "rgba png": encode(see_through(), "PNG"), "la png": encode(see_through().convert("LA"), "PNG"),
    "palette": encode(SCENE.quantize(32), "PNG"),
    "palette, one transparent": encode(SCENE.quantize(32), "PNG", transparency=3),
    "palette, some transparent": encode(SCENE.quantize(32), "PNG", transparency=bytes(range(32))),
    "1 bit": encode(SCENE.convert("1"), "PNG"),
    "animated png": encode(SCENE, "PNG", save_all=True, append_images=[scene(60, 44, 1)]),
    "animated gif": encode(SCENE, "GIF", save_all=True, append_images=[scene(60, 44, 1)]),
    "webp": encode(SCENE, "WEBP", lossless=True), "20,000 px wide": encode(scene(20000, 3), quality=90),
    "20,000 px high": encode(scene(3, 20000), quality=90), "one pixel": encode(scene(1, 1)),
}  # fmt: skip
# Read by PIL, which all decoders fall back on.
PIL_FILES = {
    "cmyk jpeg": encode(SCENE.convert("CMYK")), "ycck jpeg": as_ycck(encode(SCENE.convert("CMYK"))),
    "animated webp": encode(SCENE, "WEBP", lossless=True, save_all=True, append_images=[scene(60, 44, 1)]),
    "bmp": encode(SCENE, "BMP"), "tiff": encode(SCENE, "TIFF"), "ppm": encode(SCENE, "PPM"),
}  # fmt: skip


def test_every_decoder_reads_what_pil_reads(decoder):
    for name, data in FILES.items():
        pixels = decode(data, decoder)
        assert pixels.dtype == torch.uint8 and difference(pixels, pil_pixels(data)) <= 0.1, name
    for name, data in PIL_FILES.items():
        assert torch.equal(decode(data, decoder), pil_pixels(data)), name


def test_other_kinds_of_pixels_are_converted_or_refused():
    gray = SCENE.convert("L")
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    for kind, decoder in itertools.product(("PNG", "TIFF", "PPM"), ("auto", "pil")):
        assert torch.equal(decode(encode(deep, kind), decoder), tensor_of(gray)), (kind, decoder)
    with pytest.raises(ValueError, match="float32"):
        pil_to_tensor(Image.new("F", (4, 4)))


def test_any_buffer_is_read_and_left_as_it_is(decoder):
    for data in (FILES[name] for name in ("jpeg 4:2:0", "restart markers", "png", "animated gif")):
        expected = decode(data, decoder)
        for buffer in (bytearray(data), memoryview(data), memoryview(bytearray(data)), memoryview(b"x" + data)[1:]):
            assert torch.equal(decode(buffer, decoder), expected)
            EncodedImage(buffer, decoder).crop(Box(16, 4, 10, 12))
            assert bytes(buffer) == data


def with_jpeg_size(data: bytes, width: int, height: int) -> bytes:
    at = read_jpeg_header(data).frame_at + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


@pytest.fixture
def little_memory():
    """Let no more than 1 GiB be allocated on top of what the process has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


HUGE_TIFF = (
    encode(scene(8, 8), "TIFF")
    .replace(struct.pack("<HHII", 256, 4, 1, 8), struct.pack("<HHII", 256, 4, 1, 60000))
    .replace(struct.pack("<HHII", 257, 4, 1, 8), struct.pack("<HHII", 257, 4, 1, 60000))
)
JPEGS = ("jpeg 4:2:0", "progressive 4:2:0", "gray jpeg", "restart markers")
HUGE = {
    **{name: with_jpeg_size(FILES[name], 65500, 65500) for name in JPEGS}, "png": with_png_size(PNG, 60000, 60000),
    "tiff": HUGE_TIFF, "bmp": PIL_FILES["bmp"][:18] + struct.pack("<ii", 60000, 60000) + PIL_FILES["bmp"][26:],
    "ppm": b"P6 60000 60000 255 " + bytes(99),
    "gif": b"GIF89a" + struct.pack("<HH", 60000, 60000) + encode(SCENE, "GIF")[10:],
    "webp": b"RIFF\x3a\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\x5f\xea\0" * 2 + encode(SCENE, "WEBP")[12:],
}  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_a_file_of_any_format_that_claims_to_be_huge_is_refused_without_memory(decoder, little_memory):
    for name, data in HUGE.items():
        said = ".*" if name == "webp" else "pixels are more than DATA.MAX_PIXELS 178956970"
        assert_refused(data, decoder, said)
        with pytest.raises(Exception, match="pixels" if name in JPEGS else "."):
            EncodedImage(data, decoder).crop(Box(0, 0, 9, 9))


@pytest.mark.filterwarnings("ignore")
def test_the_limit_holds_for_pixels_too_and_may_be_above_pils(monkeypatch):
    for item in (SCENE, np.asarray(SCENE), tensor_of(SCENE)):
        assert open_lazy_image(item, "auto").size == (44, 60)
        with pytest.raises(ValueError, match="60 x 44 pixels are more than DATA.MAX_PIXELS"):
            open_lazy_image(item, "auto", DecodeOptions(max_pixels=60 * 44 - 1))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert own.open_image(PNG, DecodeOptions(2640)).size == (60, 44)


def test_a_postscript_file_with_the_name_of_a_jpeg_starts_no_ghostscript(tmp_path, decoder, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args: pytest.fail("a program was started"))
    (tmp_path / "train" / "a").mkdir(parents=True)
    text = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n"
    (tmp_path / "train" / "a" / "x.jpg").write_bytes(text)
    sample = Samples(ImageFolder(tmp_path, "train"), CenterCrop(8, 8), decoder, skip_broken=False).make((0, 0))
    expected = f"not an image of a known format ({', '.join(own.FORMATS)})"
    assert str(sample.broken[0]).endswith(f"a/x.jpg: ValueError: {expected}")


@pytest.mark.parametrize("kind, decoder", pairwise(("JPEG", "PNG", "WEBP", "TIFF"), DECODERS))
def test_exif_orientation_is_applied_if_asked(kind, decoder):
    needs(decoder)
    options, box = DecodeOptions(exif_rotate=True), Box(8, 4, 30, 20)
    for orientation in range(10):
        data = oriented(kind, orientation)
        expected = tensor_of(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        lazy_image = EncodedImage(data, decoder, options)
        assert lazy_image.size == tuple(expected.shape[1:]), orientation
        for found in (decode(data, decoder, options),
                      open_lazy_image(Image.open(io.BytesIO(data)), decoder, options).pixels()):  # fmt: skip
            assert difference(found, expected) <= 0.1, orientation
        assert difference(lazy_image.crop(box), box.crop(expected)) <= 0.1
        shapes = decode(data, decoder).shape, EncodedImage(data, decoder).pixels().shape
        assert kind == "TIFF" or shapes == ((3, 44, 60),) * 2


CUT = (*JPEGS, "png", "animated gif", "webp", "bmp", "tiff", "cmyk jpeg")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Truncated File Read")
@pytest.mark.parametrize("name, decoder", pairwise(CUT, DECODERS))
def test_a_file_that_is_cut_is_refused_or_complete(name, decoder):
    needs(decoder)
    data = (FILES | PIL_FILES)[name]
    full = decode(data, decoder)
    for end in (*range(1, 60), *range(60, len(data) - 9, max(1, len(data) // 60)), *range(len(data) - 9, len(data))):
        try:
            pixels = decode(data[:end], decoder)
        except Exception as error:
            assert len(str(error)) < 250
        else:
            assert torch.equal(pixels, full), f"cut at {end} of {len(data)}"


NOISE = random.Random(0).randbytes(500)
NO_IMAGES = {
    "empty": b"", "text": b"hello, this is a text\n" * 20, "noise": NOISE,
    "noise like a jpeg": b"\xff\xd8\xff\xe0" + NOISE, "noise like a png": b"\x89PNG\r\n\x1a\n" + NOISE,
    "two bytes of a jpeg": b"\xff\xd8", "fill bytes": b"\xff\xd8\xff\xff\xff\xff", "fill bytes alone": b"\xff" * 99,
    "empty segments": b"\xff\xd8" + b"\xff\xe0\x00\x00" * 50,
    "a frame without a size": b"\xff\xd8\xff\xc0\x00\x02\xff\xda\x00\x02",
}  # fmt: skip


def test_what_is_no_image_is_refused(decoder):
    for name, data in NO_IMAGES.items():
        assert_refused(data, decoder, "the file is empty" if name == "empty" else ".")
        with pytest.raises(Exception, match="."):
            EncodedImage(data, decoder).crop(Box(0, 0, 1, 1))


def test_a_jpeg_with_bytes_too_many_is_read_by_every_decoder(decoder):
    """ImageNet has such files."""
    data = JPEG[:-2] + b"\x11" * 20 + JPEG[-2:]
    assert torch.equal(decode(data, decoder), pil_pixels(JPEG))
    assert torch.equal(decode(JPEG + b"\x00" * 9, decoder), pil_pixels(JPEG))
    assert EncodedImage(data, decoder).crop(Box(0, 0, 44, 60)).shape[0] == 3


def pil_crop(image: Image.Image, box: Box, size: int) -> torch.Tensor:
    part = image.convert("RGB").crop((box.left, box.top, box.left + box.width, box.top + box.height))
    return tensor_of(part.resize((size, size), Image.Resampling.BILINEAR))


def test_crops_are_those_of_pil(decoder):
    sizes = [(400, 300), (333, 257), (401, 533), (256, 512)]
    for number, size in enumerate((160, 96, 32, 16)):
        image = scene(*sizes[number], number)
        for data in (encode(image, subsampling="4:2:0", quality=88, restart_marker_rows=1), encode(image, "PNG")):
            lazy_image = EncodedImage(data, decoder)
            box = random_resized_box(SampleRNG(1, number), *lazy_image.size, (0.3, 1))
            found = resize(lazy_image.crop(box), size, size)
            assert difference(found, pil_crop(Image.open(io.BytesIO(data)), box, size)) <= 0.5


@pytest.mark.filterwarnings("error")
def test_pixels_of_any_kind_are_taken():
    drawn = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    frozen, image, planes = drawn.copy(), Image.fromarray(drawn), torch.from_numpy(drawn).permute(2, 0, 1)
    frozen.flags.writeable = False  # no warning
    for item in (frozen, image, planes, image.convert("RGBA"), drawn[:, ::-1][:, ::-1], np.asfortranarray(drawn)):
        assert torch.equal(open_lazy_image(item, "auto").pixels(), planes)
    gray = drawn[:, :, 0].copy()
    for item in (gray, gray[:, :, None], Image.fromarray(gray)):
        assert torch.equal(open_lazy_image(item, "auto").pixels(), planes[:1].expand(3, -1, -1))


@pytest.mark.parametrize("mode", [*SUBSAMPLINGS, "gray"])
def test_the_rows_of_a_cut_jpeg_are_those_of_the_whole(mode):
    words = {} if mode == "gray" else {"subsampling": mode}
    num_cut, draw = 0, random.Random(mode)
    for height, width in itertools.product((1, 8, 9, 17, 31, 97, 130), (1, 7, 16, 33)):
        image = scene(width, height, height).convert("L" if mode == "gray" else "RGB")
        data = encode(image, restart_marker_rows=1, quality=85, **words)
        full, some = pil_pixels(data), sorted(draw.sample(range(height + 1), 2))
        for top, bottom in {(0, 1), (0, height), (height - 1, height), (height // 2, height // 2 + 1), tuple(some)}:
            part, first = cut_rows(data, read_jpeg_header(data), top, bottom)
            rows = pil_pixels(bytes(part))[:, top - first : bottom - first]
            assert torch.equal(rows, full[:, top:bottom]), (height, width, top, bottom)
            num_cut += bytes(part) != data
    assert num_cut > 20


def test_what_cannot_be_cut_comes_back_whole_and_a_part_is_smaller_than_the_file():
    image = scene(90, 400)
    data = encode(image, restart_marker_rows=1)
    part, first = cut_rows(data, read_jpeg_header(data), 200, 232)
    assert len(part) < len(data) / 3 and 150 < first <= 200
    width, height = Image.open(io.BytesIO(part)).size
    assert width == 90 and 32 <= height <= 80
    no_row_ends = {
        "no restarts": encode(image), "progressive": encode(image, progressive=True, restart_marker_rows=1),
        "restarts within rows": encode(image, restart_marker_blocks=2), "cut at the end": data[:-2],
        "restarts over rows": encode(image, restart_marker_rows=2), "cut by a byte": data[:-1],
        "bytes after the end": data + b"\x00\x01", "a restart too few": data.replace(b"\xff\xd1", b"", 1),
    }  # fmt: skip
    for name, other in no_row_ends.items():
        part, first = cut_rows(other, read_jpeg_header(other), 100, 120)
        assert part is other and first == 0, name
