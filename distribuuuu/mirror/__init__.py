"""Runs in object storage: OUT_DIR may be a URL. The run works in a local folder, which a child process mirrors.

- client.py: start reading here. The side of the run: it starts the child process and waits for it at the end.
- __main__.py: the child process: one instance per folder, its messages, retries and the end.
- sync.py: what is downloaded at the start and uploaded during the run, and the detection of a second run.
- states.py: the log of states, each of which names the objects with the files of a run.

The folder can be deleted: a URL is then refused as OUT_DIR, see config/run_files.py.
"""

import re

STORES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")


def find_url_problem(url: str) -> str | None:
    """Return why no run can be mirrored to a URL; None if one can."""
    protocol, _, rest = url.partition(":")
    name, (host, *_) = protocol.lower(), [part for part in rest.split("/") if part] or [""]
    user, mark, _ = host.rpartition("@")
    if mark and rest.startswith("//") and (":" in user or name not in ("abfs", "abfss")):
        return "got a URL with credentials; expected them in the environment; fix: remove them from the URL"
    if name not in STORES:
        return f"got {url}; expected a local path, or a URL of {', '.join(STORES)}; fix: use a local folder"
    is_plain = protocol == name and rest.isprintable() and not re.search(r"[?#]|(^|/)\.{1,2}(/|$)", rest)
    if is_plain and re.match("///?(?=[^/])", rest) and rest.startswith("///") == (name == "file"):
        return None
    form = "file:///FOLDER" if name == "file" else f"{name}://BUCKET/FOLDER"
    return f"got {re.split('[?#]', url)[0]}; expected {form} without `.`, `..`, `?` and `#`"
