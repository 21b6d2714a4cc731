"""Why an image cannot be read, and what to do: its bytes are damaged, or another option or a package would read it."""

import io
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from distribuuuu.config.errors import BadImageError
from distribuuuu.files.file_kinds import HEAD, LFS_POINTER, describe_content

# Brands of the formats HEIF and AVIF, after `ftyp` in the first box of a file.
_HEIF, _AVIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"), (b"avif", b"avis")
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_FLOAT = "fix: set DATA.CHANNELS {} DATA.PIXELS float32, with the DATA.MEAN and DATA.STD of doctor --statistics"


class IntactImageError(ValueError):
    """An image that another option, a higher limit or a package would read; the message ends with '; fix: ...'."""


class ImageFault(NamedTuple):
    """An image that cannot be read.

    Attributes:
        name: its file.
        reason: what failed; of an intact image with the fix.
        is_damaged: whether its bytes are wrong. Only such an image is skipped (DATA.ON_BAD_IMAGE).
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
        return BadImageError(f"broken image: {self}; fix: repair or remove it{skip}")


def explain_fault(name: str, error: Exception) -> ImageFault:
    """Return the fault of an image whose reading or decoding raised an error."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, IntactImageError):
        return ImageFault(name, text, is_damaged=False)
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
        return _open_tiff(stream, options)
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


def _open_tiff(stream: IO[bytes], options: Any) -> Image.Image:
    """Return the first page of a TIFF whose compression or layout PIL does not know."""
    try:
        import tifffile
    except ImportError:
        fix = "fix: pip install 'distribuuuu[tiff]'"
        raise IntactImageError(f"a TIFF whose compression or layout Pillow does not know; {fix}") from None
    with tifffile.TiffFile(stream) as file:
        page: Any = file.pages[0]
        options.check_size(page.imagewidth, page.imagelength)
        channels, is_8_bit = page.samplesperpixel, page.dtype == np.uint8
        if page.ndim != (2 if channels == 1 else 3) or (options.pixels == "uint8" and not is_8_bit):
            raise IntactImageError(f"a TIFF of {page.dtype} pixels {page.shape}; {_FLOAT.format(channels)}")
        return Image.fromarray(np.moveaxis(read_page(page), 0, -1) if page.planarconfig == 2 else read_page(page))


def read_page(page: Any) -> np.ndarray:
    """Return the pixels of a page of tifffile; raise IntactImageError if the package of its compression is missing."""
    try:
        return page.asarray(maxworkers=1)
    except ValueError as error:
        if "imagecodecs" not in str(error):
            raise
        fix = "fix: pip install 'distribuuuu[tiff]'"
        raise IntactImageError(f"its compression needs imagecodecs, which is not installed; {fix}") from None


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
