#!/usr/bin/env python3
"""Compare `finetune` with other ways to fine-tune: same weights, images, cores and minutes.

    python benchmarks/finetune.py --data data/clothing10 data/grocery --minutes 2 10 --seeds 0 1 2 --out ../finetune.json

| method | |
|---|---|
| ours | `distribuuuu finetune LISTS --minutes M` |
| sklearn | scikit-learn's logistic regression, C 1, on standardized features of the backbone; it needs no validation images and is fitted to them too |
| timm | the defaults of timm's train.py: SGD at 0.1 per 256 images, momentum 0.9, batches of 128, crops of 8 to 100 %, color jitter 0.4, label smoothing 0.1, warm-up 5 %, cosine; the epoch that is best on the validation images |
| autogluon's recipe | the settings of AutoGluon's MultiModalPredictor: AdamW at 1e-4, layer decay 0.9, TrivialAugment of center crops, batches of 128, warm-up 10 %, at most 20 epochs; a greedy soup of the three best epochs |
| fastai | `vision_learner(...).fine_tune(epochs)`, where fastai is installed |
| autogluon | its package, where it is installed and finds the weights |

Each set is divided once for each seed, as `finetune` does; all methods get the same lists of training, validation and test
images. Methods without a time limit get the number of epochs that fits, by the time of their first steps. They run in
processes of their own, one after the other, and take turns: all methods of a seed, then the next seed. Results are kept in
the file of --out, outside of the checkout, and the table beside it, as .md; the same command continues after any stop.
"""  # noqa: E501

import argparse
import contextlib
import copy
import csv
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from bench_support.machine import describe_run
from PIL import Image, ImageOps
from torch import Tensor, nn

from distribuuuu.checkpoint.published_files import DEFAULT
from distribuuuu.commands.finetune.archives import unpack
from distribuuuu.commands.finetune.data import PARTS, divide, list_sources
from distribuuuu.commands.scan.splitting import write_split
from distribuuuu.files.atomic_file import replacing
from distribuuuu.launch.host import count_cores
from distribuuuu.models.finetune import load_backbone
from distribuuuu.models.pretrained import read_backbone, resolve_backbone

# Seconds that a method may take beyond its minutes, and steps whose time decides about the number of epochs.
GRACE_S, TIMED_STEPS = 900, 4
Rows = list[tuple[str, str]]


@dataclass
class Job:
    """The arguments of a method.

    Attributes:
        lists: the folder of train.csv, val.csv and test.csv.
        started: when the process was started, as `time.time()`.
    """

    lists: Path
    minutes: float
    seed: int
    backbone: str
    started: float

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return 60 * self.minutes - (time.time() - self.started)

    def read(self, part: str) -> Rows:
        """Return the path and the class of each image of a part."""
        with open(self.lists / f"{part}.csv", newline="", encoding="utf-8") as file:
            return [(os.path.join(self.lists, row["path"]), row["label"]) for row in csv.DictReader(file)]

    def build_model(self, num_classes: int) -> nn.Module:
        """Return the model of timm with the weights of the backbone and a new head; with 0 classes without one."""
        found = resolve_backbone(self.backbone)
        model = timm.create_model(found.arch.removeprefix("timm/"), num_classes=num_classes or 1)
        load_backbone(model, read_backbone(found, 1000)["state_dict"], [model.pretrained_cfg["classifier"]], True)
        if not num_classes:
            model.reset_classifier(0)
        return model


# ------------------------------------------------------------------------------------------------------- methods


def run_ours(job: Job) -> float:
    """Return the test accuracy of the command."""
    with tempfile.TemporaryDirectory() as out:
        words = ["--minutes", str(job.minutes), "--seed", str(job.seed), "--backbone", job.backbone, "--out", out]
        command = [sys.executable, "-m", "distribuuuu", "finetune", str(job.lists), *words]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads(Path(out, "finetune.json").read_text())["test"]["top1"]


def run_sklearn(job: Job) -> float:
    """Return the test accuracy of logistic regression."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model, (known, tested) = job.build_model(0).eval(), (job.read("train") + job.read("val"), job.read("test"))
    features = []
    for rows in (known, tested):
        images = load_batches(rows, build_transform(model, False), 64)
        features.append(torch.cat([forward(model, batch) for batch, _ in images]).numpy())
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(features[0], [label for _, label in known])
    return 100 * float(classifier.score(features[1], [label for _, label in tested]))


@dataclass
class Recipe:
    """Settings of a loop with components of timm; without `augmentation`, TrivialAugment of center crops."""

    optimizer: dict[str, Any]
    augmentation: dict[str, Any]
    smoothing: float
    warmup: float
    max_epochs: int
    average: int
    batch: int = 128


TIMM = Recipe({"opt": "sgd", "momentum": 0.9, "weight_decay": 2e-5}, {"color_jitter": 0.4, "scale": (0.08, 1)},
              0.1, 0.05, 300, 1)  # fmt: skip
AUTOGLUON = Recipe({"opt": "adamw", "lr": 1e-4, "weight_decay": 1e-3, "layer_decay": 0.9}, {}, 0.0, 0.1, 20, 3)


def run_recipe(job: Job, recipe: Recipe) -> float:
    """Return the test accuracy of a training with components of timm."""
    from timm.optim import create_optimizer_v2
    from torchvision.transforms import TrivialAugmentWide

    train, val, test = map(job.read, PARTS)
    classes = sorted({label for _, label in train})
    model = job.build_model(len(classes))
    augment, evaluation = (build_transform(model, bool(kind), **kind) for kind in (recipe.augmentation, {}))
    if not recipe.augmentation:
        augment.transforms.insert(2, TrivialAugmentWide())
    batch = min(recipe.batch, len(train))
    loss_of = nn.CrossEntropyLoss(label_smoothing=recipe.smoothing)

    def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return create_optimizer_v2(model, **{"lr": 0.1 * batch / 256, **recipe.optimizer})

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: list[str]) -> None:
        optimizer.zero_grad()
        loss_of(model(images), torch.tensor([classes.index(label) for label in labels])).backward()
        optimizer.step()

    trial = copy.deepcopy(model).train()
    optimizer = build_optimizer(trial)
    batches = load_batches(train * TIMED_STEPS, augment, batch, shuffled=True)
    step_s = time_steps(batches, lambda images, labels: step(trial, optimizer, images, labels))
    steps = max(1, len(train) // batch)
    evaluation_s = step_s / 3 * len(val) / batch
    epochs = int((job.left_s - 3 * evaluation_s) / (steps * step_s + evaluation_s))
    epochs, optimizer, best = max(1, min(recipe.max_epochs, epochs)), build_optimizer(model), []
    rates, number, total = [group["lr"] for group in optimizer.param_groups], 0, steps * epochs
    for _ in range(epochs):
        model.train()
        for images, labels in list_batches(load_batches(train, augment, batch, shuffled=True), steps):
            done = (number + 0.5) / total
            factor = min(1.0, done / recipe.warmup) * (1 + np.cos(np.pi * done)) / 2
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            step(model, optimizer, images, labels)
            number += 1
        best.append((measure(model, val, classes, evaluation), copy.deepcopy(model.state_dict())))
        best = sorted(best, key=lambda entry: -entry[0])[: recipe.average]
    chosen = [best[0][1]]
    for _, tensors in best[1:]:
        load_mean(model, [*chosen, tensors])
        if measure(model, val, classes, evaluation) >= best[0][0]:
            chosen.append(tensors)
    load_mean(model, chosen)
    return measure(model, test, classes, evaluation)


def load_mean(model: nn.Module, weights: list[dict[str, Tensor]]) -> None:
    """Load the mean of several weights."""
    mean = {name: sum(one[name].double() for one in weights) / len(weights) for name in weights[0]}
    model.load_state_dict({name: tensor.to(weights[0][name].dtype) for name, tensor in mean.items()})


def run_fastai(job: Job) -> float:
    """Return the test accuracy of fastai's `fine_tune`."""
    import pandas as pd
    from fastai.vision.all import ImageDataLoaders, Normalize, Resize, aug_transforms, vision_learner

    rows = [(path, label, part == "val") for part in ("train", "val") for path, label in job.read(part)]
    frame = pd.DataFrame(rows, columns=["path", "label", "is_valid"])
    config = job.build_model(0).pretrained_cfg
    size, num_train = config["input_size"][-1], int((~frame.is_valid).sum())
    transforms = [*aug_transforms(size=size), Normalize.from_stats(config["mean"], config["std"], cuda=False)]
    loaders = ImageDataLoaders.from_df(
        frame, path="/", valid_col="is_valid", item_tfms=Resize(2 * size), batch_tfms=transforms,
        bs=min(64, num_train), num_workers=count_cores(), seed=job.seed,
    )  # fmt: skip
    arch = resolve_backbone(job.backbone).arch.removeprefix("timm/")
    learner = vision_learner(loaders, arch, pretrained=False, normalize=False)
    learner.model[0].model.load_state_dict(job.build_model(0).state_dict(), strict=False)
    trial = copy.deepcopy(learner.model)

    def step(images: Tensor, labels: Tensor) -> None:
        learner.loss_func(trial(images), labels).backward()

    step_s = time_steps(iter(loaders.train), step)
    epoch_s = step_s * max(1, len(loaders.train)) + step_s / 3 * len(loaders.valid)
    learner.freeze()
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(max(1, int(0.9 * job.left_s / epoch_s) - 1))  # one more epoch trains the head alone
    tested = pd.DataFrame([(path, label, False) for path, label in job.read("test")], columns=frame.columns)
    answers, targets = learner.get_preds(dl=loaders.test_dl(tested, with_labels=True))
    return 100 * float(answers.argmax(1).eq(targets).float().mean())


def run_autogluon(job: Job) -> float:
    """Return the test accuracy of AutoGluon's predictor."""
    import pandas as pd
    from autogluon.multimodal import MultiModalPredictor

    arch = resolve_backbone(job.backbone).arch.removeprefix("timm/")
    frames = {part: pd.DataFrame(job.read(part), columns=["image", "label"]) for part in PARTS}
    options = {"model.names": ["timm_image"], "model.timm_image.checkpoint_name": arch}
    with tempfile.TemporaryDirectory() as folder:
        predictor = MultiModalPredictor(label="label", path=f"{folder}/model")
        predictor.fit(frames["train"], tuning_data=frames["val"], hyperparameters=options, seed=job.seed,
                      time_limit=job.left_s)  # fmt: skip
        return 100 * float(predictor.evaluate(frames["test"], metrics=["acc"])["acc"])


METHODS: dict[str, tuple[str, Callable[[Job], float]]] = {  # with the package that it needs
    "ours": ("distribuuuu", run_ours),
    "sklearn": ("sklearn", run_sklearn),
    "timm": ("timm", lambda job: run_recipe(job, TIMM)),
    "autogluon's recipe": ("timm", lambda job: run_recipe(job, AUTOGLUON)),
    "fastai": ("fastai", run_fastai),
    "autogluon": ("autogluon", run_autogluon),
}


# ------------------------------------------------------------------------------------------------- images, steps


def build_transform(model: nn.Module, is_training: bool, **options: Any) -> Any:
    """Return timm's transform for the backbone."""
    config = timm.data.resolve_data_config({}, model=model)
    config.pop("crop_mode", None)
    return timm.data.create_transform(**config, is_training=is_training, **options)


class Images(torch.utils.data.Dataset):
    """Transformed images, turned upright, with their classes."""

    def __init__(self, rows: Rows, transform: Any):
        self.rows, self.transform = rows, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        path, label = self.rows[index]
        with Image.open(path) as image:
            return self.transform(ImageOps.exif_transpose(image).convert("RGB")), label


def load_batches(rows: Rows, transform: Any, size: int, shuffled: bool = False) -> Iterator[tuple[Tensor, list[str]]]:
    """Return an iterator over batches, which worker processes load."""
    return iter(torch.utils.data.DataLoader(Images(rows, transform), size, shuffled, num_workers=count_cores()))


def list_batches(batches: Iterator, most: int) -> Iterator:
    """Yield at most so many batches: the last one of an epoch may be a single image."""
    yield from (batch for _, batch in zip(range(most), batches, strict=False))


@torch.inference_mode()
def forward(model: nn.Module, images: Tensor) -> Tensor:
    """Return the output of a model."""
    return model(images)


def measure(model: nn.Module, rows: Rows, classes: list[str], transform: Any) -> float:
    """Return the accuracy of a model in percent."""
    model.eval()
    right = 0
    for images, labels in load_batches(rows, transform, 64):
        answers = forward(model, images).argmax(1).tolist()
        right += sum(classes[answer] == label for answer, label in zip(answers, labels, strict=True))
    return 100 * right / len(rows)


def time_steps(batches: Iterator, step: Callable[..., Any]) -> float:
    """Return the seconds of a step with its images, without the first one."""
    seconds = []
    for number in range(TIMED_STEPS):
        started = time.perf_counter()
        try:
            step(*next(batches))
        except StopIteration:
            break
        if number or not seconds:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:] or seconds)


# ------------------------------------------------------------------------------------------------------- results


def make_lists(source: Path, out: Path, seed: int) -> Path:
    """Return the folder with the lists of a set for a seed; they are written once."""
    folder = out.with_suffix("") / f"{source.name}_{seed}"
    if not (folder / "test.csv").exists():
        images, parts = list_sources(unpack(source, out.with_suffix("")), ())
        parts, *_ = divide(images, parts, "", seed, count_cores(), lambda number: None)
        write_split(images, folder, {f"{part}.csv": parts[part] for part in PARTS})
    return folder


def run_method(method: str, lists: Path, minutes: float, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the accuracy and the seconds of a method in a process of its own, or why there are none."""
    if find_spec(METHODS[method][0]) is None:
        return {"skipped": f"{METHODS[method][0]} is not installed"}
    words = ["--method", method, "--lists", str(lists), "--minutes", str(minutes), "--seeds", str(seed)]
    command, started = [sys.executable, __file__, *words, "--backbone", args.backbone], time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=60 * minutes + GRACE_S)
        return {"top1": json.loads(said.splitlines()[-1])["top1"], "seconds": time.time() - started}
    except (subprocess.TimeoutExpired, LookupError, ValueError) as error:
        return {"skipped": f"it failed, see standard error: {type(error).__name__}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started


def format_table(results: dict[str, dict[str, Any]]) -> str:
    """Return the median and the range of the accuracies and the median of the seconds, by set, minutes and method."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for key, result in results.items():
        *group, _ = key.split(" | ")
        groups.setdefault(tuple(group), []).append(result)
    lines = ["| set | minutes | method | top-1 in %: median (range) | seconds | n |", "|---|---|---|---|---|---|"]
    for group, found in groups.items():
        rates, seconds = ([result[key] for result in found if key in result] for key in ("top1", "seconds"))
        cells = [found[0].get("skipped", ""), "", "0"]
        if rates:
            median, low, high = statistics.median(rates), min(rates), max(rates)
            cells = [f"{median:.1f} ({low:.1f} to {high:.1f})", f"{statistics.median(seconds):.0f}", str(len(rates))]
        lines.append(f"| {' | '.join([*group, *cells])} |")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="folders, tables or archives of images")
    parser.add_argument("--minutes", type=float, nargs="+", default=[2.0, 10.0, 30.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--backbone", default=DEFAULT)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "finetune.json", help="results")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--lists", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run what is not in the file of results yet, and print the table; or run one method of a process."""
    started, args = time.time(), parse_args()
    if args.method:
        (seed,) = args.seeds
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        job = Job(args.lists, args.minutes[0], seed, args.backbone, started)
        print(json.dumps({"top1": METHODS[args.method][1](job)}))
        return
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    machine, todo = describe_run(), itertools.product(args.seeds, args.data, args.minutes, args.methods)
    for seed, source, minutes, method in todo:
        key = f"{source.name} | {minutes:g} | {method} | {seed}"
        if "top1" not in results.get(key, {}):  # what has failed is repeated
            results[key] = run_method(method, make_lists(source, args.out, seed), minutes, args, seed)
            print(key, results[key], file=sys.stderr, flush=True)
        for path, text in ((args.out, json.dumps(results, indent=1)), (args.out.with_suffix(".md"), "")):
            with replacing(path, "w") as file:
                file.write(text or f"{machine}\n\n{format_table(results)}\n")
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
