"""Kinds of files by their first bytes, where these contradict the name; imports no torch."""

import os
import re

from distribuuuu.files.untrusted import open_regular

# Bytes of a file that are enough to describe it.
HEAD = 1 << 10
LFS_POINTER = "a pointer of Git LFS, not the file itself; fix: git lfs install && git lfs pull"
_KINDS = (
    (rb"version https://git-lfs", LFS_POINTER),
    (rb"\s*(<!doctype html|<html|<head)", "an HTML page, saved in place of the file by a failed download"),
    (rb"\s*(<\?xml|<Error|\{\s*\")", "an XML or JSON text, e.g. the error of a server, in place of the file"),
    (rb"%PDF-", "a PDF document"),
    (rb"7z\xbc\xaf|Rar!|\x1f\x8b|BZh|\xfd7zXZ", "a compressed archive"),
    (rb"....ftyp(isom|mp4|M4V|qt)", "a video"),
)
# What readers of weights say of a file that ends early.
_CUT = re.compile("not a zip file|central directory|not fully covered|incomplete|ran out of input|unexpected EOF", re.I)


def describe_content(head: bytes) -> str:
    """Return what a file is by its first bytes, of a pointer with a fix; empty if it is of no known kind."""
    return next((text for start, text in _KINDS if re.match(start, head, re.IGNORECASE | re.DOTALL)), "")


def explain_no_weights(path: str | os.PathLike, error: str) -> str:
    """Return why a file that cannot be read as weights is none, with a fix; by default, the error."""
    try:
        with open_regular(path) as file:
            head = file.read(HEAD)
    except OSError:
        return error
    if what := describe_content(head) or ("empty" if not head else ""):
        return f"{path}: is {what}" + ("" if "; fix: " in what else "; fix: download the file again")
    fix = "an incomplete download or copy; fix: download or copy the file again"
    return f"{path}: not a valid checkpoint: it ends early: {fix}" if _CUT.search(error) else error
