"""JPEGs reduced to the rows that a crop needs (ITU-T T.81, annex B)."""

import re

from distribuuuu.data.image_file import Buffer, JpegHeader

# The last bytes of a complete file.
END = b"\xff\xd9"
_RESTARTS = re.compile(rb"\xff[\xd0-\xd7]")


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
