"""Findings on a data set: problems to solve before training, and notes. Nothing is changed or deleted."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.commands.doctor.layout import ScannedFolder
from distribuuuu.commands.scan.data_config import find_splits
from distribuuuu.commands.scan.duplicates import DuplicateGroup
from distribuuuu.commands.scan.scan import (
    ANIMATED,
    BROKEN,
    DEEP,
    OVERSIZED,
    ROTATED,
    TRUNCATED,
    UNUSABLE,
    Scan,
    percentiles,
    suggest_sizes,
)
from distribuuuu.config.errors import counted, first_few
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.datasets.file_check import KEEP_16_BITS
from distribuuuu.data.decode import DecodeOptions
from distribuuuu.files.image_files import list_classes
from distribuuuu.hints.sources import count_others, find_inner_root, holds_images, split_command

PROBLEM, NOTE = "problem", "note"
# Ratio of the largest to the smallest class that is reported.
MAX_IMBALANCE = 10


@dataclass(frozen=True)
class Finding:
    """One kind of problem or note.

    Attributes:
        kind: its name in the JSON output, see docs/doctor.md.
        severity: "problem" (exit status 2) or "note".
        message: what was found.
        fix: what to do.
        files: the images or folders; an image that is broken is followed by the reason in `reasons`.
        groups: for duplicates, the copies of each image: {"identical", "distance", "files": [{"file", "split",
            "classes"}]}.
        reasons: by file, why it cannot be used.
    """

    kind: str
    severity: str
    message: str
    fix: str
    files: list[str] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def examine(scan: Scan, groups: Sequence[DuplicateGroup], options: DecodeOptions) -> dict[str, Any]:
    """Return the report: counts, statistics, suggested options and findings, of JSON types; see docs/doctor.md."""
    counts = {name: count_classes(images) for name, images in scan.splits.items()}
    findings = [
        *_folder_findings(scan.splits, counts),
        *_image_findings(scan, options),
        *_duplicate_findings(scan, groups),
        *_balance_findings(counts),
    ]
    findings.sort(key=lambda finding: finding.severity != PROBLEM)
    statistics = measure_statistics(scan)
    return {
        "version": 1,
        "status": "problems" if any(finding.severity == PROBLEM for finding in findings) else "clean",
        "images": len(scan.records),
        "splits": {
            name: {"images": len(images), "classes": counts[name], "imbalance": _imbalance(counts[name].values())}
            for name, images in scan.splits.items()
        },
        "statistics": statistics,
        "suggested": suggest_options(statistics),
        "findings": [asdict(finding) for finding in findings],
    }


def count_classes(images: ImageDataset) -> dict[str, int]:
    """Return the number of images of each class; an image with several labels counts for each of them."""
    if isinstance(images, ScannedFolder):
        counts = np.bincount(images.labels, minlength=len(images.classes)).tolist()
        return dict(zip(images.classes, counts, strict=True))
    counts = np.zeros(len(images.classes), np.int64)
    for index in range(len(images)):
        if images.targets == "labels":
            counts += np.asarray(images.label(index), np.int64)
        else:
            counts[int(images.label(index))] += 1
    return dict(zip(images.classes, counts.tolist(), strict=True))


def labels_of(images: ImageDataset, index: int) -> list[str]:
    """Return the class names of an image."""
    label = images.label(index)
    numbers = np.flatnonzero(label) if images.targets == "labels" else [int(np.asarray(label))]
    return [images.classes[int(number)] for number in numbers]


def _imbalance(counts: Iterable[int]) -> float | None:
    present = [count for count in counts if count]
    return round(max(present) / min(present), 2) if present else None


# --------------------------------------------------------------------------------- folders and classes


def _folder_findings(splits: dict[str, ImageDataset], counts: dict[str, dict[str, int]]) -> Iterator[Finding]:
    folders = {name: images for name, images in splits.items() if isinstance(images, ScannedFolder)}
    unreadable = {path: reason for images in folders.values() for path, reason in images.list_unreadable().items()}
    if unreadable:
        message = f"{counted(len(unreadable), 'folder')} cannot be listed"
        fix = "change the permissions, or remove the folders"
        yield Finding("unreadable_folder", PROBLEM, message, fix, [*unreadable], reasons=unreadable)
    lists = [images.list_ignored() for images in folders.values()]
    if ignored := [path for paths, _ in lists for path in paths]:
        message = f"{counted(len(ignored), 'file')} without an image extension {_are(ignored)} ignored"
        yield Finding("ignored_file", NOTE, message, "convert images of other formats, e.g. to PNG or JPEG", ignored)
    if outside := [path for _, paths in lists for path in paths]:
        message = f"{counted(len(outside), 'image')} outside of the class folders {_are(outside)} ignored"
        yield Finding("image_without_class", PROBLEM, message, "move each into the folder of its class", outside)
    empty = [
        str(folders[name].folder / label) if name in folders else f"{name}: {label}"
        for name, classes in counts.items()
        for label, count in classes.items()
        if not count and (name in folders or splits[name].targets == "label" and name == next(iter(splits)))
    ]
    if empty := [path for path in empty if path not in unreadable]:
        held = count_others(Path(), empty)
        message = f"{counted(len(empty), 'class')} without an image" + held.partition("; fix: ")[0] * ("other" in held)
        fix = held.partition("; fix: ")[2] if "other" in held else "add images, or remove the folders"
        yield Finding("empty_class", PROBLEM, message, fix, empty)
    yield from _layout_findings(folders, counts)
    yield from _name_findings({name: [*classes] for name, classes in counts.items()}, splits)


def _list_nested(folder: Path) -> tuple[str, ...]:
    """Return the sub-folders of a class folder that hold images, if it has no image of its own."""
    if holds_images(folder, depth=1):
        return ()
    return tuple(name for name in list_classes(folder) if holds_images(folder / name))


def _layout_findings(folders: dict[str, ScannedFolder], counts: dict[str, dict[str, int]]) -> Iterator[Finding]:
    """Yield findings for folders that are probably one level above or below the data set, and for a missing split."""
    trained = next(iter(counts))
    if trained not in folders:
        return
    root = folders[trained].folder
    inner = find_inner_root(root)
    if sum(count > 0 for count in counts[trained].values()) == 1:
        name = next(name for name, count in counts[trained].items() if count)
        held = f", whose folder holds {first_few(list_classes(inner))}" if inner else ""
        fix = f"use {inner} in place of {root}" if inner else "add images of another class"
        yield Finding("one_class", PROBLEM, f"{trained}: the only class is {name!r}{held}", fix, [str(root / name)])
    nested = {name: names for name in folders[trained].classes if (names := _list_nested(root / name))}
    if splits := {name: found for name, names in nested.items() if (found := find_splits(names)) and not inner}:
        message = f"{counted(len(splits), 'class')} with sub-folders that look like splits: "
        files, fix = [str(root / name) for name in splits], f"check each data set, e.g. {root / next(iter(splits))}"
        yield Finding("nested_splits", PROBLEM, message + first_few([*splits]), fix, files)
    if len(counts) == 1 and not inner:
        fix = split_command(root)
        yield Finding("one_split", NOTE, f"no images to evaluate: {trained} is the only split", fix, [str(root)])


def _name_findings(names: dict[str, list[str]], splits: dict[str, ImageDataset]) -> Iterator[Finding]:
    """Yield findings for class names that are spelled differently, and for those that are not in every split."""

    def path(split: str, label: str) -> str:
        images = splits[split]
        return str(images.folder / label) if isinstance(images, ScannedFolder) else f"{split}: {label}"

    spellings: dict[str, dict[str, list[str]]] = {}
    for split, labels in names.items():
        for label in labels:
            spellings.setdefault(spelling_key(label), {}).setdefault(label, []).append(path(split, label))
    if similar := [found for found in spellings.values() if len(found) > 1]:
        shown = first_few([" and ".join(map(repr, sorted(found))) for found in similar])
        message = f"class names differ only by case, spaces, hyphens or underscores: {shown}"
        files = [place for found in similar for label in sorted(found) for place in found[label]]
        fix = "merge the folders, under one name in all splits; now each is a separate class"
        yield Finding("similar_class_names", PROBLEM, message, fix, files)
    trained = next(iter(names))
    for split in [*names][1:]:
        if unknown := sorted(set(names[split]) - set(names[trained])):
            message = f"{counted(len(unknown), 'class')} of {split} {_are(unknown)} not in {trained}: "
            fix = f"rename the folders, or add training images; a model cannot learn classes that {trained} lacks"
            files = [path(split, label) for label in unknown]
            yield Finding("unknown_class", PROBLEM, message + first_few(unknown), fix, files)
        if missing := sorted(set(names[trained]) - set(names[split])):
            message = f"{counted(len(missing), 'class')} of {trained} {_are(missing)} not in {split}: "
            fix = f"add images to {split}; its accuracy does not cover these classes"
            files = [path(trained, label) for label in missing]
            yield Finding("unevaluated_class", NOTE, message + first_few(missing), fix, files)


def spelling_key(name: str) -> str:
    """Return a class name without case, spaces, hyphens, underscores and Unicode variants.

    Separators between two digits are kept: 1_0 and 10 are different numbers.
    """
    folded = unicodedata.normalize("NFKC", name).casefold()
    return re.sub(r"(?<!\d)[\s_-]+|[\s_-]+(?!\d)", "", folded)


def _balance_findings(counts: dict[str, dict[str, int]]) -> Iterator[Finding]:
    trained = next(iter(counts))
    present = {label: count for label, count in counts[trained].items() if count}
    ratio = _imbalance(present.values())
    if ratio is not None and ratio > MAX_IMBALANCE:
        by_count = sorted(present, key=lambda label: present[label])
        low, high = by_count[0], by_count[-1]
        message = f"{trained}: {high} has {present[high]:,} images, {low} has {present[low]:,}"
        fix = "DATA.SAMPLING sqrt or balanced, LOSS.CLASS_WEIGHTS auto; judge the model by macro recall (TEST.METRICS)"
        yield Finding("imbalance", NOTE, message, fix, [f"{trained}: {low}", f"{trained}: {high}"])


# -------------------------------------------------------------------------------------------- images


def _image_findings(scan: Scan, options: DecodeOptions) -> Iterator[Finding]:
    most = f"with more than DATA.MAX_PIXELS {options.max_pixels:,} pixels"
    rotated = "" if options.exif_rotate else "DATA.EXIF_ROTATE True rotates them in training and evaluation"
    replace = "replace or remove the files, or train with DATA.ON_BAD_IMAGE skip"
    reduce = "scale the images down, or raise DATA.MAX_PIXELS"
    for kind, flag, severity, text, fix in (
        ("truncated", TRUNCATED, PROBLEM, "truncated", replace),
        ("broken", BROKEN, PROBLEM, "empty, damaged, or no image", replace),
        ("oversized", OVERSIZED, PROBLEM, most, reduce),
        ("animated", ANIMATED, NOTE, "of several frames, of which training uses the first", "split them into images"),
        ("reduced", DEEP, NOTE, "of 16 bits, which training reduces to 8", KEEP_16_BITS),
        ("rotated", ROTATED, NOTE, "rotated by their EXIF data, which training ignores", rotated),
    ):
        if (found := scan.where(flag)) and fix:
            yield _image_finding(scan, kind, severity, text, fix, found)


def _image_finding(scan: Scan, kind: str, severity: str, text: str, fix: str, found: list[int]) -> Finding:
    files = {index: scan.name(index) for index in found}
    reasons = {files[index]: scan.reasons[index] for index in found if index in scan.reasons}
    return Finding(kind, severity, f"{counted(len(found), 'image')} {text}", fix, [*files.values()], reasons=reasons)


def _sizes(scan: Scan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return whether each image is usable, bool (N,), and the widths and heights of those that are, uint32."""
    is_usable = scan.records["flags"] & UNUSABLE == 0
    return is_usable, scan.records["width"][is_usable], scan.records["height"][is_usable]


# ---------------------------------------------------------------------------------------- duplicates


def _duplicate_findings(scan: Scan, groups: Sequence[DuplicateGroup]) -> Iterator[Finding]:
    described = [_describe_group(scan, group) for group in groups]
    leaking = [group for group in described if len({file["split"] for file in group["files"]}) > 1]
    contradicting = [group for group in described if len({tuple(file["classes"]) for file in group["files"]}) > 1]
    within = [group for group in described if _has_copies_within(group)]
    for kind, severity, found, text, fix in (
        ("leakage", PROBLEM, leaking, "in several splits, so the test measures memory",
         "keep the copies of one split, e.g. remove those from the training split"),
        ("contradicting_labels", PROBLEM, contradicting, "with different labels",
         "decide which label is right, and remove the other copies"),
        ("duplicates", NOTE, within, "several times in one split with the same label",
         "keep one copy of each: the others give an image more weight"),
    ):  # fmt: skip
        if found:
            num_same = sum(group["identical"] for group in found)
            parts = counted(num_same, "group") + " of identical files" if num_same else ""
            near = counted(len(found) - num_same, "group") + " of near-duplicates" if num_same < len(found) else ""
            message = f"{' and '.join(filter(None, (parts, near)))} {text}"
            yield Finding(kind, severity, message, fix, [file["file"] for group in found for file in group["files"]],
                          found)  # fmt: skip


def _describe_group(scan: Scan, group: DuplicateGroup) -> dict[str, Any]:
    files = []
    for index in group.images:
        split, images, local = scan.locate(index)
        files.append({"file": scan.name(index), "split": split, "classes": labels_of(images, local)})
    return {"identical": group.identical, "distance": group.distance, "files": files}


def _has_copies_within(group: dict[str, Any]) -> bool:
    places = [(file["split"], tuple(file["classes"])) for file in group["files"]]
    return len(set(places)) < len(places)


# ------------------------------------------------------------------------------- statistics and options


def measure_statistics(scan: Scan) -> dict[str, Any]:
    """Return mean and std of the channels (0 to 1) over the training split, and percentiles of sizes; empty if none."""
    _, width, height = _sizes(scan)
    if not len(width):
        return {}
    sums = next((row for row in scan.pixel_sums if row[6]), scan.pixel_sums[0])
    mean, square = sums[:3] / sums[6], sums[3:6] / sums[6]
    measures = {
        "width": width,
        "height": height,
        "shorter_side": np.minimum(width, height),
        "aspect_ratio": width / height,
    }
    return {
        "mean": [round(float(value), 4) for value in mean],
        "std": [round(float(value), 4) for value in np.sqrt(np.maximum(square - mean**2, 0))],
        **{name: percentiles(values) for name, values in measures.items()},
    }


def suggest_options(statistics: dict[str, Any]) -> dict[str, Any]:
    """Return options that suit the images: sides that do not enlarge 90 % of them, and their mean and std."""
    if not statistics:
        return {}
    sizes: dict[str, Any] = suggest_sizes(statistics["shorter_side"])
    return {**sizes, "DATA.MEAN": statistics["mean"], "DATA.STD": statistics["std"]}


def _are(items: Sequence[str]) -> str:
    return "is" if len(items) == 1 else "are"
