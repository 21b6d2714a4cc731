"""Finding the weights file that an option names; imports no torch."""

from pathlib import Path

from distribuuuu.checkpoint.best_weights import KINDS, RAW, find_best
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean

# Value of an option that selects the weights published by timm or torchvision instead of a file.
PUBLISHED = "pretrained"
# File names of weights in a model's repository on the Hugging Face Hub, in the order of preference.
HUB_NAMES = ("model.safetensors", "pytorch_model.bin")


def find_weights_file(path: str, ema: bool = True) -> Path:
    """Return the weights file at `path`, in the folder of a run there, or in one that huggingface_hub has downloaded.

    Of a run, these are the best weights; with `ema`, those of an average if there are some.
    The folder holds `model.safetensors` or `pytorch_model.bin`, or it is a repository of the Hub's cache with them in
    `snapshots/REVISION`; of several revisions, the one that `refs/main` names is used.

    Raises:
        ConfigError: there is no such file; the message has no key.
    """
    found = Path(path).expanduser()
    if found.is_file():
        return found
    if not found.is_dir():
        beside = [entry.name for entry in found.parent.iterdir()] if found.parent.is_dir() else []
        raise ConfigError(f"no such file or folder: {path}{did_you_mean(found.name, [*beside, PUBLISHED])}")
    snapshot = _find_snapshot(found)
    for folder in (found, snapshot) if snapshot else (found,):
        if best := find_best(folder, sorted(KINDS, key=lambda kind: kind != RAW and not ema)):
            return best
        for name in HUB_NAMES:
            if (folder / name).is_file():
                return folder / name
    has = ", ".join(sorted(entry.name for entry in found.iterdir())[:5]) or "nothing"
    raise ConfigError(
        f"{path} is a folder without {', '.join((KINDS[RAW].file_name, *HUB_NAMES))}; it has {has}; name the file"
    )


def _find_snapshot(repository: Path) -> Path | None:
    """Return the folder of the revision to use of a repository in the Hub's cache; None: it is no such repository."""
    revisions = sorted(folder for folder in repository.glob("snapshots/*") if folder.is_dir())
    try:
        main = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # missing or damaged
        main = ""
    if chosen := [folder for folder in revisions if folder.name == main]:
        return chosen[0]
    if len(revisions) > 1:
        names = ", ".join(folder.name for folder in revisions[:5])
        raise ConfigError(f"{repository} holds several revisions; name one of {repository}/snapshots: {names}")
    return revisions[0] if revisions else None
