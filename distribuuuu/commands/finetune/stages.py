"""Stages of a fine-tuning, from images to a tested model. Each is stored when it is finished, and not repeated."""

import contextlib
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from distribuuuu.checkpoint.weights_files import best_path
from distribuuuu.commands.finetune.archives import unpack
from distribuuuu.commands.finetune.backbones import backbone_options, default_backbone, open_backbones
from distribuuuu.commands.finetune.choose import compare, interpolate, name_of, read_tuned
from distribuuuu.commands.finetune.data import PARTS, divide, hash_images, list_sources
from distribuuuu.commands.finetune.decisions import Decisions, explaining_disk
from distribuuuu.commands.finetune.feature_file import compute_features, describe, write_features
from distribuuuu.commands.finetune.head import (
    Part,
    Probe,
    accepts,
    find_head_names,
    fit_probe,
    open_backbone,
    set_head,
    write_model,
    write_probe,
)
from distribuuuu.commands.finetune.recipe import build_recipe, choose_epochs, measure_epoch
from distribuuuu.commands.finetune.summary import format_backbones, format_choice, next_commands
from distribuuuu.commands.scan.splitting import Images, write_split
from distribuuuu.config import Config, ConfigError, load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.registry import dataset_class
from distribuuuu.data.build_transform import statistics_of
from distribuuuu.engine.auto_batch_size import in_fresh_process
from distribuuuu.engine.build import make_out_dir
from distribuuuu.engine.fast_mode import CHOICES
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.engine.run_lock import lock_out_dir
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import printable
from distribuuuu.inference.calibration import Calibration, write_calibration
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.inference.mode_of_run import find_fast_mode
from distribuuuu.launch.nproc import run_processes
from distribuuuu.launch.signals import STATUS_OF, RunStopped
from distribuuuu.models import count_parameters
from distribuuuu.models.pretrained import Backbone
from distribuuuu.records.run_log import STAGE_MARK, progress
from distribuuuu.trainer import evaluate_weights

# Size of the evaluated images by that of the training; share of the minutes that features may take.
_LARGER, _FEATURES_SHARE = 1.29, 0.6
# The time to load and compute an image over that of its forward pass; seconds for processes to start and to measure.
_LOADING, _OTHER_S = 1.25, 20.0
TRAINING = "finetune"
_AUTO = [(key, AUTO) for key in CHOICES]


def say(*lines: str) -> None:
    """Print lines to standard output."""
    for line in lines:
        print(printable(line), flush=True)


def run_stages(flags: Namespace) -> dict[str, Any]:
    """Run the stages that are not finished yet; return the decisions and results, the content of finetune.json.

    Raises:
        ConfigError: the images, the backbone or the folder cannot be used.
    """
    out = flags.out
    if not flags.backbone:
        name, reason = default_backbone()
        flags.backbone = [name]
        say(f"backbone: {name}, the default {reason}")
    backbones = open_backbones(flags.backbone)
    make_out_dir(str(out))
    with lock_out_dir(out), explaining_disk(out), short_log():
        images, parts = list_sources(unpack(flags.folder, out), flags.overrides)
        job = {"images": hash_images(images), "backbones": [*backbones], "minutes": flags.minutes,
               "options": flags.overrides, "groups": flags.group_by, "seed": flags.seed,
               "version of torch": torch.__version__, "fine-tuning": not flags.probe_only}  # fmt: skip
        decisions = Decisions(out, job)
        data = decisions.once("data", lambda: split_images(flags, images, parts))
        say(*data["notes"])
        write_split(images, out / "lists", {f"{part}.csv": data["parts"][part] for part in PARTS})
        probes = {name: Candidate(flags, images, data["parts"], backbones[name]) for name in backbones}
        found = {name: probe.run(decisions) for name, probe in probes.items()}
        chosen = max(found, key=lambda name: found[name]["correct"]["probe"]["val"])
        if len(found) > 1:
            say(*format_backbones(found, len(data["parts"]["val"])))
        result = finish(flags, decisions, probes[chosen], found[chosen])
        sizes = {part: len(data["parts"][part]) for part in PARTS}
        config = out / f"{TRAINING}.yaml" if decisions.content["training"]["epochs"] else None
        say(*format_choice(result, found[chosen], sizes), *next_commands(out, config))
        return decisions.content


@contextlib.contextmanager
def short_log() -> Iterator[None]:
    """Show rows and warnings of the trainings and evaluations in the block on the terminal; their files have all."""
    os.environ[STAGE_MARK] = "1"
    try:
        yield
    finally:
        del os.environ[STAGE_MARK]


def split_images(flags: Namespace, images: Images, parts: dict[str, list[int]]) -> dict[str, Any]:
    """Return the indices of the images of each part, the notes to print, and the seconds that this took."""
    started = time.monotonic()
    with progress(None, "checking", len(images.names), unit="image") as bar:
        parts, notes, broken = divide(images, parts, flags.group_by, flags.seed, flags.workers, bar.update)
    if broken:
        notes.append(f"WARNING: {counted(len(broken), 'broken image')} left out: {first_few(broken, '; ')}")
    head = f"{counted(len(images.names), 'image')} of {counted(len(images.classes), 'class')} in {flags.given}: "
    head += ", ".join(f"{len(parts[part]):,} for {part}" for part in PARTS)
    return {"parts": parts, "notes": [head, *notes], "broken": broken, "seconds": time.monotonic() - started}


class Candidate:
    """A backbone on these images: its config, its features and its probe."""

    def __init__(self, flags: Namespace, images: Images, parts: dict[str, list[int]], backbone: Backbone):
        self.flags, self.images, self.parts, self.name = flags, images, parts, backbone.name
        lists, self.license = str(flags.out / "lists"), backbone.license
        options = {
            "DATA.NAME": "list", "TRAIN.DATASET": lists, "TEST.DATASET": lists, "TEST.SPLIT": "val",
            "DATA.EXIF_ROTATE": True, "RNG_SEED": flags.seed, "TRAIN.WORKERS": flags.workers,
            "LOG.TENSORBOARD": False, **backbone_options(backbone),
        }  # fmt: skip
        self.words = as_words(options)
        pairs = zip(flags.overrides[::2], flags.overrides[1::2], strict=True)
        # auto is what they are anyway.
        self.own = [word for pair in pairs if pair not in _AUTO and not pair[0].startswith("DATA.TABLE")
                    for word in pair]  # fmt: skip
        cfg = resolve_cfg(load_cfg(None, [*self.words, *self.own]))
        mean, std = statistics_of(cfg, dataset_class(cfg))
        self.cfg = changed(cfg, {"DATA.MEAN": tuple(mean), "DATA.STD": tuple(std)})
        self.key = f"backbone {self.name}"

    def run(self, decisions: Decisions) -> dict[str, Any]:
        """Compute the features and fit the probe; return its facts."""
        plain = open_backbone(self.cfg, self.images.classes, self.name)
        mode = decisions.once(f"{self.key}: mode", lambda: self.find_mode(plain))
        image_s = mode["image_s"]
        mode = {key: mode[key] for key in CHOICES if key not in self.own}
        views = decisions.once(f"{self.key}: views", lambda: self.choose_views(plain, image_s))
        self.sizes: dict[str, int] = views["options"]
        self.cfg = changed(self.cfg, options := mode | self.sizes)
        self.words += as_words(options)
        self.backbone = replace(plain, cfg=self.cfg)
        parts = {part: self.parts[part] for part in PARTS}
        parts |= {"mirrored": parts["train"]} if views["mirrored"] else {}
        files = [str(self.images.folder / self.images.names[index]) for own in parts.values() for index in own]
        out = self.flags.out / f"features_{list(decisions.content).index(f'{self.key}: mode')}"
        with progress(None, "features", len(files), unit="image") as bar:
            rows, _ = compute_features(
                self.backbone, files, out, self.flags.workers, bar, len(parts.get("mirrored", ()))
            )
        started, labels = time.monotonic(), torch.tensor(self.images.labels)
        split = torch.from_numpy(rows).split([len(own) for own in parts.values()])
        features = {part: Part(own, labels[parts[part]]) for part, own in zip(parts, split, strict=True)}
        names = [self.images.classes[self.images.labels[index]] for part in PARTS for index in self.parts[part]]
        self.features = files[: len(names)], rows[: len(names)], (), describe(self.backbone), names
        self.probe: Probe = fit_probe(features, len(self.images.classes))
        facts = {"correct": self.probe.correct, "penalty": self.probe.penalty, "temperature": self.probe.temperature,
                 "calibration": asdict(self.probe.calibration),
                 "params_m": count_parameters(self.backbone.model) / 1e6, "license": self.license,
                 "image_s": image_s * views["scale"], "seconds": time.monotonic() - started}  # fmt: skip
        return decisions.once(f"{self.key}: probe", lambda: facts)

    def choose_views(self, plain: LoadedRun, image_s: float) -> dict[str, Any]:
        """Return the size of the evaluated images, and whether the probe is fitted to mirrored images, too.

        Both cost time. A network that was trained with random crops sees objects larger in training than in a
        center crop, so it is better at a larger size (FixRes, arXiv 1906.06423).
        """
        side, resized = self.cfg.TRAIN.IM_SIZE, self.cfg.TEST.IM_SIZE
        is_given = self.cfg.TEST.CROP_SIZE or any(key.startswith(("TEST.IM_SIZE", "TEST.CROP")) for key in self.own)
        sizes, scale = dict[str, int](), 1.0
        if not is_given and isinstance(side, int) and isinstance(resized, int):
            larger = round(_LARGER * side / 32) * 32
            if larger > side and accepts(plain, larger):
                sizes, scale = {"TEST.IM_SIZE": round(resized * larger / side), "TEST.CROP_SIZE": larger}, larger / side
        num_train, num = len(self.parts["train"]), sum(len(part) for part in self.parts.values())
        choices: list[tuple[dict[str, int], float, bool]] = [
            (sizes, scale**2, True), (sizes, scale**2, False), ({}, 1.0, True), ({}, 1.0, False)]  # fmt: skip
        seconds = [factor * image_s * (num + mirrored * num_train) for _, factor, mirrored in choices]
        most_s = _FEATURES_SHARE * 60 * self.flags.minutes
        place = next((place for place, needed in enumerate(seconds) if needed <= most_s), -1)
        options, factor, mirrored = choices[place]
        return {"options": options, "mirrored": mirrored, "scale": factor, "seconds": _LOADING * seconds[place]}

    def find_mode(self, plain: LoadedRun) -> dict[str, Any]:
        """Return the fast mode of this machine."""
        mode = find_fast_mode(replace(plain, cfg=changed(self.cfg, dict(_AUTO))))
        layout = "channels_last" if mode["MODEL.CHANNELS_LAST"] else "contiguous"
        say(f"{self.name}: {layout}, AMP {mode['TRAIN.AMP']}, {mode['speedup']} x the plain speed")
        return mode

    def read_training(self, head: Path, epochs: int) -> Config:
        """Return the config of a training from a head for a number of epochs."""
        recipe = build_recipe(self.backbone.model, len(self.parts["train"]), epochs, bool(self.cfg.FINETUNE.LORA))
        recipe |= {"FINETUNE.HEAD": str(head), "OUT_DIR": str(self.flags.out / TRAINING)}
        if self.sizes:  # the head is fitted to objects of this size
            recipe["TRAIN.IM_SIZE"] = self.sizes["TEST.CROP_SIZE"]
        cfg = resolve_cfg(load_cfg(None, [*self.words, *as_words(recipe), *self.own]))
        return changed(cfg, {"DATA.MEAN": self.cfg.DATA.MEAN, "DATA.STD": self.cfg.DATA.STD})


def finish(flags: Namespace, decisions: Decisions, best: Candidate, facts: dict[str, Any]) -> dict[str, Any]:
    """Fine-tune the best backbone from its probe, choose, write the model and test it; return the choice."""
    out, num, classes = flags.out, len(best.parts["val"]), best.images.classes
    head, names = write_probe(out, best.probe, best.backbone), find_head_names(best.backbone)
    probe = set_head(best.backbone, names, best.probe)
    cfg = best.read_training(head, 1)
    right, evaluation_s = facts["correct"]["probe"]["val"], num * facts["image_s"]
    if "choice" not in decisions.content:
        write_model(changed(cfg, {"OUT_DIR": str(out)}), probe, classes, facts)
        say(f"probe: {right} of {num} validation images right ({100 * right / num:.1f} %); the model is in {out}")
    epochs = decisions.once("training", lambda: plan_training(best, cfg, decisions, evaluation_s))["epochs"]
    tuned = probe
    if epochs:
        cfg = best.read_training(head, epochs)
        path = out / f"{TRAINING}.yaml"
        with replacing(path, "w", encoding="utf-8") as file:
            file.write(cfg.dump())
        train(path, flags.nproc)
        tuned = read_tuned(cfg, probe)
    untrained = {"correct": {name_of(0.0): right}, "share": 0.0, "calibration": facts["calibration"]}
    choice = decisions.once("choice", lambda: compare(cfg, probe, tuned) if epochs else untrained)
    tensors = interpolate(probe, tuned, choice["share"])
    final = changed(cfg, {"OUT_DIR": str(out), "TEST.SPLIT": "test", "DATA.WORKER_KIND": "thread"})
    calibration = Calibration(**choice["calibration"])
    if not choice["share"]:  # the head without the temperature of the probe, which the calibration has
        scale, own = best.probe.temperature, best.probe
        tensors = set_head(best.backbone, names, own._replace(weight=scale * own.weight, bias=scale * own.bias))
        calibration = replace(calibration, temperature=scale * calibration.temperature)
    write_model(final, tensors, classes, {**facts, **choice})
    write_features(out / "features.npz", *best.features)
    write_calibration(out, calibration, tensors)
    final = changed(final, {"MODEL.WEIGHTS": str(best_path(out))})
    return {**choice, "test": decisions.once("test", lambda: evaluate_weights(final))}


def plan_training(best: Candidate, cfg: Config, decisions: Decisions, evaluation_s: float) -> dict[str, Any]:
    """Return the number of epochs that are given or fit into the minutes, and the measurements behind it.

    Of the time so far, what is stored counts, not that of this process: a stop changes no number of epochs.
    """
    flags, given = best.flags, dict(zip(best.own[::2], best.own[1::2], strict=True)).get("OPTIM.MAX_EPOCH")
    if flags.probe_only or given:
        return {"epochs": 0 if flags.probe_only else int(given or 0)}
    epoch_s = in_fresh_process(measure_epoch, cfg)
    if isinstance(epoch_s, str):
        raise ConfigError(f"--minutes: out of memory in a training step: {epoch_s}; fix: TRAIN.BATCH_SIZE 8")
    stored_s = sum(entry.get("seconds", 0.0) for entry in decisions.content.values())
    left_s = 60 * flags.minutes - _OTHER_S - stored_s
    epochs = choose_epochs(left_s, epoch_s / flags.nproc, evaluation_s)
    fits = f"{counted(epochs, 'epoch')} {'fits' if epochs == 1 else 'fit'} into {flags.minutes:g} min"
    if not epochs:  # two would
        missing_s = 2 * epoch_s / flags.nproc + 10 * evaluation_s - left_s
        fits = f"none fits into {flags.minutes:g} min; fix: --minutes {math.ceil(flags.minutes + missing_s / 60)}"
    say(f"fine-tuning: an epoch takes {epoch_s:.0f} s; {fits}")
    return {"epochs": epochs, "epoch_s": epoch_s, "evaluation_s": evaluation_s, "left_s": left_s}


def as_words(options: dict[str, Any]) -> list[str]:
    """Return options as KEY VALUE words."""
    return [str(word) for pair in options.items() for word in pair]


def train(path: Path, nproc: int) -> None:
    """Run or resume the training of a config in processes of its own.

    Raises:
        RunStopped, ConfigError: it was stopped by a signal, or has failed.
    """
    status = run_processes(nproc, [sys.executable, "-m", "distribuuuu", "train", "--cfg", str(path)])
    stopped = [signum for signum, value in STATUS_OF.items() if value == status]
    if stopped:
        raise RunStopped(stopped[0])
    if status:
        raise ConfigError(f"the training has failed with status {status}; fix: see above, then rerun the same command")
