"""Runs in object storage: OUT_DIR may be a URL. The run works in a local folder, which a child process mirrors.

Start reading in sync.py. states.py is the log of states, each of which names the objects with the files of a run. The
folder can be deleted: a URL is then refused as OUT_DIR, see config/run_files.py.
"""

import re

_URL = re.compile(r"((s3|gs|az)://|file:///)[^/?#]+(/[^?#]*)?")
_FILES = (".tar", ".json", ".jsonl", ".npz", ".yaml")
_FORMS = "s3://BUCKET/FOLDER, gs://, az:// or file:///FOLDER"


def find_url_problem(url: str) -> str | None:
    """Return why no run can be mirrored to a URL; None if one can."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        return "got a URL with credentials; expected them in the environment; fix: remove them from the URL"
    if _URL.fullmatch(url) and url.isprintable() and not {".", ".."} & {*url.split("/")} and not url.endswith(_FILES):
        return None
    return f"got {re.split('[?#]', url)[0]}; expected a local path, or {_FORMS} without `.`, `..`, `?` and `#`"
