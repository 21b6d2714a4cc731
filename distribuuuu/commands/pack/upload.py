"""Uploading a pack to a URL: its index goes last, so that an incomplete pack cannot be read."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.data.packed.format import INDEX, read_index_file
from distribuuuu.data.packed.remote import read_meta
from distribuuuu.data.packed.transport import MISSING, PACKAGES, call_filesystem


def find_url_problem(url: str) -> str:
    """Return why packs cannot be written to a URL; empty if nothing is known."""
    if url.partition("://")[0] not in PACKAGES:
        allowed = ", ".join(f"{protocol}://" for protocol in PACKAGES)
        return f"OUT: got {url}; expected a folder or a URL that can be written to ({allowed})"
    bucket = "/".join(url.split("/")[:3])
    try:
        if read_existing_meta(url) is None and bucket.startswith(("s3://", "gs://")):
            call_filesystem(bucket, "info")
    except ConfigError as error:
        is_own = str(error).startswith(f"{bucket}/") or str(error).endswith(MISSING)
        return f"OUT: {error}" if is_own else ""  # writing may be allowed without the right to describe the bucket
    except OSError as error:
        return f"OUT: {bucket}: {error}; fix: check the network, then run the same command again"
    return ""


def read_existing_meta(url: str) -> Mapping[str, Any] | None:
    """Return the meta of the pack at a URL; None if there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_meta(url)[0]
    except ConfigError as error:
        if str(error).endswith(MISSING):
            return None
        raise


def upload_pack(folder: Path, url: str) -> None:
    """Move a complete pack from a folder to a URL; an index that is there already is deleted first.

    Raises:
        ConfigError: a file cannot be uploaded.
    """
    names = [shard["name"] for shard in read_index_file(folder, check_rows=False)[0]["shards"]]
    try:
        if read_existing_meta(url) is not None:
            call_filesystem(f"{url}/{INDEX}", "rm_file")
        for name in (*names, INDEX):
            call_filesystem(f"{url}/{name}", "put_file", str(folder / name))
    except OSError as error:
        raise ConfigError(f"{url}: {error}; fix: run the same command again, which uploads the pack anew") from error
    shutil.rmtree(folder)
    print(f"{url}: {counted(len(names), 'shard')} and the index uploaded")
