"""Targets of an index: several labels or targets by image, and those of other names than the training images have."""

import itertools
import os
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.data.datasets.array_file import Content, pack_names

# By column: the names that define the targets, in the order of the classes, or the type of numbers.
Names = Mapping[str, tuple[str, ...] | str]


def encode_targets(key: str, found: Mapping[str, tuple[Sequence, Sequence[str]]]) -> Content:
    """Return the meta and the arrays of the targets of images.

    Args:
        key: label, labels (several of one column by image) or targets (several columns).
        found: by column, the values, and their names in the order of the classes, to which unknown ones are added.
    """
    meta: dict[str, Any] = {"columns": list(found)} if key == "targets" else {}
    arrays: dict[str, np.ndarray] = {}
    meta["classes"] = []
    for number, (values, names) in enumerate(found.values()):
        flat = [*itertools.chain.from_iterable(values)] if key == "labels" else values
        numbers = {name: place for place, name in enumerate(dict.fromkeys([*names, *flat]))}
        indices = np.fromiter((numbers[value] for value in flat), np.int32, len(flat))
        if key == "targets":
            arrays |= {**pack_names(f"values{number}", [*map(os.fsencode, numbers)]), f"target{number}": indices}
            continue
        meta["classes"], arrays["label"] = list(numbers), indices
        if key == "labels":
            arrays["label_offsets"] = np.cumsum([0, *map(len, values)], dtype=np.int64)
    return meta, arrays


def match_targets(images: Any, trained: Any) -> tuple[tuple[str, ...], Any, list[str]]:
    """Return the classes, the labels and warnings of the images of an index, by the names of the training images.

    `trained` is the index of these; None: only their classes are known, which are those of the `IndexedImages`. A name
    that they lack is a ConfigError.
    """
    names = _name_targets(trained) if trained else {"label": images.classes}
    problems: list[str] = []
    notes: list[str] = []
    maps = {column: _match(images, column, known, problems, notes) for column, known in names.items()}
    if problems:
        raise ConfigError(problems)
    classes, arrays = (
        next((known for known in names.values() if isinstance(known, tuple)), tuple(names)),
        images.index.arrays,
    )
    if images.targets == "structured":
        columns = images.index.meta["columns"]
        return classes, {name: maps[name][arrays[f"target{number}"]] for number, name in enumerate(columns)}, notes
    (numbers,) = maps.values()
    return classes, numbers[arrays["label"]], notes


def _match(images: Any, column: str, known: Any, problems: list[str], notes: list[str]) -> np.ndarray:
    """Return the target of each value of a column, by the names that define the targets; add problems and warnings."""
    source, values = images.index.source, _values_of(images.index, column)
    if isinstance(known, str):  # a type of numbers
        found: dict[str, Any] = {value: _as_number(value) for value in values}
        found = {value: None if known == "int64" and isinstance(number, float) else number
                 for value, number in found.items()}  # fmt: skip
        dtype, known = known, ()
    else:
        numbers, dtype = {name: number for number, name in enumerate(known)}, "int64"
        matched, warnings = match_forms(source, [value for value in values if value not in numbers], numbers)
        found = {value: matched.get(value, numbers.get(value)) for value in values}
        notes += warnings
    if unknown := [value for value in values if found[value] is None]:
        places = {value: _place_of(images, column, value) for value in unknown[:6] if images.names_places}
        problems.append(unknown_names(source, column, unknown, known, places))
        return np.array([])
    return np.array([found[value] for value in values], dtype)


def _place_of(images: Any, column: str, value: str) -> str:
    """Return ' (PLACE)' of the first image that has a value."""
    arrays, columns = images.index.arrays, images.index.meta.get("columns")
    values = arrays[f"target{columns.index(column)}" if columns else "label"]
    place = int(np.argmax(values == _values_of(images.index, column).index(value)))
    if (ends := arrays.get("label_offsets")) is not None:
        place = int(np.searchsorted(ends, place, side="right")) - 1
    return f" ({images.describe(place)})"


def _values_of(index: Any, column: str) -> tuple[str, ...]:
    """Return the names of a column of an index: its classes, or the values of structured targets."""
    columns = index.meta.get("columns")
    return index.names_of(f"values{columns.index(column)}") if columns else index.classes


def _name_targets(index: Any) -> Names:
    """Return the names of the classes; of structured targets, for each column its names or the type of its numbers."""
    found: dict[str, tuple[str, ...] | str] = {}
    for column in index.meta.get("columns") or ():
        values = [_as_number(name) for name in _values_of(index, column)]
        is_whole = all(isinstance(value, int) for value in values)
        found[column] = _values_of(index, column) if None in values else "int64" if is_whole else "float32"
    return found or {"label": index.classes}


def _as_number(text: str) -> int | float | None:
    """Return a text as a number that a tensor can hold; None if it is none."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if -(2**63) <= number < 2**63 else None
    return None


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


def unknown_names(
    source: str, column: str, names: Sequence[str], known: Sequence[str], places: Mapping[str, str] = {}
) -> str:
    """Return the message for evaluation classes that are not among the training classes."""
    what = "classes" if column == "label" else f"values of {column}"
    by_case = {name.casefold() for name in known}
    hint = "; they differ by case: rename them" if any(name.casefold() in by_case for name in names) else ""
    shown = [f"{ascii(name)[1:-1]}{places.get(name, '')}{'' if hint else did_you_mean(name, known)}"
             for name in names[:6]]  # fmt: skip
    return f"{source} has {what} that the training data lacks: {first_few([*shown, *names[6:]])}{hint}"
