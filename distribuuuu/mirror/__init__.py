"""Runs in object storage: OUT_DIR may be a URL. The run works in a local folder, which a child process mirrors.

- client.py: start reading here. The side of the run: it starts the child process and waits for it at the end.
- __main__.py: the child process: one instance per folder, its messages, retries and the end.
- sync.py: what is downloaded at the start and uploaded during the run, and the detection of a second run.
- store.py: objects that are verified, and the index, mirror.json, which names those of a complete state.

The folder can be deleted: a URL is then refused as OUT_DIR, see config/run_files.py.
"""

import re

# Protocols of fsspec: in an object store, an object appears when it is complete; a folder replaces a file when
# another one gets its name.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "hf")
# Protocols whose host may follow a name and an @; before an @ of others is an access key.
_WITH_USER = ("abfs", "abfss")
_FORMS = {"file": "file:///FOLDER", "hf": "hf://buckets/OWNER/BUCKET/FOLDER"}


def find_url_problem(url: str) -> str | None:
    """Return why no run can be mirrored to a URL; None if one can.

    In a repository of the Hub, each write would be a commit: of the Hub, only a bucket is a store.
    """
    protocol, _, rest = url.partition(":")
    name = protocol.lower()
    host, *folders = [part for part in rest.split("/") if part] or [""]
    user, mark, _ = host.rpartition("@")
    if mark and rest.startswith("//") and (":" in user or name not in _WITH_USER):
        return "got a URL with credentials; expected them in the environment; fix: remove them from the URL"
    if name not in (*OBJECT_STORES, "file"):
        known = ", ".join((*OBJECT_STORES, "file"))
        return f"got {url}; expected a local path, or a URL of {known}; fix: use a local folder"
    is_plain = protocol == name and rest.isprintable() and not re.search(r"[?#]|(^|/)\.{1,2}(/|$)", rest)
    has_form = re.match("///?(?=[^/])", rest) and rest.startswith("///") == (name == "file")
    if is_plain and has_form and (name != "hf" or (host == "buckets" and len(folders) > 2)):
        return None
    form = _FORMS.get(name, f"{name}://BUCKET/FOLDER")
    return f"got {re.split('[?#]', url)[0]}; expected {form} without `.`, `..`, `?` and `#`"
