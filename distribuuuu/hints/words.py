"""Unknown words of options, models and config files: the one that is meant, or the allowed ones."""

import os
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from distribuuuu.config.errors import did_you_mean, near_matches
from distribuuuu.config.locate import FoundConfig, ListedConfig, shipped_file

# Of the photographs of the package, which `finetune` alone knows by their name.
CLOTHES = "; fix: distribuuuu finetune clothes, which writes the lists DATA.NAME list TRAIN.DATASET exp/clothes/lists"


def describe_wrong_word(word: object, allowed: Sequence[str], kind: str) -> str:
    """Return the message for a value that is not among the allowed words, or names of registered entries of a kind."""
    families = dict.fromkeys(f"{one.partition('/')[0]}/NAME" if "/" in one else one for one in allowed if one)
    own = "; fix: name the file of an entry of your own in PLUGINS" if kind else ""
    own = CLOTHES if word == "clothes" else own
    return f"got {word!r}; expected one of {', '.join(families)}{did_you_mean(str(word), allowed) or own}"


def describe_unknown_model(arch: str, names: Mapping[str, Collection[str]], sources: Collection[str]) -> str:
    """Return the message for an unknown model: the nearest of the `names` in each source that was searched.

    With an unknown prefix, all sources were searched; `sources` are the prefixes that exist.
    """
    prefix, _, name = arch.rpartition("/")
    near = near_matches(name, {known for source in names.values() for known in source})
    start = f"{prefix}/" if prefix in sources else ""
    hint = f"did you mean {', '.join(f'{start}{known}' for known in near)}?" if near else "no similar name"
    if os.path.isdir(arch):
        hint = f"fix: ./{arch}, if the folder is meant"
    return f"unknown model {arch!r} of {', '.join(f'{source}/NAME' for source in names)}; {hint}"


def suggest_configs(path: str) -> str:
    """Return '; did you mean FILE?' for a missing config: a shipped one, or one in the folder of the path; or ''."""
    shipped, wanted = shipped_file("configs"), path.removeprefix("configs/").removesuffix(".yaml")
    files = {file.relative_to(shipped) for file in shipped.rglob("*.yaml")}
    files |= {file for folder in (path, os.path.dirname(path)) for file in Path(folder).glob("*.yaml")}
    near = near_matches(Path(wanted).stem, [file.stem for file in files])
    found = [file for file in files if str(file.parent) in (path, wanted)]
    found = found or [file for file in files if file.stem == Path(wanted).stem]
    found = found or [file for file in files if file.stem in near]
    within = [file.absolute().relative_to(shipped) if shipped in file.absolute().parents else file for file in found]
    ranked = sorted({*map(str, within)}, key=lambda name: (-SequenceMatcher(None, wanted, name).ratio(), name))
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
