"""JPEGs cut to the rows that a crop needs (ITU-T T.81, annex B), and nvimgcodec, which decodes a region only."""

import importlib
import os
import re
import threading
from typing import Any, TypeAlias

import numpy as np
import torch

# Of decode.py, which imports this file: the box of a crop, the bytes of a file and its `JpegHeader`.
Box: TypeAlias = Any
Buffer: TypeAlias = Any
JpegHeader: TypeAlias = Any
# The last bytes of a complete file.
END = b"\xff\xd9"
_RESTARTS = re.compile(rb"\xff[\xd0-\xd7]")
_decoders = threading.local()


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


def decode_nvimgcodec(data: Buffer) -> torch.Tensor | None:
    """Return uint8 (3, H, W), or None if nvimgcodec refuses the file; another decoder may read it."""
    codec, decoder, params = _open_nvimgcodec()
    image = decoder.decode(codec.CodeStream(bytes(data)), params=params)
    return None if image is None else torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


def crop_nvimgcodec(data: Buffer, header: JpegHeader, box: Box) -> torch.Tensor | None:
    """Return a region, as libjpeg-turbo decodes it; None for a file that is cut, even if its region is complete."""
    if bytes(data[-2:]) != END:
        return None
    codec, decoder, params = _open_nvimgcodec()
    data, first_row = cut_rows(data, header, box.top, box.top + box.height)
    region = codec.Region(top := box.top - first_row, box.left, top + box.height, box.left + box.width)
    image = decoder.decode(codec.CodeStream(bytes(data)).get_sub_code_stream(region=region), params=params)
    return None if image is None else torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


def _open_nvimgcodec() -> tuple[Any, Any, Any]:
    """Return the module, the decoder of this thread, and its parameters; a decoder does not survive a fork."""
    if getattr(_decoders, "pid", None) != os.getpid():
        codec: Any = importlib.import_module("nvidia.nvimgcodec")
        backends = [codec.Backend(codec.BackendKind.CPU_ONLY)]
        decoder = codec.Decoder(codec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1, backends=backends)
        _decoders.pid, _decoders.opened = os.getpid(), (codec, decoder, codec.DecodeParams(False))
    return _decoders.opened
