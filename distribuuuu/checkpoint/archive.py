"""Archive of an older run in an OUT_DIR in which a new one begins."""

import os
from collections.abc import Sequence
from pathlib import Path

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.checkpoint.weights_files import list_bests


def archive_run(checkpoints: CheckpointManager, names: Sequence[str] = ()) -> Path | None:
    """Move checkpoints and best weights of an older run to checkpoints.N, for a new run in the same OUT_DIR.

    The files `names` are moved into that folder before it is renamed, so that a repeated call completes a killed one.
    """
    folder = checkpoints.folder
    if not (checkpoints.list() or list_bests(folder.parent) or list_bests(folder)):
        return None
    folder.mkdir(exist_ok=True)  # its checkpoints may have been deleted, but not its best weights
    for path in (*list_bests(folder.parent).values(), *(folder.parent / name for name in names)):
        if path.exists():
            os.replace(path, folder / path.name)
    numbered = (Path(f"{folder}.{number}") for number in range(1, 10**6))
    archived = next(path for path in numbered if not path.exists())
    os.replace(folder, archived)
    return archived
