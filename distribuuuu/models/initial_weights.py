"""The model at the start of a run."""

from collections.abc import Sequence

from torch import nn

from distribuuuu.distributed import comm as dist
from distribuuuu.models.build import build_model


def build_initial_model(cfg, classes: Sequence[str], pretrained: bool) -> nn.Module:
    """Return the model at the start of a run, on the CPU.

    Args:
        cfg: the config.
        classes: the class names of the data.
        pretrained: load the weights of MODEL.PRETRAINED or FINETUNE.WEIGHTS; else initialize randomly.

    Raises:
        ConfigError: the model cannot be built, or the weights cannot be loaded.
    """
    if pretrained and cfg.FINETUNE.WEIGHTS:
        from distribuuuu.models.finetune import build_finetuned

        return build_finetuned(cfg, classes)
    published = pretrained and cfg.MODEL.PRETRAINED
    return dist.local_main_first(lambda: build_model(cfg, True)) if published else build_model(cfg, False)
