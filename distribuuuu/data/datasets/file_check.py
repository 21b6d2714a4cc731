"""Check of the image files before the first epoch.

The header and the end of each evaluation image are read, since a broken one would stop a run only after its first
epoch; of training images only the file sizes are read, and a few files. Of a large set, evenly spaced files are
checked.
"""

import contextlib
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import first_few
from distribuuuu.data.datasets.array_file import NUM_THREADS, find_stamp
from distribuuuu.data.datasets.base import ImageDataset, is_file, open_nonblocking, read_file
from distribuuuu.data.decode import Buffer, DecodeOptions, build_decode_options, decode, open_image, read_jpeg_header

if TYPE_CHECKING:
    from PIL.Image import Image

# The most files that are checked: a few seconds of a start, also on a network disk.
MAX_FILES = 10_000
# Bytes that contain the header of nearly every JPEG.
_HEAD = 1 << 14
# First and last bytes of a complete file; one with another end is decoded.
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND\xaeB`\x82"}
# Files in which 16-bit pixels and other kinds of pixels are looked for.
_SAMPLES = 8


def check_images(cfg, images: ImageDataset, train: bool) -> str:
    """Return a message on the broken files of a set, or ""; BadImageError: an intact one, see `IntactImageError`."""
    if not images.has_files:
        return ""
    options, decoder = build_decode_options(cfg), cfg.DATA.DECODER

    def find_problem(index: int, in_depth: bool = not train) -> str | None:
        path = images.describe(index)
        try:
            if in_depth:
                check_file(path, decoder, options)
            elif (size := find_stamp(path)[0]) <= 0 and not os.path.isdir(path):
                return f"{path}: the file {'does not exist' if size else 'is empty'}"
        except ConfigError:  # a missing package; the message is complete
            raise
        except Exception as error:  # decoders raise nearly anything
            from distribuuuu.data.image_faults import explain_fault

            fault = explain_fault(path, error)
            if not fault.is_damaged:
                raise fault.error() from error
            return str(fault)
        return None

    num, places = len(images), range(0, len(images), -(-len(images) // MAX_FILES) or 1)
    for index in range(0, num, -(-num // _SAMPLES) or 1) if train else ():
        find_problem(index, in_depth=True)  # raises the errors of intact files, which concern all of a kind
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        broken = [*filter(None, pool.map(find_problem, places))]
    return f"{len(broken)} of {len(places)} images are broken: {first_few(broken, '; ')}" if broken else ""


def find_reduced(images: ImageDataset, options: DecodeOptions) -> str:
    """Return a message if images lose 16 bits (DATA.PIXELS uint8) or their transparency; a few images are read."""
    num = len(images) if (images.has_files or images.holds_files) and options.pixels == "uint8" else 0
    for index in range(0, num, max(1, num // _SAMPLES)):
        with contextlib.suppress(Exception):  # a broken image, which others report
            if images.holds_files and index == 0:  # the files that are opened here are not those of the run
                images = pickle.loads(pickle.dumps(images))
            if not is_file(data := images.read(index)):
                return ""
            if has_16_bits(open_image(data, options), data):
                fix = "to keep 16 bits set DATA.PIXELS uint16, and DATA.CHANNELS to those of the files"
                return f"16-bit images, e.g. {images.describe(index)}, are reduced to 8 bits; {fix}"
            if options.channels == 3 and is_transparent(open_image(data, options)):
                shown = "its stored colors are shown where it is transparent"
                return f"images with transparency, e.g. {images.describe(index)}, lose it: {shown}"
    return ""


def has_16_bits(image: "Image", file: Buffer = b"") -> bool:
    """Return whether an opened image has more than 8 bits per channel; of a PNG by the bytes of its file."""
    if image.format == "PNG" and file:
        return bytes(file[24:25]) == b"\x10"  # the header: PIL opens colors of 16 bits as those of 8
    if image.format == "TIFF":
        bits: Any = getattr(image, "tag_v2", {}).get(258, (8,))  # BitsPerSample
        return max(bits) == 16
    return image.mode.startswith("I")


def is_transparent(image: "Image") -> bool:
    """Return whether some pixels of an opened image are transparent."""
    if image.mode in ("RGBA", "LA", "PA"):
        least: Any = image.getchannel("A").getextrema()[0]
        return least < 255
    return "transparency" in image.info


def check_file(path: str, decoder: str, options: DecodeOptions) -> None:
    """Read the header and the end of an image file; decode it unless it ends like a complete file; raise its errors."""
    with open(path, "rb", opener=open_nonblocking) as file:
        head = file.read(_HEAD)
        if not head:
            raise ValueError("the file is empty")
        if not options.is_rgb:
            decode(read_file(path), decoder, options)
            return
        if header := read_jpeg_header(head):
            options.check_size(header.width, header.height)
        else:
            file.seek(0)
            open_image(file, options)
        end = _ENDS.get(head[:2], b"")
        file.seek(-min(len(head), len(end)), os.SEEK_END)
        is_complete = file.read() == end
    if not is_complete:
        decode(read_file(path), decoder, options)
