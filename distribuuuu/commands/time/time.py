"""The command time: measure the parts of a training step."""

from distribuuuu.commands.arguments import run_on_config
from distribuuuu.config import Config

SUMMARY = "measure the parts of a step and name the bottleneck"
SYNONYMS = ("bench", "benchmark")
_DESCRIPTION = """Measure the model, the loader and both together for about a minute, and name
the bottleneck and its remedies. It reads and writes no checkpoint; the
measurements are written to OUT_DIR/timing.json.

  %(prog)s --cfg imagenet/resnet50
"""


def time(prog: str, args: list[str]) -> int:
    """Check the model, then measure it; return the exit status."""
    return run_on_config(prog, args, _DESCRIPTION, _start, train=True)


def _start(cfg: Config) -> None:
    from distribuuuu.commands.time.measurement import time_model
    from distribuuuu.engine.auto_batch_size import resolve_batch_size
    from distribuuuu.models import check_model
    from distribuuuu.trainer import take_step

    check_model(cfg)
    time_model(resolve_batch_size(cfg, take_step))
