"""Learning-rate schedules other than `cos` and `steps`, loaded when OPTIM.LR_POLICY names one: see schedules.py."""

from distribuuuu.config.registry import SCHEDULES
from distribuuuu.optim.schedules import cos_factor


@SCHEDULES.register("cos_timm")
def cos_timm_factor(epoch: float, *, max_epoch: int, min_lr: float, peak: float) -> float:
    """Return 1 until the epoch `peak`, then the cosine of that epoch: in timm the warm-up replaces the cosine."""
    return cos_factor(epoch, max_epoch=max_epoch, min_lr=min_lr) if epoch >= peak else 1.0


@SCHEDULES.register("cos_after_warmup")
def cos_after_warmup_factor(epoch: float, *, max_epoch: int, min_lr: float, peak: float) -> float:
    """Return 1 until the epoch `peak`, then half a cosine to `min_lr`, as in torchvision's training and big_vision."""
    return cos_factor(max(0.0, epoch - peak), max_epoch=max_epoch - peak or 1, min_lr=min_lr)


@SCHEDULES.register("lin")
def lin_factor(epoch: float, *, max_epoch: int, min_lr: float) -> float:
    """Return a linear decay from 1 to `min_lr`."""
    return (1.0 - min_lr) * (1.0 - epoch / max_epoch) + min_lr


@SCHEDULES.register("tri")
def tri_factor(epoch: float, *, max_epoch: int, min_lr: float, peak: float) -> float:
    """Return 1 until the epoch `peak`, then a linear decay to `min_lr`; a triangle with the warm-up.

    Used by ffcv-imagenet (Leclerc et al., arXiv 2306.12517) and by short trainings (Smith, arXiv 1708.07120).
    """
    return 1.0 - (1.0 - min_lr) * max(0.0, epoch - peak) / (max_epoch - peak or 1)
