"""Export of a trained model to a folder that other programs load, checked by the code of its card."""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distribuuuu.checkpoint.manager import find_nonfinite
from distribuuuu.commands.export.export_check import check_export
from distribuuuu.commands.export.model_card import has_crop_code, render_card, render_code
from distribuuuu.commands.export.onnx_file import build_classifier, build_onnx, require_onnx
from distribuuuu.commands.scan.data_config import open_images
from distribuuuu.config import ConfigError
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.derived import height_and_width
from distribuuuu.config.options import option_of
from distribuuuu.data.crops import EvalCrop
from distribuuuu.files.atomic_file import new_folder
from distribuuuu.inference.calibration import write_calibration
from distribuuuu.inference.forward_chunks import UnlabeledImages
from distribuuuu.inference.loaded_run import CPU, LoadedRun
from distribuuuu.models.find_architecture import ModelSpec, build_model_spec, find_architecture
from distribuuuu.records.environment import describe_hardware, find_commit, list_versions
from distribuuuu.records.results import describe_evaluation, replace_nonfinite
from distribuuuu.tasks.base import Task

_SAFETENSORS = "model.safetensors"
# Name of the file with the weights, by the format.
FILES = {"timm": _SAFETENSORS, "safetensors": _SAFETENSORS, "onnx": "model.onnx"}
# Images of the check, evenly spaced over the evaluation set.
CHECK_IMAGES = 1000
_REMEDY = "fix: --format safetensors, whose card loads the model with this package"


def describe_usage(run: LoadedRun, threshold: float | None = None) -> dict[str, Any]:
    """Return what a program needs to know to use the model of a run, as values for JSON.

    `threshold` is the probability above which there is an answer; None: there always is one.
    """
    return {
        "architecture": run.cfg.MODEL.ARCH,
        "num_classes": len(run.classes),
        "label_names": list(run.classes),
        **describe_evaluation(run.cfg),
        "flip": run.cfg.TEST.FLIP,
        "exif_rotate": run.cfg.DATA.EXIF_ROTATE,
        **({} if run.transform.options.is_rgb else {"channels": run.cfg.DATA.CHANNELS, "pixels": run.cfg.DATA.PIXELS}),
        "mean": list(run.transform.mean),
        "std": list(run.transform.std),
        "weights": run.weights,
        **({"temperature": run.temperature} if run.calibration else {}),
        **({} if threshold is None else {"threshold": threshold}),
    }


def export_run(
    run: LoadedRun,
    to: str,
    out: str | os.PathLike,
    check_images: int = CHECK_IMAGES,
    files: Sequence[str] | None = None,
    precision: float | None = None,
) -> dict:
    """Write a trained model to a new folder, compare its card's code with `predict`, and return what export.json has.

    If it is not verified (see `check_export`), the file of the weights has the suffix `.unverified`.

    Args:
        run: the trained model on the CPU; it is converted to float32.
        to: one of FILES.
        out: the folder; it must not exist, or be empty.
        check_images: most images of the check; 0: all.
        files: image files of the check; empty: there is none; None: the evaluation set.
        precision: the card gives no answer below the threshold that is justified for it; None: it always gives one.

    Raises:
        ConfigError: the export failed, and nothing is left of it.
    """
    check_format(run, to)
    target, file = Path(out).expanduser(), FILES[to]
    threshold = None if precision is None else run.find_threshold(precision)
    images = _open_check_images(run) if files is None else UnlabeledImages(files)
    run.model.cpu().float().eval().to(memory_format=torch.contiguous_format)
    if name := find_nonfinite({run.weights: run.model.state_dict()}):
        raise ConfigError(f"RUN: {run.source}: {name} is not finite; fix: name another checkpoint")
    checked: dict[str, Any] = {"verified": None, "images": 0}
    try:
        with new_folder(target) as folder, torch.inference_mode():
            WRITERS[to](run, folder, describe_usage(run, threshold))
            if len(images):
                code = render_code(run, to, threshold, has_paths=True)
                checked = check_export(run, images, folder, code, check_images, threshold)
            if checked["verified"] is False:
                file = (folder / file).rename(folder / f"{file}.unverified").name
            record = {
                "format": to, "file": file, **checked, "source": Path(run.source).name, "weights": run.weights,
                "precision": "float32", "hardware": describe_hardware(CPU), "versions": list_versions(),
                "commit": find_commit(), "promised_precision": precision, "threshold": threshold,
            }  # fmt: skip
            _write_json(folder / "export.json", record)
            code = render_code(run, to, threshold)
            (folder / "README.md").write_text(render_card(run, record, code), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {target} cannot be written: {error.strerror or error}; nothing is left") from error
    return record


def check_format(run: LoadedRun, to: str) -> None:
    """Raise ConfigError if a format cannot express a run, whose model need not be built."""
    run.check_classifier()
    name, interpolation, shift = type(run.task).__name__, run.transform.crop.interpolation, run.cfg.TEST.SHIFT
    has_own_scores, state = type(run.task).predict_step is not Task.predict_step, {}
    with contextlib.suppress(AttributeError):  # of what only a training builds
        state = run.task.state_dict()
    obstacles = {
        f"TEST.INTERPOLATION {interpolation}": to != "safetensors" and interpolation not in ("bilinear", "bicubic"),
        f"the crop `{run.transform.crop}`": to == "timm" and not has_crop_code(run.transform.crop),
        f"TEST.SHIFT {shift}": to == "timm" and shift,
        f"{name}.predict_step": to == "timm" and has_own_scores,
        f"the state of {name}: {', '.join(state)}": to == "safetensors" and has_own_scores and state,
    }
    if found := [what for what, is_given in obstacles.items() if is_given]:
        remedy = "fix: --format onnx" if has_own_scores else _REMEDY
        raise ConfigError(f"--format {to}: cannot express {found[0]}; {remedy}")
    if to == "timm":
        find_timm_model(run)


def check_arguments(to: str, out: Path) -> None:
    """Raise ConfigError, before the model is built, if packages are missing or the folder is not empty."""
    if to == "onnx":
        require_onnx()
    if out.is_file() or out.suffix in (".onnx", ".safetensors"):
        raise ConfigError(f"--out: got {out}; expected a folder, which will hold {FILES[to]}, README.md, ...")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty; fix: name a new folder")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(replace_nonfinite(content), indent=2, default=str) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------- formats


def _open_check_images(run: LoadedRun) -> Any:
    try:
        return open_images(run.cfg, train=False)
    except ConfigError as error:
        fix = "set TEST.DATASET FOLDER, or check it on other images by --images FOLDER, or add --no-check"
        raise ConfigError([*error.problems, f"the check of an export needs the evaluation set; fix: {fix}"]) from error


def write_safetensors(run: LoadedRun, folder: Path, usage: dict[str, Any]) -> None:
    """Write model.safetensors, and config.json for `load_run` and for programs without this package."""
    from safetensors.torch import save

    # Copies, as safetensors does not store shared memory.
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in run.model.state_dict().items()}
    (folder / _SAFETENSORS).write_bytes(save(tensors, {"format": "pt"}))
    # Of paths, which are those of this machine, only the last part.
    options = {
        key: Path(value).absolute().name if value and option_of(key).path else value
        for key, value in iter_options(run.cfg)
    }
    options["PLUGINS"] = [os.path.basename(entry) for entry in run.cfg.PLUGINS]
    own = {"classes": list(run.classes), "config": options, "weights": run.weights, "deployed": True}
    if run.results:  # without what describes this machine
        own["results"] = {**run.results, "overrides": {}, "environment": {}}
    if run.calibration:
        write_calibration(folder, run.calibration, tensors)
    content = {"model_args": dict(run.cfg.MODEL.KWARGS), "image_size": run.cfg.TRAIN.IM_SIZE, "distribuuuu": own}
    _write_json(folder / "config.json", {**usage, **content})


def write_timm(run: LoadedRun, folder: Path, usage: dict[str, Any]) -> None:
    """Write a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`; errors as `build_timm_model`."""
    from safetensors import SafetensorError
    from timm.models import save_for_hf

    model, model_args = build_timm_model(run)
    crop, published = run.transform.crop, model.pretrained_cfg
    # `save_for_hf` takes the preprocessing from here, not from its argument `model_config`.
    model.pretrained_cfg = {
        **{key: published.get(key) for key in ("architecture", "first_conv", "classifier", "fixed_input_size")},
        "num_classes": len(run.classes),
        "input_size": (run.cfg.DATA.CHANNELS, *height_and_width(crop.size)),
        "crop_pct": crop_percentage(crop),
        "crop_mode": run.cfg.TEST.CROP,
        "pool_size": None,
        **{key: usage[key] for key in ("interpolation", "mean", "std")},
    }
    names = ("label_names", "flip", "exif_rotate", "pixels", "temperature", "threshold")
    extra = {key: usage[key] for key in names if key in usage}
    try:
        save_for_hf(model, str(folder), model_config=extra, model_args=model_args, safe_serialization=True)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if run.calibration:
        write_calibration(folder, run.calibration, model.state_dict())


def find_timm_model(run: LoadedRun) -> ModelSpec:
    """Return timm's model of the name of a run's, with its arguments if that is timm's; ConfigError: there is none."""
    import timm

    cfg, arch = run.cfg, find_architecture(run.cfg.MODEL.ARCH)
    if not timm.is_model(arch.name):
        raise ConfigError(f"--format timm: timm has no model {arch.name}; {_REMEDY}")
    if arch.source == "timm":
        return build_model_spec(cfg)
    return ModelSpec(find_architecture(f"timm/{arch.name}"), len(run.classes), {}, {}, cfg.DATA.CHANNELS)


def build_timm_model(run: LoadedRun) -> tuple[Any, dict[str, Any]]:
    """Return timm's model of the same name with the weights of a run, and the arguments that build it.

    Raises:
        ConfigError: its weights have other names or shapes, or its outputs differ.
    """
    spec = find_timm_model(run)
    name = spec.arch.name
    model = spec.build()
    try:
        model.load_state_dict(run.model.state_dict())
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(f"--format timm: timm's {name} is another model: {reason}; {_REMEDY}") from error
    images = torch.rand(2, run.cfg.DATA.CHANNELS, *height_and_width(run.transform.crop.size))
    if not torch.equal(model.eval()(images), run.model(images)):
        raise ConfigError(f"--format timm: timm's {name} computes other outputs from these weights; {_REMEDY}")
    inputs = {"in_chans": spec.channels} if spec.channels != 3 else {}
    return model, {**spec.im_size, **inputs, **spec.kwargs}


def crop_percentage(crop: EvalCrop) -> float:
    """Return the crop percentage from which timm computes the resize of a crop: floor(side / percentage)."""
    side, resized = height_and_width(crop.size)[0], height_and_width(crop.resize_to)[0]
    percentage = side / resized
    while math.floor(side / percentage) < resized:
        percentage = math.nextafter(percentage, 0)
    return percentage


def write_onnx(run: LoadedRun, folder: Path, usage: dict[str, Any]) -> None:
    """Write model.onnx."""
    model = build_onnx(build_classifier(run), run.transform, usage)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


WRITERS = {"timm": write_timm, "safetensors": write_safetensors, "onnx": write_onnx}
