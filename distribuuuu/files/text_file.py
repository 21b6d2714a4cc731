"""Text files from users and others, in UTF-8 or UTF-16."""

import codecs
import io
import os
from typing import IO, Any

from distribuuuu.files.untrusted import open_regular


def open_text(path: str | os.PathLike, **options: Any) -> IO[str]:
    """Open a regular text file in UTF-8, or in UTF-16 if it begins with its mark; marks are no part of the text."""
    file = open_regular(path)
    head = file.read(3)
    file.seek(0)
    is_utf16 = head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return io.TextIOWrapper(file, encoding="utf-16" if is_utf16 else "utf-8-sig", **options)
