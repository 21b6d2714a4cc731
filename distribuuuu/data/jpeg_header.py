"""JPEG headers, and JPEGs reduced to the rows that a crop needs (ITU-T T.81, annex B). Decoding is in decode.py."""

import re
from dataclasses import dataclass

from distribuuuu.data.lazy_image import Buffer

# The last bytes of a complete file.
END = b"\xff\xd9"

_START, _RESTART_INTERVAL, _START_OF_SCAN = 0xD8, 0xDD, 0xDA
# Markers C0 to CF start a frame, except these three: Huffman tables, an extension, arithmetic conditioning.
_NO_FRAME = (0xC4, 0xC8, 0xCC)
_BASELINE = (0xC0, 0xC1)
_RESTARTS = re.compile(rb"\xff[\xd0-\xd7]")


@dataclass
class JpegHeader:
    """The frame of a JPEG, and the positions of its parts in the file.

    Attributes:
        height, width: in pixels.
        bits: per sample.
        sampling: (horizontal, vertical) sampling factors of each channel.
        frame_at: position of the frame's marker.
        is_baseline: sequential Huffman coding.
        restart_interval: blocks between two restart markers; 0: none.
        scan_at: position of the first scan's data; 0: not read yet.
        scan_channels: channels in the first scan.
    """

    height: int
    width: int
    bits: int
    sampling: list[tuple[int, int]]
    frame_at: int
    is_baseline: bool
    restart_interval: int = 0
    scan_at: int = 0
    scan_channels: int = 0

    @property
    def channels(self) -> int:
        """Number of channels: 1 gray, 3 color, 4 CMYK."""
        return len(self.sampling)

    @property
    def block_height(self) -> int:
        """Height in pixels of the blocks that are coded together (one block if there is one channel)."""
        return 8 * max(vertical for _, vertical in self.sampling) if self.channels > 1 else 8

    @property
    def block_width(self) -> int:
        """Width in pixels of the blocks that are coded together (one block if there is one channel)."""
        return 8 * max(horizontal for horizontal, _ in self.sampling) if self.channels > 1 else 8


def read_jpeg_header(data: Buffer) -> JpegHeader | None:
    """Return the header up to the first scan; None if the data is no JPEG or ends before it."""
    if bytes(data[:2]) != bytes((0xFF, _START)):
        return None
    header, restart_interval, position, length = None, 0, 2, len(data)
    while position + 4 <= length:
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        end = position + 2 + (data[position + 2] << 8 | data[position + 3])
        if end > length:
            return None
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            header = _read_frame(data, position)
        elif marker == _RESTART_INTERVAL:
            restart_interval = data[position + 4] << 8 | data[position + 5]
        elif marker == _START_OF_SCAN:
            if header:
                header.restart_interval = restart_interval
                header.scan_at, header.scan_channels = end, data[position + 4]
            return header
        position = end
    return None


def _read_frame(data: Buffer, at: int) -> JpegHeader:
    height, width = (data[at + i] << 8 | data[at + i + 1] for i in (5, 7))
    factors = [data[at + 11 + 3 * channel] for channel in range(data[at + 9])]
    sampling = [(factor >> 4, factor & 15) for factor in factors]
    return JpegHeader(height, width, data[at + 4], sampling, at, data[at + 1] in _BASELINE)


def cut_rows(data: Buffer, header: JpegHeader, top: int, bottom: int) -> tuple[Buffer, int]:
    """Return a JPEG that holds some rows of another one, and the number of its first row.

    It decodes to the same pixels in the rows [top, bottom). Rows can be dropped where each row of blocks ends in a
    restart marker, as in the files that `distribuuuu pack` writes; other files are returned unchanged.
    """
    rows = -(-header.height // header.block_height)
    # The decoder interpolates the color channels, which are coarser, between neighboring pixels.
    margin = header.block_height // 8
    first = max(0, (top - margin) // header.block_height)
    last = min(rows, -(-(bottom + margin) // header.block_height))
    across = -(-header.width // header.block_width)
    can_cut = header.is_baseline and header.restart_interval == across and header.scan_channels == header.channels
    if not can_cut or last - first > 0.9 * rows or bytes(data[-2:]) != END:
        return data, 0
    data = bytes(data)
    ends = [match.start() for match in _RESTARTS.finditer(data, header.scan_at)]
    if len(ends) != rows - 1:
        return data, 0
    starts = [header.scan_at, *(end + 2 for end in ends)]
    ends.append(len(data) - 2)
    height = min(last * header.block_height, header.height) - first * header.block_height
    at = header.frame_at + 5
    parts = [data[:at], height.to_bytes(2, "big"), data[at + 2 : header.scan_at]]
    for number, row in enumerate(range(first, last)):
        parts += [data[starts[row] : ends[row]], bytes((0xFF, 0xD0 + number % 8))]
    parts[-1] = END
    return b"".join(parts), first * header.block_height
