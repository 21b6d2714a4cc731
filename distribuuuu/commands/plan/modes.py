"""plan --modes: speed, memory and logits of a model in each mode, by forward and backward passes."""

from collections.abc import Iterator
from typing import Any

import torch

from distribuuuu.config import Config, ConfigError
from distribuuuu.config.config_node import changed
from distribuuuu.engine.fast_mode import Measured, agrees, list_modes, measure_training
from distribuuuu.engine.preflight import resolve_cfg


def measure_table(cfg: Config) -> Iterator[dict[str, Any]]:
    """Yield the row of each mode, measured in a process of its own; of one that fails, its name and the `problem`.

    Raises:
        ConfigError: the plainest mode fails.
    """
    modes, plainest = list_modes(), list[Measured]()
    cfg = resolve_cfg(changed(cfg, modes[0]))
    for options in [*modes, {**modes[-1], "MODEL.COMPILE": "default"}]:
        words = [options["TRAIN.AMP"].replace("none", "float32")]
        words += ["channels_last"] * options["MODEL.CHANNELS_LAST"] + ["compiled"] * ("MODEL.COMPILE" in options)
        try:
            (mode,) = measure_training(cfg, [options])
        except ConfigError as error:
            if not plainest:
                raise
            yield {"mode": ", ".join(words), "problem": str(error).partition("\n")[0]}
            continue
        plainest = plainest or [mode]
        difference = torch.as_tensor(mode.logits - plainest[0].logits).abs().max()
        yield {"mode": ", ".join(words), "options": options, "images_per_s": 1 / mode.seconds,
               "speedup": plainest[0].seconds / mode.seconds, "peak_mib": mode.peak / 2**20,
               "difference": float(difference), "agrees": agrees(mode, plainest[0])}  # fmt: skip


def format_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table, of at most 80 columns."""
    yield f"{'mode':<29}{'images/s':>10}{'x':>7}{'MiB':>9}{'difference of logits':>22}"
    for row in rows:
        if "problem" in row:
            yield f"{row['mode']:<29} failed: {row['problem']}"[:80]
            continue
        difference = f"{row['difference']:.2g}{'' if row['agrees'] else ', too large'}"
        speed = f"{row['images_per_s']:>10,.1f}{row['speedup']:>7.2f}{row['peak_mib']:>9,.0f}"
        yield f"{row['mode']:<29}{speed}{difference:>22}"
