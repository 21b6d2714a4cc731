"""URLs that can hold a run."""

import functools
from collections.abc import Sequence

# Protocols of fsspec that cannot: they only read, wrap another protocol, or end with their process.
_NO_STORES = {"asynclocal", "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "filecache",
              "generic", "gist", "git", "github", "http", "https", "jlab", "jupyter", "libarchive", "local", "memory",
              "pyscript", "reference", "root", "simplecache", "tar", "wandb", "zip"}  # fmt: skip
# Protocols whose host may follow a name and an @; before an @ of others is an access key.
_WITH_USER = ("abfs", "abfss", "ftp", "sftp", "smb", "ssh")


def is_store(protocol: str, parts: Sequence[str]) -> bool:
    """Tell whether a run can be mirrored to PROTOCOL://PARTS: without credentials, and of the Hub only to a bucket.

    In a repository of the Hub, each write would be a commit.
    """
    user, mark, _ = parts[0].rpartition("@")
    if mark and (":" in user or protocol not in _WITH_USER):
        return False
    if protocol == "hf":
        return parts[0] == "buckets" and len(parts) > 3
    return protocol in ("s3", "gs", "file") or protocol in _list_protocols()


@functools.cache
def _list_protocols() -> set[str]:
    """Return the protocols of fsspec, and of installed packages, that may hold a run."""
    import fsspec  # here: almost no run needs it

    return {*fsspec.available_protocols()} - _NO_STORES
