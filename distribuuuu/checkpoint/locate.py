"""From what a config names as weights to the file that holds them; torch is not needed for it."""

from pathlib import Path

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean

# What stands for the weights that timm or torchvision publish, where a file could be named.
PUBLISHED = "pretrained"
# What a model's repository on the Hugging Face Hub calls its weights, the better one first.
HUB_NAMES = ("model.safetensors", "pytorch_model.bin")


def find_weights_file(path: str) -> Path:
    """Return the file of weights that `path` is, or that lies in it: a folder as huggingface_hub leaves it.

    Such a folder holds `model.safetensors` or `pytorch_model.bin`, or it is a repository of the Hub's cache with them
    in `snapshots/REVISION`; of several revisions the one that `refs/main` names is taken.

    Raises:
        ConfigError: there is no such file; the message is without a key.
    """
    found = Path(path).expanduser()
    if found.is_file():
        return found
    if not found.is_dir():
        beside = [entry.name for entry in found.parent.iterdir()] if found.parent.is_dir() else []
        raise ConfigError(f"no such file or folder: {path}{did_you_mean(found.name, [*beside, PUBLISHED])}")
    for folder in (found, _find_snapshot(found)):
        for name in HUB_NAMES if folder else ():
            if (folder / name).is_file():
                return folder / name
    has = ", ".join(sorted(entry.name for entry in found.iterdir())[:5]) or "nothing"
    raise ConfigError(f"{path} is a folder without {' or '.join(HUB_NAMES)}; it has {has}; name the file")


def _find_snapshot(repository: Path) -> Path | None:
    """Return the folder of the revision to use of a repository in the Hub's cache; None when it is none."""
    revisions = sorted(folder for folder in repository.glob("snapshots/*") if folder.is_dir())
    try:
        main = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # not there, or damaged
        main = ""
    if chosen := [folder for folder in revisions if folder.name == main]:
        return chosen[0]
    if len(revisions) > 1:
        names = ", ".join(folder.name for folder in revisions[:5])
        raise ConfigError(f"{repository} holds several revisions; name one of {repository}/snapshots: {names}")
    return revisions[0] if revisions else None
