"""Repositories in the cache of huggingface_hub."""

from pathlib import Path

from distribuuuu.config import ConfigError


def find_snapshots(repository: Path) -> list[Path]:
    """Return the folder of the revision to use of a repository in the Hub's cache; none: it is no such repository."""
    revisions = sorted(folder for folder in repository.glob("snapshots/*") if folder.is_dir())
    if len(revisions) < 2:
        return revisions
    main = repository / "refs" / "main"
    name = main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else ""
    if chosen := [folder for folder in revisions if folder.name == name]:
        return chosen
    names = ", ".join(folder.name for folder in revisions[:5])
    raise ConfigError(f"{repository} holds several revisions; name one of {repository}/snapshots: {names}")
