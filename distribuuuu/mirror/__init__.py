"""Runs in object storage: OUT_DIR may be a URL. The run works in a local folder, which a child process mirrors.

- client.py: start reading here. The side of the run: it starts the child process and waits for it at the end.
- __main__.py: the child process: one instance per folder, its messages, retries and the end.
- sync.py: what is downloaded at the start, uploaded during the run, and the detection of a second living run.
- store.py: objects that are verified, and the index, mirror.json, which names those of a complete state.

The folder can be deleted: a URL is then refused as OUT_DIR, see config/run_files.py.
"""

from collections.abc import Sequence

# Protocols of fsspec: in an object store, an object appears when it is complete; a file server replaces a file when
# another one gets its name.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "hf")
FILE_SERVERS = ("file", "ftp", "sftp", "ssh")
# Protocols whose host may follow a name and an @; before an @ of others is an access key.
_WITH_USER = ("abfs", "abfss", "ftp", "sftp", "ssh")


def is_store(protocol: str, parts: Sequence[str]) -> bool:
    """Tell whether a run can be mirrored to PROTOCOL://PARTS: without credentials, and of the Hub only to a bucket.

    In a repository of the Hub, each write would be a commit.
    """
    user, mark, _ = parts[0].rpartition("@")
    if mark and (":" in user or protocol not in _WITH_USER):
        return False
    if protocol == "hf":
        return parts[0] == "buckets" and len(parts) > 3
    return protocol in OBJECT_STORES or protocol in FILE_SERVERS
