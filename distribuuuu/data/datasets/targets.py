"""Labels of an index: one or several by image, and those of images whose classes others define."""

import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.data.datasets.array_file import Content


def encode_labels(labels: Sequence[Sequence[str]], names: Sequence[str], several: bool = False) -> Content:
    """Return the meta and the arrays of the labels of images, by their names: one each, or any number.

    `names` are those of the classes in their order, to which unknown ones are added.
    """
    flat = [*itertools.chain.from_iterable(labels)]
    numbers = {name: place for place, name in enumerate(dict.fromkeys([*names, *flat]))}
    arrays = {"label": np.fromiter((numbers[name] for name in flat), np.int32, len(flat))}
    if several:
        arrays["label_offsets"] = np.cumsum([0, *map(len, labels)], dtype=np.int64)
    return {"classes": list(numbers)}, arrays


def match_labels(images: Any) -> tuple[np.ndarray, list[str]]:
    """Return the labels of `IndexedImages` by the names of their classes, and warnings.

    A name of the index that is no class is a ConfigError.
    """
    index, numbers = images.index, {name: number for number, name in enumerate(images.classes)}
    matched, notes = match_forms(index.source, [name for name in index.classes if name not in numbers], numbers)
    numbers |= matched
    if unknown := [name for name in index.classes if name not in numbers]:
        places = {name: _place_of(images, name) for name in unknown[:6] if images.names_places}
        raise ConfigError(unknown_names(index.source, unknown, images.classes, places))
    return np.array([numbers[name] for name in index.classes], np.int64)[index.arrays["label"]], notes


def _place_of(images: Any, name: str) -> str:
    """Return ' (PLACE)' of the first image with a label."""
    arrays = images.index.arrays
    place = int(np.argmax(arrays["label"] == images.index.classes.index(name)))
    if (ends := arrays.get("label_offsets")) is not None:
        place = int(np.searchsorted(ends, place, side="right")) - 1
    return f" ({images.describe(place)})"


def note_alike(source: str, names: Sequence[str]) -> list[str]:
    """Return a warning about class names that differ in case or spaces only; empty if there are none."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(name.casefold().strip(), []).append(name)
    shown = first_few([" and ".join(map(ascii, same)) for same in alike.values() if len(same) > 1], "; ")
    return [f"{source}: classes whose names differ in case or spaces only: {shown}"] if shown else []


def match_forms(source: str, unknown: Sequence[str], numbers: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return the numbers of names that are known in another Unicode form, and a warning about them if there are any."""
    forms: dict[str, list[str]] = {}
    for name in numbers:
        forms.setdefault(unicodedata.normalize("NFC", name), []).append(name)
    found = {name: known[0] for name in unknown if len(known := forms.get(unicodedata.normalize("NFC", name), [])) == 1}
    shown = first_few([f"{ascii(name)[1:-1]} for {ascii(known)[1:-1]}" for name, known in found.items()])
    text = "class names differ from those of the training data in their Unicode form only (NFC, NFD)"
    note = f"{source}: {text}, and are taken as equal: {shown}"
    return {name: numbers[known] for name, known in found.items()}, [note] * bool(found)


def unknown_names(source: str, names: Sequence[str], known: Sequence[str], places: Mapping[str, str] = {}) -> str:
    """Return the message for evaluation classes that are not among the training classes."""
    by_case = {name.casefold() for name in known}
    hint = "; they differ by case: rename them" if any(name.casefold() in by_case for name in names) else ""
    shown = [f"{ascii(name)[1:-1]}{places.get(name, '')}{'' if hint else did_you_mean(name, known)}"
             for name in names[:6]]  # fmt: skip
    return f"{source} has classes that the training data lacks: {first_few([*shown, *names[6:]])}{hint}"
