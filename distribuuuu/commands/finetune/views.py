"""Views of the images whose features are computed: the fast mode of this machine, the size, and mirrored copies."""

import contextlib
from dataclasses import replace
from typing import Any

import torch

from distribuuuu.config.config_node import changed
from distribuuuu.distributed.sharding import inference
from distribuuuu.engine.fast_mode import AUTO_MODE
from distribuuuu.inference.load_run import find_fast_mode
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.models.find_architecture import build_model_spec

# The larger size by that of the training, and at most by that of the images; share of the time for features.
_LARGER, _ENLARGED, _FEATURES_SHARE = 1.29, 2.0, 0.6
# The time to load and compute an image over that of its forward pass.
_LOADING = 1.25


def choose_views(
    run: LoadedRun, own: list[str], own_side: int, num_train: int, num: int, minutes: float
) -> dict[str, Any]:
    """Return the views that the minutes allow for `num` images: `options`, `mirrored`, `seconds` of all features.

    Larger images and mirrored training images both cost time. A network that was trained with random crops sees objects
    larger in training than in a center crop, so it is better at a larger size (FixRes, arXiv 1906.06423), unless the
    images are so small that they become blurred: those of 100 pixels were worse at 288 pixels, those of 160 better.

    Args:
        run: the backbone.
        own: the options of the user, whose sizes and modes stay.
        own_side: the median of the shorter sides of the images.
        num_train, num: training images, which may be mirrored, and all images.
        minutes: the time for all of the fine-tuning.
    """
    open_mode = {key: value for key, value in AUTO_MODE.items() if key not in own}
    mode = find_fast_mode(replace(run, cfg=changed(run.cfg, open_mode)))
    side, resized = run.cfg.TRAIN.IM_SIZE, run.cfg.TEST.IM_SIZE
    is_given = run.cfg.TEST.CROP_SIZE or any(key.startswith(("TEST.IM_SIZE", "TEST.CROP")) for key in own)
    sizes, scale = dict[str, int](), 1.0
    if not is_given and isinstance(side, int) and isinstance(resized, int):
        larger = round(_LARGER * side / 32) * 32
        if side < larger <= _ENLARGED * own_side and not build_model_spec(run.cfg).im_size and accepts(run, larger):
            sizes, scale = {"TEST.IM_SIZE": round(resized * larger / side), "TEST.CROP_SIZE": larger}, larger / side
            sizes["TRAIN.IM_SIZE"] = larger  # the head is fitted to objects of this size
    choices: list[tuple[dict[str, int], float, bool]] = [
        (sizes, scale**2, True), (sizes, scale**2, False), ({}, 1.0, True), ({}, 1.0, False)]  # fmt: skip
    seconds = [factor * mode["image_s"] * (num + mirrored * num_train) for _, factor, mirrored in choices]
    most_s = _FEATURES_SHARE * 60 * minutes
    place = next((place for place, needed in enumerate(seconds) if needed <= most_s), -1)
    sizes, factor, mirrored = choices[place]
    options = {key: mode[key] for key in open_mode} | sizes
    return {"options": options, "mirrored": mirrored, "speedup": mode["speedup"], "image_s": factor * mode["image_s"],
            "seconds": _LOADING * seconds[place]}  # fmt: skip


def accepts(run: LoadedRun, side: int) -> bool:
    """Tell whether a model takes square images of another size; those with position embeddings often do not."""
    with contextlib.suppress(AssertionError, RuntimeError, ValueError), inference(run.model):  # as its code says it
        run.model(torch.zeros(1, run.cfg.DATA.CHANNELS, side, side, device=run.device))
        return True
    return False
