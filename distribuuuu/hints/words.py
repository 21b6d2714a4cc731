"""Unknown words of options, models and config files: the one that is meant, or the allowed ones."""

import os
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from distribuuuu.config.errors import did_you_mean, near_matches
from distribuuuu.config.locate import FoundConfig, ListedConfig, shipped_file

# Names of data sets elsewhere -> the data set here, and what it reads.
DATA_NAMES = {
    "webdataset wds tar tars zip shards": "archive, which reads shards of tar files, {000..009}.tar, and ZIP files",
    "csv tsv txt table file-list filelist kaggle dataframe": "list, which reads DATASET/SPLIT.csv",
    "huggingface hf hf-datasets datasets hub arrow": "parquet, which reads parquet and Arrow files",
    "folder folders directory image-folder imagefolders": "imagefolder, for one sub-folder per class",
    "ilsvrc ilsvrc2012 imagenet1k imagenet-1k": "imagenet, for its archives, or imagefolder, for class folders",
}
_BY_DATA_NAME = {name: words for names, words in DATA_NAMES.items() for name in names.split()}


def describe_wrong_word(word: object, allowed: Sequence[str], kind: str) -> str:
    """Return the message for a value that is not among the allowed words, or names of registered entries of a kind."""
    if kind == "data set" and (meant := _BY_DATA_NAME.get(normalized(str(word)))):
        return f"got {word!r}; did you mean {meant}?"
    families = dict.fromkeys(f"{one.partition('/')[0]}/NAME" if "/" in one else one for one in allowed if one)
    own = "; fix: name the file of an entry of your own in PLUGINS" if kind else ""
    return f"got {word!r}; expected one of {', '.join(families)}{did_you_mean(str(word), allowed) or own}"


def normalized(name: str) -> str:
    """Return a flag or a part of a key in lower case, with dashes between its words only."""
    return name.lower().replace("_", "-").strip("-")


def describe_unknown_model(arch: str, names: Mapping[str, Collection[str]], sources: Collection[str]) -> str:
    """Return the message for an unknown model: the nearest of the `names` in each source that was searched, or these.

    With an unknown prefix, all sources were searched; `sources` are the prefixes that exist.
    """
    prefix, _, name = arch.rpartition("/")
    near = near_matches(name, {known for source in names.values() for known in source})
    message = f"unknown model {arch!r}"
    if prefix and prefix not in sources:
        message += f"; expected a prefix of {', '.join(f'{source}/NAME' for source in sources)}, or none"
    elif prefix:
        near = [f"{prefix}/{known}" for known in near]
    if near:
        return f"{message}; did you mean {', '.join(near)}?"
    return message if prefix not in ("", *sources) else f"{message}; no similar name in {', '.join(names)}"


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


def describe_base_problem(name: Any, base: str | None, path: str, chain: tuple[str, ...]) -> str:
    """Return why a base cannot be read, with the files that lead to it."""
    if isinstance(path, FoundConfig) and not isinstance(path, ListedConfig):
        return f"got {name!r} in the folder of a run, whose config is complete; fix: name your own with --cfg"
    if not isinstance(name, str):
        return f"got {name!r}; expected the path of a YAML file, or a list of paths"
    files = [user.rpartition(":")[0] for user in chain]
    shown = " -> ".join([*files, base or name])
    if base is None:
        return f"no such file: {shown}{suggest_configs(os.path.join(os.path.dirname(path), name))}"
    return f"got a file that is its own base: {shown}; fix: remove one of these lines"
