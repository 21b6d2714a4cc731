"""ONNX files: the preprocessing in the graph, batches and images of any size, and the check that finds mistakes."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support.saved_runs import save_run
from support.tables import slow
from torch import nn

from distribuuuu import load_run
from distribuuuu.commands.export.exporter import export_run
from distribuuuu.data.decode import DEFAULTS
from distribuuuu.data.transforms import CenterCrop
from distribuuuu.inference.loaded_run import EvalTransform

if not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
    pytest.skip("needs pip install 'distribuuuu[onnx]'", allow_module_level=True)
from distribuuuu.commands.export.onnx_file import CropClassifier, build_onnx  # noqa: E402

MEAN, STD = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)
# Photographs, strips that `crop_ends` shortens, images that are enlarged, and sizes with odd and even rooms.
SIZES = [
    *((60, 80), (80, 60), (333, 500), (500, 333), (100, 100), (20, 31), (37, 37), (54, 200), (40, 900), (9, 400)),
    *((1, 50), (256, 255), (30, 29), (41, 40), (43, 40), (45, 40), (47, 40), (64, 65), (120, 77), (701, 555)),
]


def photograph(height: int, width: int) -> torch.Tensor:
    """Return smooth colors with noise: uint8 (3, height, width)."""
    numbers = torch.Generator().manual_seed(height * 1000 + width)
    coarse = torch.rand(1, 3, height // 8 + 2, width // 8 + 2, generator=numbers) * 255
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0]
    return (smooth + 12 * torch.randn(3, height, width, generator=numbers)).clamp(0, 255).to(torch.uint8)


def onnx_predict(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)

    def predict(images):
        inputs = [{"images": image.permute(1, 2, 0)[None].numpy()} for image in images]
        return torch.from_numpy(np.concatenate([session.run(["logits"], each)[0] for each in inputs]))

    return predict


@pytest.fixture
def save(tmp_path):
    """Return save(model, preprocessing): the predictions of an ONNX file of it."""

    def save(model: nn.Module, transform: EvalTransform):
        path = tmp_path / "model.onnx"
        content = build_onnx(CropClassifier(model.eval(), transform), transform, {"label_names": ["a"]})
        assert len(content.opset_import) == 1
        path.write_bytes(content.SerializeToString())
        return onnx_predict(path)

    return save


@pytest.mark.parametrize("interpolation", ["bilinear", slow("bicubic")])
@pytest.mark.parametrize(("resize", "crop"), [slow(37, 32), slow(36, 33), slow(32, 32), slow(20, 31), slow(21, 40)])
def test_the_graph_crops_as_the_evaluation_does(save, interpolation, resize, crop):
    transform = CenterCrop(resize, crop, interpolation)
    predict = save(nn.Identity(), EvalTransform(transform, "auto", DEFAULTS, MEAN, STD))
    num_values = num_different = 0
    for size in SIZES:
        image = photograph(*size)
        scale = torch.tensor(STD).view(3, 1, 1) * 255
        gray = predict([image])[0] * scale + torch.tensor(MEAN).view(3, 1, 1) * 255
        difference = (gray - transform.crop(image).float()).abs()
        assert difference.max() < 2.01, (size, difference.max())
        num_values += difference.numel()
        num_different += int((difference > 0.01).sum())
    assert num_different < 0.03 * num_values


@pytest.mark.slow
def test_a_file_can_be_quantized_and_inferred(tmp_path, monkeypatch):
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):
        images = iter([{"images": photograph(50, 61).permute(1, 2, 0)[None].numpy()}])

        def get_next(self):
            return next(self.images, None)

    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)  # onnxruntime writes temporary files there
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    transform = EvalTransform(CenterCrop(37, 32), "auto", DEFAULTS, MEAN, STD)
    content = build_onnx(CropClassifier(model.eval(), transform), transform, {})
    paths = {name: str(tmp_path / f"{name}.onnx") for name in ("exported", "dynamic", "prepared", "static")}
    onnx.save(content, paths["exported"])
    onnx.checker.check_model(paths["exported"], full_check=True)
    quantize_dynamic(paths["exported"], paths["dynamic"])
    quant_pre_process(paths["exported"], paths["prepared"])  # symbolic inference of shapes, and onnxruntime's optimizer
    quantize_static(paths["prepared"], paths["static"], Images())
    expected, *others = (onnx_predict(path)([photograph(64, 80)]) for path in paths.values())
    for logits in others:
        np.testing.assert_allclose(logits, expected, atol=0.2)


@pytest.mark.slow
def test_a_described_file_takes_batches_of_any_number(small_cfg, tmp_path):
    import onnxruntime

    normalization = ("DATA.MEAN", list(MEAN), "DATA.STD", list(STD))
    options = ("TEST.FLIP", "True", "TEST.SHIFT", "1", "TEST.INTERPOLATION", "bicubic")
    run = load_run(save_run(small_cfg(*normalization, *options)), device="cpu")
    assert export_run(run, "onnx", tmp_path / "exported")["verified"]
    path = tmp_path / "exported" / "model.onnx"
    session = onnxruntime.InferenceSession(path)
    batch = photograph(50, 61).permute(1, 2, 0)[None].numpy() + np.arange(9, dtype=np.uint8)[:, None, None, None]
    alone = np.concatenate([session.run(["logits"], {"images": batch[index : index + 1]})[0] for index in range(9)])
    for num in (1, 8, 9):
        np.testing.assert_allclose(session.run(["logits"], {"images": batch[:num]})[0], alone[:num], atol=1e-5)
    # The file describes itself.
    (images,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["batch", "height", "width", 3])
    assert (logits.name, logits.type, logits.shape[1]) == ("logits", "tensor(float)", 3)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["label_names"]) == ["ant", "bee", "cat"] and metadata["architecture"] == "resnet8"
    assert json.loads(metadata["mean"]) == list(MEAN) and json.loads(metadata["flip"]) is True
