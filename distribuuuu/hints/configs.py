"""Missing config files: the files of similar names."""

import os
from difflib import SequenceMatcher
from pathlib import Path

from distribuuuu.config.errors import near_matches
from distribuuuu.config.locate import shipped_file


def suggest_configs(path: str) -> str:
    """Return '; did you mean FILE?' for a missing config file, or an empty string.

    Searched are the folder of the path (the path itself, if it is a folder), ./configs and the shipped configs.
    """
    shipped, stem = shipped_file("configs"), Path(path).stem
    try:
        found = [*Path(path).glob("*.yaml"), *(shipped / path).glob("*.yaml")]
    except OSError:  # the name is too long
        return ""
    if not found:
        roots = {os.path.realpath(root): Path(root) for root in (shipped, "configs")}  # in a checkout, the same folder
        files = [*Path(path).parent.glob("*.yaml"), *(file for root in roots.values() for file in root.rglob("*.yaml"))]
        stems = near_matches(stem, [file.stem for file in files])
        stems = [stem] if stem in stems else stems
        found = [file for file in files if file.stem in stems]
    names = {str(file.relative_to(shipped) if shipped in file.parents else file) for file in found}
    ranked = sorted(names, key=lambda name: (-SequenceMatcher(None, path, name).ratio(), name))
    return f"; did you mean {', '.join(ranked[:4])}?" if ranked else ""
