"""Why an image cannot be read, and what to do: its bytes are damaged, or another option or a package would read it."""

import io
import math
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from distribuuuu.config.errors import BadImageError
from distribuuuu.files.file_kinds import HEAD, LFS_POINTER, describe_content

# Brands of the formats HEIF and AVIF, after `ftyp` in the first box of a file.
_HEIF, _AVIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"), (b"avif", b"avis")
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_FLOAT = "fix: set DATA.CHANNELS {} DATA.PIXELS float32, with the DATA.MEAN and DATA.STD of doctor --statistics"
_MISSING = "the file does not exist"


class IntactImageError(ValueError):
    """An image that another option, a higher limit or a package would read; the message ends with '; fix: ...'."""


class ImageFault(NamedTuple):
    """An image that cannot be read.

    Attributes:
        reason: what failed; of an intact image with the fix.
        is_damaged: whether its bytes are wrong, or it is missing. Only such an image is skipped (DATA.ON_BAD_IMAGE).
    """

    name: str
    reason: str
    is_damaged: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    def error(self, can_skip: bool = False) -> BadImageError:
        """Return the error to raise; `can_skip`: DATA.ON_BAD_IMAGE skip would leave a damaged image out."""
        if not self.is_damaged:
            return BadImageError(f"cannot read {self}")
        skip = ", or set DATA.ON_BAD_IMAGE skip" if can_skip else ""
        if self.reason == _MISSING:
            return BadImageError(f"missing image: {self}; fix: restore it, or start again without it{skip}")
        return BadImageError(f"broken image: {self}; fix: repair or remove it{skip}")


def describe_unread(name: str, reason: str) -> str:
    """Return the line for an image that cannot be read, by the reason of its `ImageFault`; with a fix it is intact."""
    return f"{'cannot read' if '; fix: ' in reason else 'broken image:'} {name}: {reason}"


def explain_fault(name: str, error: Exception) -> ImageFault:
    """Return the fault of an image whose reading or decoding raised an error."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, IntactImageError):
        return ImageFault(name, text, is_damaged=False)
    if isinstance(error, FileNotFoundError):
        return ImageFault(name, _MISSING)
    if "PngImagePlugin.MAX_TEXT" in text or "text chunks" in text:
        fix = "the pixels are intact; fix: save the image without its text"
        return ImageFault(name, f"more text or color profile than PIL reads (64 MiB); {fix}", is_damaged=False)
    return ImageFault(name, f"{type(error).__name__}: {text}")


def open_rare(file: Any, options: Any, formats: tuple[str, ...]) -> Image.Image:
    """Return the PIL image of a file that is of none of the usual formats; else raise what it is."""
    stream: IO[bytes] = io.BytesIO(file) if isinstance(file, (bytes, bytearray, memoryview)) else file
    stream.seek(0)
    head = stream.read(HEAD)
    stream.seek(0)
    if head[4:8] == b"ftyp" and head[8:12] in _HEIF + _AVIF:
        kind = _register(head[8:12])
        try:
            return Image.open(stream, formats=[kind])
        except UnidentifiedImageError:
            raise ValueError(f"a damaged {kind} image") from None
    if head[:4] in TIFF:
        array = read_tiff(stream, options)
        if options.pixels == "uint8" and array.dtype != np.uint8:
            channels = array.shape[2] if array.ndim == 3 else 1
            raise IntactImageError(f"a TIFF of {array.dtype} pixels {array.shape}; {_FLOAT.format(channels)}")
        return Image.fromarray(array)
    what = describe_content(head)
    if what == LFS_POINTER:
        raise IntactImageError(f"it is {what}")
    raise ValueError(f"it is {what}" if what else f"not an image of a known format ({', '.join(formats)})")


def _register(brand: bytes) -> str:
    """Return the name of PIL's format of a brand; raise IntactImageError if the package that decodes it is missing."""
    Image.init()
    if brand in _AVIF and "AVIF" in Image.OPEN:
        return "AVIF"
    try:
        import pillow_heif
    except ImportError:
        kind = "an AVIF image, which needs Pillow 11.3" if brand in _AVIF else "a HEIC image, which needs pillow-heif"
        raise IntactImageError(f"{kind}; fix: pip install -U pillow 'distribuuuu[heif]'") from None
    pillow_heif.register_heif_opener()
    return "HEIF"


def read_tiff(stream: IO[bytes], options: Any) -> np.ndarray:
    """Return the first page of a TIFF, (H, W) or (H, W, C); a page refers to no other file.

    A package that is missing, and more channels than the options allow, are an IntactImageError.
    """
    fix = "fix: pip install 'distribuuuu[tiff]'"
    try:
        import tifffile
    except ImportError:
        raise IntactImageError(
            f"a TIFF that Pillow does not read needs tifffile, which is not installed; {fix}"
        ) from None
    with tifffile.TiffFile(stream) as file:
        if not len(file.pages):
            raise ValueError("a TIFF without an image")
        page: Any = file.pages[0]
        options.check_size(page.imagewidth, page.imagelength)
        if math.prod(page.shape) > max(4, options.channels) * page.imagewidth * page.imagelength:
            raise other_channels(page.shape, options)
        try:
            array = page.asarray(maxworkers=1)
        except ValueError as error:
            if "imagecodecs" not in str(error):
                raise
            raise IntactImageError(f"its compression needs imagecodecs, which is not installed; {fix}") from None
        return np.moveaxis(array, 0, -1) if page.planarconfig == 2 and array.ndim == 3 else array


def other_channels(shape: tuple[int, ...], options: Any) -> IntactImageError:
    """Return the error for pixels of another number of channels."""
    expected = f"expected {options.channels} channels (DATA.CHANNELS); fix: set DATA.CHANNELS to that of the files"
    return IntactImageError(f"got pixels of shape {shape}; {expected}")


def too_large(size: str, num_pixels: int, most: int) -> IntactImageError:
    """Return the error for an image of more pixels than allowed."""
    fix = f"fix: set DATA.MAX_PIXELS {num_pixels} or more, or scale the image down"
    return IntactImageError(f"{size} pixels are more than DATA.MAX_PIXELS {most}; {fix}")


def check_depth(image: Image.Image) -> None:
    """Raise IntactImageError for an opened image of 32 bits per channel, which 8 bits cannot show."""
    bits: Any = getattr(image, "tag_v2", {}).get(258, (8,))  # BitsPerSample of a TIFF
    if image.mode == "F" or max(bits) > 16:
        kind = "float32" if image.mode == "F" else f"{max(bits)}-bit integer"
        raise IntactImageError(f"{kind} pixels, whose range is not known; {_FLOAT.format(len(image.getbands()))}")
