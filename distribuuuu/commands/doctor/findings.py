"""The splits of a folder or of a config, and findings on them: problems to solve before training, and notes.

Nothing is written, changed or deleted.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.commands.scan.data_config import find_splits, open_images
from distribuuuu.commands.scan.scan import BROKEN, INTACT, ROTATED, Scan, suggest_sizes
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset
from distribuuuu.data.datasets.file_check import find_reduced
from distribuuuu.data.datasets.folder_scan import scan_folder
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.datasets.index import Index
from distribuuuu.data.datasets.targets import match_forms
from distribuuuu.data.decode import DecodeOptions, build_decode_options, open_lazy_image
from distribuuuu.data.image_faults import explain_fault
from distribuuuu.files.image_files import EXTENSIONS, list_classes
from distribuuuu.hints import sources
from distribuuuu.hints.sources import describe_files, describe_imagenet, explain_folder, find_inner_root, split_command
from distribuuuu.records.run_log import progress

Splits = dict[str, ImageDataset]


class ScannedFolder(ImageFolder):
    """The images of CLASS/IMAGE below a folder, scanned anew; the index of the folder stays in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.use_index(Index(str(folder), str(folder), *scan_folder(str(folder))))


def open_folder(root: Path) -> Splits:
    """Return the data sets of a folder by split, the training split first.

    Layouts: SPLIT/CLASS/IMAGE and CLASS/IMAGE. Folders are splits if their names are those of `find_splits`. Another
    layout, or a folder that cannot be listed, is a ConfigError.
    """
    if reason := sources.access_problem(root):
        raise ConfigError(Problem("FOLDER", f"{root} cannot be listed: {reason}"))
    if hint := describe_imagenet(root):
        command = f"distribuuuu doctor DATA.NAME imagenet TRAIN.DATASET {shlex.quote(str(root))}"
        raise ConfigError(Problem("FOLDER", f"got {root}{hint}, as in: {command}"))
    folders = list_classes(root)
    if names := find_splits(folders, root):
        return {name: ScannedFolder(root / name) for name in names}
    if folders:
        return {"all": ScannedFolder(root)}
    hint = describe_files(root) or f"; fix: for a list or a pack, DATA.NAME list TRAIN.DATASET {shlex.quote(str(root))}"
    expected = f"has no class folders; expected SPLIT/CLASS/IMAGE or CLASS/IMAGE{hint}"
    raise ConfigError(Problem("FOLDER", f"{root} {expected}"))


def open_cfg(cfg) -> Splits:
    """Return the training and the evaluation set of a config, of any registered data set, by split."""
    dataset, problems = DATASETS.get(cfg.DATA.NAME), []
    splits: Splits = {}
    for key, train in (("TRAIN", True), ("TEST", False)):
        section = cfg[key]
        name = section.SPLIT if dataset.has_splits and issubclass(dataset, SplitDataset) else key.lower()
        if name in splits:
            if os.path.realpath(cfg.TRAIN.DATASET) == os.path.realpath(section.DATASET):
                continue  # one split for both
            name = f"{name} ({key})"
        try:
            if cfg.DATA.NAME == "imagefolder":
                root = Path(section.DATASET)
                if not (root / section.SPLIT).is_dir():
                    raise ConfigError([Problem(*one) for one in explain_folder(key, root, section.SPLIT, EXTENSIONS)])
                splits[name] = ScannedFolder(root / section.SPLIT)
            elif issubclass(dataset, SplitDataset):  # unknown classes are findings
                splits[name] = dataset.open_split(cfg, key)
            else:
                splits[name] = open_images(cfg, train)
        except ConfigError as error:
            problems += [Problem(one.key or f"{key}.SPLIT", one.message, cfg.origins) for one in error.problems]
    if problems:
        raise ConfigError(problems)
    return splits


# ------------------------------------------------------------------------------------------- findings

PROBLEM, NOTE = "problem", "note"
# Severity, message and fix of each kind of finding, in the order of the report; see docs/doctor.md.
_KINDS = {
    "empty_class": (PROBLEM, "{} without an image{}", ""),
    "one_class": (PROBLEM, "{}: the only class is {!r}", "add images of another class"),
    "unknown_class": (PROBLEM, "{} of {} not in {}: {}", "rename the folders, or add training images"),
    "not_read": (PROBLEM, "{} intact, but not readable without another option, a higher limit or a package", ""),
    "broken": (PROBLEM, "{} empty, damaged, or no image",
               "replace or remove the files, or train with DATA.ON_BAD_IMAGE skip"),
    "leakage": (PROBLEM, "{} of copies, {} of identical files, in several splits, so the test measures memory",
                "keep the copies of one split, e.g. remove those from the training split"),
    "contradicting_labels": (PROBLEM, "{} of copies, {} of identical files, with different labels",
                             "decide which label is right, and remove the other copies"),
    "suspicious_label": (NOTE, "{} whose label disagrees with the features of the model, the worst one first",
                         "look at each of them: correct its label, or keep it"),
    "one_split": (NOTE, "no images to evaluate: {} is the only split", ""),
    "noted": (NOTE, "{}", "nothing, if this is meant; else rename or convert the files"),
    "rotated": (NOTE, "{} rotated by their EXIF data, which training ignores",
                "DATA.EXIF_ROTATE True rotates them in training and evaluation"),
    "duplicates": (NOTE, "{} of copies, {} of identical files, several times in one split with the same label",
                   "keep one copy of each: the others give an image more weight"),
}  # fmt: skip
Finding = dict[str, Any]


def _found(kind: str, files: Sequence[str], *facts: object, fix: str = "", **details: Any) -> Finding:
    """Return a finding as in the JSON output, see docs/doctor.md; `facts` are those of the message."""
    severity, message, usual_fix = _KINDS[kind]
    finding = {"kind": kind, "severity": severity, "message": message.format(*facts), "fix": fix or usual_fix}
    return {**finding, "files": [*files], "groups": [], "reasons": {}, **details}


def examine(
    scan: Scan, groups: Sequence[list[int]], options: DecodeOptions, suspicious: Mapping[int, str]
) -> dict[str, Any]:
    """Return the report: counts, suggested options and findings, of JSON types; see docs/doctor.md.

    `suspicious` has what the features of a model say of images, by index, see `find_suspicious_labels`.
    """
    counts = {name: count_classes(images) for name, images in scan.splits.items()}
    findings = [
        *_class_findings(scan.splits, counts, options),
        *_image_findings(scan, options),
        *_duplicate_findings(scan, groups),
    ]
    if suspicious:
        reasons = {scan.name(index): reason for index, reason in suspicious.items()}
        findings.append(_found("suspicious_label", [*reasons], counted(len(reasons), "image"), reasons=reasons))
    findings.sort(key=lambda finding: [*_KINDS].index(finding["kind"]))
    usable = scan.records[scan.records["flags"] & BROKEN == 0]
    shorter = np.sort(np.minimum(usable["width"], usable["height"]))
    return {
        "version": 2,
        "status": "problems" if any(finding["severity"] == PROBLEM for finding in findings) else "clean",
        "images": len(scan.records),
        "splits": {name: {"images": len(own), "classes": counts[name]} for name, own in scan.splits.items()},
        "suggested": suggest_sizes(int(shorter[round((len(shorter) - 1) / 10)])) if len(usable) else {},
        "findings": findings,
    }


def labels_of(images: ImageDataset, index: int) -> list[str]:
    """Return the class names of an image."""
    label = images.label(index)
    numbers = np.flatnonzero(label) if images.targets == "labels" else [int(np.asarray(label))]
    return [images.classes[int(number)] for number in numbers]


def count_classes(images: ImageDataset) -> dict[str, int]:
    """Return the number of images of each class; an image with several labels counts for each of them."""
    found = dict.fromkeys(images.classes, 0)
    for index in range(len(images)):
        for name in labels_of(images, index):
            found[name] += 1
    return found


def _class_findings(splits: Splits, counts: dict[str, dict[str, int]], options: DecodeOptions) -> Iterator[Finding]:
    folders = {name: images for name, images in splits.items() if isinstance(images, ScannedFolder)}
    trained, *others = splits
    empty = [
        _place(splits[name], name, label)
        for name, classes in counts.items()
        for label, count in classes.items()
        if not count and (name in folders or splits[name].targets == "label" and name == trained)
    ]
    if empty:
        held, _, fix = sources.count_others(Path(), empty).partition("; fix: ")
        yield _found("empty_class", empty, counted(len(empty), "class"), held, fix=f"add images, or {fix}")
    notes = [note for images in splits.values() for note in images.notes()]
    for split in others:
        unknown = sorted(counts[split].keys() - counts[trained].keys())
        forms, found = match_forms(split, unknown, counts[trained])
        notes += found
        if names := [name for name in unknown if name not in forms]:
            places = [_place(splits[split], split, name) for name in names]
            yield _found("unknown_class", places, counted(len(names), "class"), split, trained, first_few(names))
    notes += [note for images in splits.values() if (note := find_reduced(images, options))]
    if notes:
        yield _found("noted", [], "; ".join(notes))
    if trained in folders:
        root = folders[trained].folder
        inner, present = find_inner_root(root), [name for name, count in counts[trained].items() if count]
        if len(present) == 1:
            fix = f"use {inner} in place of {root}" if inner else ""
            yield _found("one_class", [str(root / present[0])], trained, present[0], fix=fix)
        if not others and not inner:
            yield _found("one_split", [str(root)], trained, fix=split_command(root))


def _place(images: ImageDataset, split: str, label: str) -> str:
    """Return the folder of a class, or 'SPLIT: CLASS'."""
    return str(images.folder / label) if isinstance(images, ScannedFolder) else f"{split}: {label}"


def _image_findings(scan: Scan, options: DecodeOptions) -> Iterator[Finding]:
    flags = scan.records["flags"] & (BROKEN | INTACT | (0 if options.exif_rotate else ROTATED))
    for kind, flag in (("broken", BROKEN), ("not_read", BROKEN | INTACT), ("rotated", ROTATED)):
        if found := np.flatnonzero(flags == flag).tolist():
            files = [scan.name(index) for index in found]
            pairs = zip(files, map(scan.reasons.get, found), strict=True)
            reasons = {file: reason for file, reason in pairs if reason is not None}
            fixes = dict.fromkeys(reason.rpartition("; fix: ")[2] for reason in reasons.values())
            fix = first_few([*fixes], "; ", 3) if kind == "not_read" else ""
            yield _found(kind, files, counted(len(found), "image"), reasons=reasons, fix=fix)


def _duplicate_findings(scan: Scan, groups: Sequence[list[int]]) -> Iterator[Finding]:
    found: dict[str, list[dict[str, Any]]] = {"leakage": [], "contradicting_labels": [], "duplicates": []}
    for group in groups:
        places = [(*scan.locate(index), scan.name(index)) for index in group]
        files = [{"file": file, "split": split, "classes": labels_of(images, local)}
                 for split, images, local, file in places]  # fmt: skip
        identical = len({scan.records[index].tobytes() for index in group}) == 1
        described = {"identical": identical, "files": files}
        splits, labels = [file["split"] for file in files], [tuple(file["classes"]) for file in files]
        found["leakage"] += [described] * (len({*splits}) > 1)
        found["contradicting_labels"] += [described] * (len({*labels}) > 1)
        found["duplicates"] += [described] * (len({*zip(splits, labels, strict=True)}) < len(files))
    for kind, copies in found.items():
        if copies:
            names = [file["file"] for group in copies for file in group["files"]]
            num_same = sum(group["identical"] for group in copies)
            yield _found(kind, names, counted(len(copies), "group"), num_same, groups=copies)


def format_statistics(cfg: Config, workers: int, as_json: bool) -> str:
    """Return mean and deviation, in the units of DATA.MEAN, as JSON or YAML; each image has the same weight."""
    images, options, one = open_images(cfg, train=True), build_decode_options(cfg), PIXEL_RANGES[cfg.DATA.PIXELS]

    def measure(index: int) -> np.ndarray:
        try:
            pixels = open_lazy_image(images.read(index), cfg.DATA.DECODER, options).pixels().numpy()
        except ConfigError:
            raise
        except Exception as error:  # decoders raise nearly anything for a damaged file; each is reported with its name
            raise explain_fault(images.describe(index), error).error() from error
        values = pixels.reshape(len(pixels), -1) / np.float64(one)
        return np.stack([values.mean(1), np.square(values).mean(1)])

    with ThreadPoolExecutor(max(1, workers)) as pool:
        total = sum(progress(pool.map(measure, range(len(images))), "measuring", len(images)))
    mean, square = total / len(images)
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    rows = [[float(f"{value:.6g}") for value in values] for values in (mean, np.where(deviation, deviation, 1))]
    # A constant channel is divided by 1.
    data = {"CHANNELS": cfg.DATA.CHANNELS, "PIXELS": cfg.DATA.PIXELS, "MEAN": rows[0], "STD": rows[1]}
    if as_json:
        return json.dumps({"DATA": data})
    lines = [f"# of {counted(len(images), 'training image')}", "DATA:"]
    return "\n".join([*lines, *(f"  {name}: {value}" for name, value in data.items())])
