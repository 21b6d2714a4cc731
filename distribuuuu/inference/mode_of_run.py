"""The fastest mode of the forward passes of a trained model on this machine, see engine/fast_mode.py."""

from dataclasses import replace
from typing import Any

import torch

from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.config.config_node import changed
from distribuuuu.config.derived import height_and_width
from distribuuuu.engine.fast_mode import choose_mode, list_modes, measure_modes, recall, with_mode
from distribuuuu.inference.loaded_run import LoadedRun

_NUM_IMAGES = 16


def find_fast_mode(run: LoadedRun) -> dict[str, Any]:
    """Return the fastest mode of those that the config of a run leaves open, see `choose_mode`."""
    modes = list_modes(run.cfg)
    plain = replace(run, cfg=changed(run.cfg, {**modes[0]}))

    size = _NUM_IMAGES, run.cfg.DATA.CHANNELS, *height_and_width(plain.transform.crop.size)
    images = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(plain.device)
    weights = hash_tensors(run.state_dict) if run.state_dict else run.source
    what = f"passes of {_NUM_IMAGES} images with {weights}"
    mode = recall(run.cfg, what, lambda: choose_mode(measure_modes(plain.model, images, modes)))
    (now,) = measure_modes(plain.model, images, [{key: mode[key] for key in modes[0]}])
    return {**mode, "image_s": now.seconds}  # the load of the machine varies; the fastest mode hardly does


def resolve_run_mode(run: LoadedRun) -> LoadedRun:
    """Return a run with values for TRAIN.AMP and MODEL.CHANNELS_LAST auto."""
    return replace(run, cfg=with_mode(run.cfg, find_fast_mode(run)))
