"""ONNX files of classifiers: resize, crop, normalization and model in one graph, from uint8 images of any size.

The graph repeats `CenterCrop` or `WholeImage`, and `Normalizer`, operator by operator. Its resize differs from torch's
by at most a few gray levels: both round to uint8, but torch's weights have 16 bits.
"""

import json
import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from string import Template
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distribuuuu.commands.export.export_check import CropClassifier, zero_crops
from distribuuuu.config import ConfigError
from distribuuuu.config.derived import height_and_width
from distribuuuu.data.transforms import MAX_ASPECT, CenterCrop
from distribuuuu.inference.loaded_run import EvalTransform

if TYPE_CHECKING:
    from onnx import ModelProto

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# The first version whose Resize has antialiasing and the semantics used here in all runtimes is 19.
OPSET = 20

# Integer arithmetic on [height, width]. Sizes and offsets are those of `crop_ends`, `resized_size` and
# `crop_center`: Div truncates, and a center offset is rounded half to even.
_PREPROCESSING = Template("""
<ir_version: 8, opset_import: ["" : $opset]>
preprocessing ($type[batch, height, width, $channels] images) => ($type[batch, $channels, $rows, $columns] cropped)
<
    int64[1] zero = {0}, int64[1] two = {2}, int64[1] longest = {$max_aspect},
    int64[1] to_height = {$to_height}, int64[1] to_width = {$to_width}, int64[2] target = {$to_height, $to_width},
    int64[2] crop = {$rows, $columns}, int64[2] rows_columns = {1, 2}, int64[2] last_two = {2, 3},
    int64[2] none = {0, 0}
>
{
    size = Shape <start = 1, end = 3> (images)
    full_height = Shape <start = 1, end = 2> (images)
    full_width = Shape <start = 2, end = 3> (images)
    shorter = Min (full_height, full_width)
    limit = Mul (shorter, longest)
    over = Sub (size, limit)
    excess = Max (over, zero)
    kept_from = Div (excess, two)
    kept_to = Sub (size, kept_from)
    kept = Slice (images, kept_from, kept_to, rows_columns)
    height = Shape <start = 1, end = 2> (kept)
    width = Shape <start = 2, end = 3> (kept)
    kept_size = Concat <axis = 0> (height, width)

    scaled_by_height = Mul (kept_size, to_height)
    by_height = Div (scaled_by_height, height)
    scaled_by_width = Mul (kept_size, to_width)
    by_width = Div (scaled_by_width, width)
    $new_size
    planes = Transpose <perm = [0, 3, 1, 2]> (kept)
    outer = Shape <start = 0, end = 2> (planes)
    new_shape = Concat <axis = 0> (outer, new_size)
    resized = Resize <mode = "$mode", antialias = 1, cubic_coeff_a = -0.5, exclude_outside = 1,
                      coordinate_transformation_mode = "half_pixel"> (planes, , , new_shape)

    room = Sub (new_size, crop)
    half = Div (room, two)
    spare = Max (room, zero)
    spare_half = Div (spare, two)
    odd = Mod (spare, two)
    half_odd = Mod (spare_half, two)
    to_even = Mul (odd, half_odd)
    start = Add (half, to_even)
    outside = Neg (start)
    before = Max (outside, zero)
    stop = Add (start, crop)
    beyond = Sub (stop, new_size)
    after = Max (beyond, zero)
    padding = Concat <axis = 0> (none, before, none, after)
    padded = Pad (resized, padding)
    from = Add (start, before)
    to = Add (from, crop)
    cropped = Slice (padded, from, to, last_two)
}
""")


# The size after the resize, as `resized_size` computes it.
_NEW_SIZE = {
    "cover": "new_size = Max (by_height, by_width)",
    "squash": "new_size = Identity (target)",
    "letterbox": "within = Min (by_height, by_width)\n    new_size = Max (within, two)",
}
# An aspect ratio that no image exceeds.
_NO_LIMIT = 1 << 31


def require_onnx() -> None:
    """Check that the optional packages are installed.

    Raises:
        ConfigError: some are missing; the message has the pip line.
    """
    if missing := [name for name in PACKAGES if not find_spec(name)]:
        line = "pip install 'distribuuuu[onnx]'"
        raise ConfigError(f"--format onnx: needs {', '.join(missing)}, not installed; fix: {line}")


def build_onnx(model: nn.Module, transform: EvalTransform, metadata: Mapping[str, Any]) -> "ModelProto":
    """Return a model and its evaluation transform as an ONNX graph.

    Input: `images`, uint8 (N, height, width, 3) in RGB, of any N, height and width; of other pixels than 8 bits,
    float32 (N, height, width, channels) in the units of the files. Output: `logits`, float32
    (N, classes).

    Args:
        model: the model of normalized images in evaluation mode, on the CPU.
        transform: sizes, interpolation, mean and std.
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
    onnx.helper.set_model_props(
        merged, {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    )
    _drop_unused_initializers(merged)
    onnx.checker.check_model(merged)
    return merged


def _drop_unused_initializers(model: "ModelProto") -> None:
    """Remove the constants that no node reads, about each of which onnxruntime would warn."""
    read = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _export_classifier(model: nn.Module, transform: EvalTransform) -> "ModelProto":
    """Return the graph from crops to logits."""
    pixels = zero_crops(transform)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                CropClassifier(model, transform).eval(),
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
    before = onnx.parser.parse_model(
        _PREPROCESSING.substitute(opset=opset, mode=mode, new_size=new_size, type=kind, **sizes)
    )
    before.ir_version = classifier.ir_version
    return onnx.compose.add_prefix(before, "preprocessing/", rename_inputs=False, rename_outputs=False)
