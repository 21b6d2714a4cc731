"""Uploading a pack to a URL: its index goes last, so that an incomplete pack cannot be read."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.json_file import load_json
from distribuuuu.data.packed.format import INDEX, read_index_file
from distribuuuu.data.packed.remote import read_meta
from distribuuuu.data.packed.transport import MISSING, PACKAGES, RemoteError, call_filesystem
from distribuuuu.files.atomic_file import replacing

# Lists the uploaded shards with their size and version, so that a second start skips them.
DONE = ".uploaded.json"


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
    done = _read_done(folder / DONE)
    try:
        if read_existing_meta(url) is not None:
            call_filesystem(f"{url}/{INDEX}", "rm_file")
        for name in names:
            if name not in done or done[name] != _describe(f"{url}/{name}"):
                done[name] = _upload(folder / name, f"{url}/{name}")
                with replacing(folder / DONE, "w") as file:
                    json.dump(done, file)
        _upload(folder / INDEX, f"{url}/{INDEX}")
    except OSError as error:
        raise ConfigError(f"{url}: {error}; run the same command again: uploaded shards are kept") from error
    shutil.rmtree(folder)
    print(f"{url}: {counted(len(names), 'shard')} and the index uploaded")


def _read_done(file: Path) -> dict[str, Any]:
    """Return the uploaded shards; empty if the list is missing or damaged: they are uploaded again."""
    with contextlib.suppress(ConfigError):
        if isinstance(done := load_json(file), dict):
            return done
    return {}


def _describe(path: str) -> list[Any]:
    """Return the size and the version of an object; empty if there is none."""
    try:
        return list(call_filesystem(path, "info"))
    except RemoteError:
        return []


def _upload(file: Path, path: str) -> list[Any]:
    call_filesystem(path, "put_file", str(file))
    if (found := _describe(path))[:1] != [file.stat().st_size]:
        raise OSError(f"{path} has {found} after its upload, expected {file.stat().st_size:,} bytes")
    return found
