"""Stages of a fine-tuning, from images to a tested model. Each is stored when it is finished, and not repeated."""

import contextlib
import logging
import math
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from distribuuuu.checkpoint.published_files import DEFAULT
from distribuuuu.commands.finetune.archives import unpack
from distribuuuu.commands.finetune.backbones import LARGE, backbone_options, default_backbone, open_backbones
from distribuuuu.commands.finetune.choose import compare, interpolate, name_of, read_tuned
from distribuuuu.commands.finetune.data import PARTS, divide, hash_images, list_sources
from distribuuuu.commands.finetune.decisions import Decisions, explaining_disk
from distribuuuu.commands.finetune.feature_file import compute_features, describe, write_features
from distribuuuu.commands.finetune.head import Part, fit_probe, open_backbone, set_head, write_model, write_probe
from distribuuuu.commands.finetune.recipe import FEWEST_EPOCHS, build_recipe, choose_epochs, measure_epoch, seconds_of
from distribuuuu.commands.finetune.summary import format_backbones, format_choice, interval, next_commands
from distribuuuu.commands.finetune.views import choose_views
from distribuuuu.commands.scan.splitting import Images, write_split
from distribuuuu.config import Config, ConfigError, load_cfg
from distribuuuu.config.config_node import changed, get_value
from distribuuuu.config.derived import FOLLOWING
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.json_file import load_json
from distribuuuu.config.model_names import PUBLISHED
from distribuuuu.config.registry import dataset_class
from distribuuuu.config.run_files import DECISIONS
from distribuuuu.data.batch_plan import check_num_images, plan_of
from distribuuuu.data.build_transform import statistics_of
from distribuuuu.data.decode import build_decode_options
from distribuuuu.engine.build import check_warmup, make_out_dir
from distribuuuu.engine.fast_mode import AUTO_MODE
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.engine.run_lock import lock_out_dir
from distribuuuu.engine.trial_run import in_fresh_process
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import printable
from distribuuuu.inference.calibration import Calibration
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.launch.nproc import run_processes
from distribuuuu.launch.signals import STATUS_OF, RunStopped
from distribuuuu.models import count_parameters
from distribuuuu.models.preprocessing import describe_license, follow, read_preprocessing
from distribuuuu.models.pretrained import Backbone
from distribuuuu.records.run_log import STAGE_MARK, progress
from distribuuuu.trainer import evaluate_weights

# Seconds for processes to start and to measure.
_OTHER_S = 8.0
TRAINING = "finetune"


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
    if (out / DECISIONS).is_file():  # a resumed one keeps its default, whatever can be downloaded now
        with contextlib.suppress(ConfigError, LookupError, TypeError):
            known = load_json(out / DECISIONS)["job"]["backbones"]
            flags.backbone = flags.backbone or (known if known in ([DEFAULT], [LARGE]) else None)
    if not flags.backbone:
        name, reason = default_backbone()
        flags.backbone = [name]
        say(f"backbone: {name}, the default {reason}")
    backbones = open_backbones(flags.backbone, dict(flags.pairs).get("MODEL.ARCH", ""))
    for name, backbone in backbones.items():
        level, text = describe_license(backbone.license)
        say(f"{'WARNING: ' * (level > logging.INFO)}{name}: {text}")
    is_new = not out.exists()
    make_out_dir(str(out), "--out")
    with lock_out_dir(out), explaining_disk(out, is_new), short_log():
        folder = unpack(flags.folder, out, flags.data)
        images, parts = list_sources(folder, flags.data if folder == flags.folder else ())
        job = {"images": hash_images(images), "backbones": [*backbones], "minutes": flags.minutes,
               "weights": [sha256(one.path.read_bytes()).hexdigest() if one.path else "" for one in backbones.values()],
               "options": flags.overrides, "groups": flags.group_by, "seed": flags.seed,
               "version of torch": torch.__version__, "fine-tuning": not flags.probe_only}  # fmt: skip
        decisions = Decisions(out, job)
        data = decisions.once("data", lambda: split_images(flags, images, parts))
        say(*data["notes"])
        write_split(images, out / "lists", {f"{part}.csv": data["parts"][part] for part in PARTS})
        is_tested = "test" in decisions.content
        probes = {name: probe_backbone(flags, images, data["parts"], one, decisions)
                  for name, one in backbones.items() if not is_tested}  # fmt: skip
        facts = {name: decisions.content[f"backbone {one.name}: probe"] for name, one in backbones.items()}
        sizes = {part: len(data["parts"][part]) for part in PARTS}
        if len(facts) > 1:
            say(*format_backbones(facts, sizes["val"]))
        best = max(facts, key=lambda name: facts[name]["correct"]["probe"]["val"])
        if not is_tested:
            finish(flags, decisions, probes[best], sizes)
        for path in out.glob("features_*.partial"):
            shutil.rmtree(path)
        content = decisions.content
        config = out / f"{TRAINING}.yaml" if content["training"]["epochs"] else None
        result = {**content["choice"], "test": content["test"]}
        say(*format_choice(result, facts[best], sizes), *next_commands(out, config))
        return content


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
    started, given = time.monotonic(), (flags.group_by, flags.seed, flags.workers)
    with progress(None, "checking", len(images.names), unit="image") as bar:
        parts, notes, broken, side = divide(images, parts, *given, bar.update, build_decode_options(flags.cfg))
    if broken:
        notes.append(f"WARNING: {counted(len(broken), 'broken image')} left out: {first_few(broken, '; ')}")
    head = f"{counted(len(images.names), 'image')} of {counted(len(images.classes), 'class')} in {flags.given}: "
    head += ", ".join(f"{len(parts[part]):,} for {part}" for part in PARTS)
    folder = flags.folder.resolve()
    name = dict(flags.pairs).get("DATA.NAME") or (folder.name if folder.is_dir() else folder.stem)
    content = {"name": name, "parts": parts, "notes": [head, *notes], "broken": broken, "side": side}
    return {**content, "seconds": time.monotonic() - started}


class Candidate(NamedTuple):
    """A backbone on these images.

    Attributes:
        words, own: options of a training, as KEY VALUE words: those of the backbone and its views, and the user's.
        backbone: the model with a random head, which the probe's replaces.
        facts: what is known of the probe, which finetune.json and the model store.
        features: what is written to features.npz.
    """

    words: list[str]
    own: list[str]
    backbone: LoadedRun
    probe: Any = None
    facts: dict[str, Any] = {}
    features: tuple[Any, ...] = ()

    def given_epochs(self, default: int = 0) -> int:
        """Return OPTIM.MAX_EPOCH of the user."""
        return int(dict(zip(self.own[::2], self.own[1::2], strict=True)).get("OPTIM.MAX_EPOCH", default))

    def read_training(self, out: Path, head: Path, num_images: int, epochs: int) -> Config:
        """Return the config of a training from a head for a number of images and of epochs."""
        cfg = self.backbone.cfg
        recipe = build_recipe(self.backbone.model, num_images, epochs or self.given_epochs(), bool(cfg.FINETUNE.LORA))
        recipe |= {"FINETUNE.HEAD": str(head), "OUT_DIR": str(out / TRAINING)}
        if (cfg.DATA.CHANNELS, cfg.DATA.PIXELS) != (3, "uint8"):
            del recipe["AUG.POLICY"]
        own = resolve_cfg(load_cfg(None, [*self.words, *as_words(recipe), *self.own]))
        return changed(own, {"DATA.MEAN": cfg.DATA.MEAN, "DATA.STD": cfg.DATA.STD})


def probe_backbone(
    flags: Namespace, images: Images, parts: dict[str, list[int]], backbone: Backbone, decisions: Decisions
) -> Candidate:
    """Return a backbone with its features and its probe."""
    lists, name = str(flags.out / "lists"), backbone.name
    words = as_words({
        "DATA.NAME": "list", "TRAIN.DATASET": lists, "TEST.DATASET": lists, "TEST.SPLIT": "val",
        "DATA.EXIF_ROTATE": True, "RNG_SEED": flags.seed, "TRAIN.WORKERS": flags.workers,
        "LOG.TENSORBOARD": False, "OUT_DIR": flags.out, **backbone_options(backbone),
    })  # fmt: skip
    # auto is what they are anyway, and MODEL.ARCH is that of a backbone that names none.
    left_out = [*AUTO_MODE.items(), *(pair for pair in flags.pairs if pair[0] == "MODEL.ARCH" and backbone.arch)]
    own = [word for pair in flags.pairs if pair not in left_out and pair[0] not in flags.data for word in pair]
    cfg = load_cfg(None, [*words, *own])
    if backbone.path and not backbone.options:  # a file of another program, most likely a copy of published weights
        source = f"the published weights of {cfg.MODEL.ARCH}, as {name} has none"
        cfg = follow(cfg, source, {**read_preprocessing(cfg.MODEL.ARCH, PUBLISHED), "MODEL.LICENSE": ""})
        say(*(text for _, text in cfg.notes), f"{name}: tensors of other names are matched by order and shape")
        words += as_words({key: get_value(cfg, key) for key in FOLLOWING if get_value(cfg, key)})
    cfg = resolve_cfg(cfg)
    mean, std = statistics_of(cfg, dataset_class(cfg))
    cfg = changed(cfg, {"DATA.MEAN": tuple(mean), "DATA.STD": tuple(std)})
    plain, num_train = open_backbone(cfg, images.classes, name), len(parts["train"])
    num = sum(map(len, parts.values()))
    given = own, decisions.content["data"].get("side", 0), num_train, num, flags.minutes / len(flags.backbone)
    views = decisions.once(f"backbone {name}: views", lambda: choose_views(plain, *given))
    run = replace(plain, cfg=changed(cfg, views["options"]))
    layout = "channels_last" if run.cfg.MODEL.CHANNELS_LAST else "contiguous"
    say(f"{name}: {layout}, AMP {run.cfg.TRAIN.AMP}, {views['speedup']} x the plain speed")
    candidate = Candidate(words + as_words(views["options"]), own, run)
    training = candidate.read_training(flags.out, Path(), num_train, 0)  # options that contradict each other: now
    check_warmup(training)
    check_num_images(training, plan_of(training, flags.nproc), num_train)
    own_parts = {part: parts[part] for part in PARTS} | ({"mirrored": parts["train"]} if views["mirrored"] else {})
    files = [str(images.folder / images.names[index]) for part in own_parts.values() for index in part]
    out = flags.out / f"features_{list(decisions.content).index(f'backbone {name}: views')}"
    with progress(None, "features", len(files), unit="image") as bar:
        rows, _ = compute_features(run, files, out, flags.workers, bar, len(files) - num)
    started, labels = time.monotonic(), torch.tensor(images.labels)
    split = torch.from_numpy(rows).split([len(part) for part in own_parts.values()])
    features = {part: Part(own, labels[own_parts[part]]) for part, own in zip(own_parts, split, strict=True)}
    probe = fit_probe(features, len(images.classes))
    facts = {"correct": probe.correct, "penalty": probe.penalty, "temperature": probe.calibration.temperature,
             "params_m": count_parameters(run.model) / 1e6, "license": backbone.license,
             "image_s": views["image_s"], "seconds": time.monotonic() - started}  # fmt: skip
    facts = decisions.once(f"backbone {name}: probe", lambda: facts)
    kept = [*range(num_train), *range(num - len(parts["test"]), num)]  # reports show the nearest training images
    names = [images.classes[images.labels[index]] for part in (PARTS[0], PARTS[2]) for index in parts[part]]
    stored = [files[at] for at in kept], names, rows[kept], (), describe(run)
    return candidate._replace(probe=probe, facts=facts, features=stored)


def finish(flags: Namespace, decisions: Decisions, best: Candidate, sizes: dict[str, int]) -> None:
    """Fine-tune the best backbone from its probe, choose, write the model and test it."""
    out, run, facts = flags.out, best.backbone, best.facts
    right = facts["correct"]["probe"]["val"]
    probe, scaled = (set_head(run, head) for head in (best.probe, best.probe.scaled()))
    head = write_probe(out, best.probe.scaled(), run)
    cfg = best.read_training(out, head, sizes["train"], 0)
    if "choice" not in decisions.content:
        write_model(cfg, out, probe, run.classes, facts, best.probe.calibration)
        share = f"{100 * right / sizes['val']:.1f} %, 95 % interval {interval(right, sizes['val'])}"
        say(f"probe: {right} of {sizes['val']} validation images right ({share}); the model is in {out}")
    epochs = decisions.once("training", lambda: plan_training(flags, best, cfg, decisions, sizes))["epochs"]
    choice, tuned = {"correct": {name_of(0.0): right}, "share": 0.0}, scaled
    if epochs:
        cfg = best.read_training(out, head, sizes["train"], epochs)
        path = out / f"{TRAINING}.yaml"
        with replacing(path, "w", encoding="utf-8") as file:
            file.write(cfg.dump())
        train(path, flags.nproc)
        tuned = read_tuned(cfg, scaled)
    choice = decisions.once("choice", lambda: compare(cfg, scaled, tuned) if epochs else choice)
    tensors, calibration = probe, best.probe.calibration
    if epochs:
        tensors = interpolate(scaled, tuned, choice["share"])
        calibration = Calibration(**choice["calibration"])
    final = write_model(cfg, out, tensors, run.classes, {**facts, **choice}, calibration)
    write_features(out / "features.npz", *best.features)
    decisions.once("test", lambda: evaluate_weights(final))


def plan_training(
    flags: Namespace, best: Candidate, cfg: Config, decisions: Decisions, sizes: dict[str, int]
) -> dict[str, Any]:
    """Return the number of epochs that are given or fit into the minutes, and the measurements behind it.

    Of the time so far, what is stored counts, not that of this process: a stop changes no number of epochs.
    """
    if flags.probe_only or (given := best.given_epochs(-1)) >= 0:
        return {"epochs": 0 if flags.probe_only else given}
    stored_s = sum(entry.get("seconds", 0.0) for entry in decisions.content.values())
    left_s = 60 * flags.minutes - _OTHER_S - stored_s
    epoch_s, evaluation_s = (sizes[part] * best.facts["image_s"] for part in ("train", "val"))
    takes = "takes more than"  # the features, as it also trains
    share = 1 / flags.nproc if torch.cuda.is_available() else 1.0  # one process uses all cores of a CPU
    if choose_epochs(left_s, epoch_s * share, evaluation_s):
        with patch.multiple(sys.modules["__main__"], create=True, __file__=None, __spec__=None):  # no script runs again
            found, takes = in_fresh_process(measure_epoch, cfg), "takes"
        if isinstance(found, str):
            raise ConfigError(f"--minutes: out of memory in a step: {found}; fix: TRAIN.BATCH_SIZE 8, another --out")
        epoch_s = found
    epochs = choose_epochs(left_s, epoch_s * share, evaluation_s)
    fits = f"{epochs} epochs fit into {flags.minutes:g} min"
    if not epochs:
        missing_s = seconds_of(FEWEST_EPOCHS, epoch_s * share, evaluation_s) - left_s
        minutes = math.ceil(flags.minutes + missing_s / 60)
        fits = f"{FEWEST_EPOCHS} epochs, the fewest, need --minutes {minutes} or more and another --out"
    say(f"fine-tuning: an epoch {takes} {epoch_s:.0f} s; {fits}")
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
    if stopped := [signum for signum, value in STATUS_OF.items() if value == status]:
        raise RunStopped(stopped[0])
    if status:
        raise ConfigError(f"the training has failed, status {status}; fix: see above; other options need another --out")
