"""ONNX files of classifiers: resize, crop, normalization and model in one graph, from uint8 images of any size.

The graph repeats `CenterCrop` or `WholeImage`, and `Normalizer`, operator by operator. Its resize differs from torch's
by at most a few gray levels: both round to uint8, but torch's weights have 16 bits.
"""

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distribuuuu.commands.export.export_check import without_amp
from distribuuuu.config import ConfigError
from distribuuuu.config.derived import height_and_width
from distribuuuu.data.transforms import MAX_ASPECT, CenterCrop
from distribuuuu.inference.loaded_run import EvalTransform, LoadedRun

if TYPE_CHECKING:
    from onnx import ModelProto

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# The first version whose Resize has antialiasing and the semantics used here in all runtimes is 19.
OPSET = 20

# A graph in ONNX's text format, see onnx.parser: integer arithmetic on [height, width]. Sizes and offsets are those of
# `crop_ends`, `resized_size` and `crop_center`: Div truncates, and a center offset is rounded half to even.
_PREPROCESSING = Path(__file__).with_name("templates") / "preprocessing.txt"
# The size after the resize, as `resized_size` computes it.
_NEW_SIZE = {
    "cover": "new_size = Max (by_height, by_width)",
    "squash": "new_size = Identity (target)",
    "letterbox": "within = Min (by_height, by_width)\n    new_size = Max (within, two)",
}
# An aspect ratio that no image exceeds.
_NO_LIMIT = 1 << 31


class CropClassifier(nn.Module):
    """Normalization, model, and what a task does with it: crops (N, C, H, W) to scores (N, classes).

    Args:
        transform: that of the evaluation, of which the crop is left out.
        predict: see `Task.predict_step`; None: the outputs of the model.
        temperature: the scores are divided by it.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, model: nn.Module, transform: EvalTransform, predict: Callable | None = None, temperature: float = 1.0
    ):
        super().__init__()
        self.model, self._predict, self._temperature = model, predict, temperature
        normalizer = transform.normalizer()
        self.register_buffer("mean", normalizer.mean)
        self.register_buffer("scale", normalizer.scale)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map crops to scores."""
        images = (pixels.float() - self.mean) * self.scale
        scores = self._predict(self.model, images) if self._predict else self.model(images)
        return scores if self._temperature == 1 else scores / self._temperature


def build_classifier(run: LoadedRun) -> CropClassifier:
    """Return the model of a run as it is evaluated, e.g. with the average of TEST.FLIP: on the CPU, in float32."""
    run = without_amp(run).build()
    model = run.model.cpu().float().eval().to(memory_format=torch.contiguous_format)
    return CropClassifier(model, run.transform, run.task.predict_step, run.temperature).eval()


def require_onnx() -> None:
    """Raise ConfigError, with the pip line, if optional packages are missing."""
    if missing := [name for name in PACKAGES if not find_spec(name)]:
        line = "pip install 'distribuuuu[onnx]'"
        raise ConfigError(f"--format onnx: needs {', '.join(missing)}, not installed; fix: {line}")


def build_onnx(model: CropClassifier, transform: EvalTransform, metadata: Mapping[str, Any]) -> "ModelProto":
    """Return a classifier of crops and its evaluation transform as an ONNX graph.

    Input: `images`, uint8 (N, height, width, 3) in RGB, of any N, height and width; of other pixels than 8 bits,
    float32 (N, height, width, channels) in the units of the files. Output: `logits`, float32
    (N, classes).

    Args:
        model: the classifier in evaluation mode, on the CPU.
        metadata: values for `metadata_props`, as JSON except strings.

    Raises:
        ConfigError: torch cannot express the model in ONNX.
    """
    import onnx

    classifier = _export_classifier(model, transform)
    before = _build_preprocessing(transform, classifier)
    merged = onnx.compose.merge_models(before, classifier, io_map=[("cropped", classifier.graph.input[0].name)])
    merged.graph.name, merged.producer_name = "classifier", "distribuuuu"
    versions = {entry.domain: entry.version for entry in merged.opset_import}
    del merged.opset_import[:]  # `merge_models` repeats equal ones, which onnxruntime's quantization refuses
    merged.opset_import.extend(onnx.helper.make_opsetid(*pair) for pair in versions.items())
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    onnx.helper.set_model_props(merged, texts)
    read = {name for node in merged.graph.node for name in node.input}
    kept = [tensor for tensor in merged.graph.initializer if tensor.name in read]  # onnxruntime warns about others
    del merged.graph.initializer[:]
    merged.graph.initializer.extend(kept)
    onnx.checker.check_model(merged)
    return merged


def _export_classifier(model: CropClassifier, transform: EvalTransform) -> "ModelProto":
    """Return the graph from crops to logits."""
    options = transform.options
    # Two, as the exporter would take a batch size of one for a constant.
    pixels = torch.zeros(2, options.channels, *height_and_width(transform.crop.size), dtype=options.dtype)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
                (pixels,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=["crops"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"--format onnx: torch cannot export it: {reason}; fix: --format safetensors") from error
    finally:
        logger.setLevel(level)
    assert program is not None  # with dynamo=True
    return program.model_proto


def _build_preprocessing(transform: EvalTransform, classifier: "ModelProto") -> "ModelProto":
    """Return the graph from `images` to `cropped`, with the versions of the classifier's file."""
    import onnx

    opset = next(entry.version for entry in classifier.opset_import if entry.domain == "")
    crop = transform.crop
    mode = {"bilinear": "linear", "bicubic": "cubic"}[crop.interpolation]
    resize_to, size = height_and_width(crop.resize_to), height_and_width(crop.size)
    sizes = dict(zip(("to_height", "to_width", "rows", "columns"), (*resize_to, *size), strict=True))
    sizes["channels"], kind = transform.options.channels, "uint8" if transform.options.dtype == torch.uint8 else "float"
    sizes |= {"max_aspect": MAX_ASPECT if isinstance(crop, CenterCrop) else _NO_LIMIT}
    new_size = _NEW_SIZE["cover" if isinstance(crop, CenterCrop) else crop.mode]
    template = Template(_PREPROCESSING.read_text(encoding="utf-8"))
    before = onnx.parser.parse_model(template.substitute(opset=opset, mode=mode, new_size=new_size, type=kind, **sizes))
    before.ir_version = classifier.ir_version
    return onnx.compose.add_prefix(before, "preprocessing/", rename_inputs=False, rename_outputs=False)
