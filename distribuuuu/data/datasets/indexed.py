"""Data sets whose images an index names: class folders, archives, tables and parquet files."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.data.datasets.base import SplitDataset
from distribuuuu.data.datasets.index import Content, Index, digest_of, open_index
from distribuuuu.files.image_files import EXTENSIONS

# By column: the names that define the targets, in the order of the classes, or the type of numbers.
Names = Mapping[str, tuple[str, ...] | str]


class IndexedImages(SplitDataset):
    """The images of an index; a source defines `open_split`.

    Args:
        index: the images.
        trained: what defines the classes, if the index may lack some of them: the index of the training images, or the
            names of the classes; None: those of the index.
        order: the images of the index that the set has, int (N,); None: all.
        labels: the class of each of them, int (N,); None: those of the index.

    Raises:
        ConfigError: the index has a class that is not among those of `trained`.
    """

    # Whether a message on unknown classes names an image that has one.
    names_places = False

    def __init__(
        self,
        index: Index,
        trained: Index | Sequence[str] | None = None,
        order: np.ndarray | None = None,
        labels: np.ndarray | None = None,
    ):
        self.index, self._order = index, order
        self._notes: list[str] = []
        self._ends: np.ndarray | None = None
        self.has_files, self.holds_files = not index.is_archive, index.is_archive
        trained = index if trained is None else trained
        if labels is not None:
            self.classes, self.labels = tuple(trained.classes if isinstance(trained, Index) else trained), labels
            return
        names = name_targets(trained) if isinstance(trained, Index) else {"label": tuple(trained)}
        self.classes = next((known for known in names.values() if isinstance(known, tuple)), tuple(names))
        problems: list[str] = []
        maps = {column: self._map(column, known, problems) for column, known in names.items()}
        if problems:
            raise ConfigError(problems)
        self._encode(maps)

    def _map(self, column: str, known: tuple[str, ...] | str, problems: list[str]) -> np.ndarray | None:
        """Return the target of each value of a column, by the names that define the targets; None: they are equal."""
        values, numbers = own_values(self.index, column), {name: number for number, name in enumerate(known)}
        if isinstance(known, str):
            if wrong := [value for value in values if as_number(value) is None]:
                problems.append(unknown_names(self.index.source, column, wrong, (), self._first_place))
            return None if wrong else np.array([as_number(value) for value in values], known)
        if values == known:
            return None
        if unknown := [value for value in values if value not in numbers]:
            from distribuuuu.data.datasets.made_elsewhere import match_forms

            found, notes = match_forms(self.index.source, unknown, numbers)
            numbers, self._notes = {**numbers, **found}, [*self._notes, *notes]
        if unknown := [value for value in values if value not in numbers]:
            problems.append(unknown_names(self.index.source, column, unknown, known, self._first_place))
            return None
        return np.array([numbers[value] for value in values], np.int64)

    def _first_place(self, column: str, value: str) -> str:
        """Return ' (PLACE)' of the first image that has a value, if a table names it."""
        arrays, columns = self.index.arrays, self.index.meta.get("columns")
        if not self.names_places:
            return ""
        values = arrays[f"target{columns.index(column)}" if columns else "label"]
        place = int(np.argmax(values == own_values(self.index, column).index(value)))
        if (ends := arrays.get("label_offsets")) is not None:
            place = int(np.searchsorted(ends, place, side="right")) - 1
        return f" ({self.describe(place)})"

    def _encode(self, maps: dict[str, np.ndarray | None]) -> None:
        """Compute what `label` returns."""
        arrays = self.index.arrays
        if self.targets != "structured":
            (mapped,) = maps.values()
            self.labels = arrays["label"] if mapped is None else mapped[arrays["label"]]
            self._ends = arrays.get("label_offsets")
            return
        self._targets = {}
        for number, column in enumerate(self.index.meta["columns"]):
            values, mapped = arrays[f"target{number}"], maps[column]
            self._targets[column] = values.astype(np.int64) if mapped is None else mapped[values]

    def __len__(self) -> int:
        return len(self.index) if self._order is None else len(self._order)

    def place(self, index: int) -> int:
        """Return the number of image `index` in the index."""
        if not 0 <= index < len(self):
            raise IndexError(f"no image {index} among {len(self)}")
        return index if self._order is None else int(self._order[index])

    def label(self, index: int) -> Any:
        """Return the class of image `index`; the float32 multi-hot vector (classes,); or its targets by column."""
        place = self.place(index)
        if self.targets == "structured":
            return {column: values[place] for column, values in self._targets.items()}
        if self._ends is None:
            return int(self.labels[index])
        target = np.zeros(len(self.classes), np.float32)
        target[self.labels[self._ends[place] : self._ends[place + 1]]] = 1
        return target

    def describe(self, index: int) -> str:
        """Return the file of image `index`, or its archive and its name in it."""
        return self.index.describe(self.place(index))

    def check_record(self) -> tuple[Path | None, str]:
        """Return the file of the index, and the ID of the scan that made it."""
        return self.index.path, self.index.meta.get("scan", "")

    def notes(self) -> list[str]:
        """Return warnings about files that were left out, and about class names that look alike."""
        return [*self.index.notes(), *self._notes]

    @property
    def digest(self) -> str:
        """The digest of classes, names, sizes and labels; see `ImageDataset.digest`."""
        own = self.index.meta.get("digest") or digest_of(self.index.meta, self.index.arrays)
        order = {} if self._order is None else {"order": np.asarray(self._order), "labels": np.asarray(self.labels)}
        return digest_of({"classes": [own, *self.classes]}, order)


def open_folder(root: str | os.PathLike, split: str, cache: Path, extensions: tuple[str, ...] = EXTENSIONS) -> Index:
    """Return the index of ROOT/SPLIT; if the folder does not exist, it is empty. See `open_index`."""
    folder = str(Path(root) / split)

    def scan() -> Content:
        from distribuuuu.data.datasets.folder_scan import scan_folder

        return scan_folder(folder, extensions)

    if not os.path.isdir(folder):
        return Index(folder, folder, *scan())
    name = f"index-{quote(os.fsencode(split), safe='')}"
    return open_index(folder, root, name, cache, scan, extensions, below=split)


def own_values(index: Index, column: str) -> tuple[str, ...]:
    """Return the names of a column of an index: its classes, or the values of structured targets."""
    columns = index.meta.get("columns")
    return index.names_of(f"values{columns.index(column)}") if columns else index.classes


def name_targets(index: Index) -> Names:
    """Return the names of the classes; of structured targets, for each column its names or the type of its numbers."""
    found: dict[str, tuple[str, ...] | str] = {}
    for column in index.meta.get("columns") or ():
        values = [as_number(name) for name in own_values(index, column)]
        is_whole = all(isinstance(value, int) for value in values)
        found[column] = own_values(index, column) if None in values else "int64" if is_whole else "float32"
    return found or {"label": index.classes}


def as_number(text: str) -> int | float | None:
    """Return a text as a number that a tensor can hold; None if it is none."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if -(2**63) <= number < 2**63 else None
    return None


def unknown_names(
    source: str,
    column: str,
    names: Sequence[str],
    known: Sequence[str],
    place_of: Callable[[str, str], str] = lambda column, name: "",
) -> str:
    """Return the message for evaluation classes that are not among the training classes."""
    what = "classes" if column == "label" else f"values of {column}"
    by_case = {name.casefold() for name in known}
    hint = "; they differ by case: rename them" if any(name.casefold() in by_case for name in names) else ""
    shown = [f"{ascii(name)[1:-1]}{place_of(column, name)}{'' if hint else did_you_mean(name, known)}"
             for name in names[:6]]  # fmt: skip
    return f"{source} has {what} that the training data lacks: {first_few([*shown, *names[6:]])}{hint}"
