"""JPEGs cut to the rows that a crop needs (ITU-T T.81, annex B)."""

import re
from typing import Any, TypeAlias

# Of decode.py, which imports this file: the bytes of an image file and its `JpegHeader`.
Buffer: TypeAlias = Any
JpegHeader: TypeAlias = Any
# The last bytes of a complete file.
END = b"\xff\xd9"
_RESTARTS = re.compile(rb"\xff[\xd0-\xd7]")


def cut_rows(data: Buffer, header: JpegHeader, top: int, bottom: int) -> tuple[Buffer, int]:
    """Return a JPEG that holds some rows of another one, and the number of its first row.

    It decodes to the same pixels in the rows [top, bottom). Rows can be dropped where each row of blocks ends in a
    restart marker, as in the files that `distribuuuu pack` writes; other files are returned unchanged.
    """
    # The size in pixels of the blocks that are coded together; one block if there is one channel.
    width, height = (8 * max(factors) if header.channels > 1 else 8 for factors in zip(*header.sampling, strict=True))
    rows = -(-header.height // height)
    # The decoder interpolates the color channels, which are coarser, between neighboring pixels.
    margin = height // 8
    first = max(0, (top - margin) // height)
    last = min(rows, -(-(bottom + margin) // height))
    across = -(-header.width // width)
    can_cut = header.is_baseline and header.restart_interval == across and header.scan_channels == header.channels
    if not can_cut or last - first > 0.9 * rows or bytes(data[-2:]) != END:
        return data, 0
    ends = [match.start() for match in _RESTARTS.finditer(data, header.scan_at)]
    if len(ends) != rows - 1:
        return data, 0
    new_height = min(last * height, header.height) - first * height
    start = ends[first - 1] + 2 if first else header.scan_at
    end = ends[last - 1] if last < rows else len(data) - 2
    cut = bytearray(data[: header.scan_at]) + data[start:end] + END
    cut[header.frame_at + 5 : header.frame_at + 7] = new_height.to_bytes(2, "big")
    for number, at in enumerate(ends[first : last - 1]):
        cut[header.scan_at + at + 1 - start] = 0xD0 + number % 8
    return cut, first * height
