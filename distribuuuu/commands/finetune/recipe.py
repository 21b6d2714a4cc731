"""Recipe of a fine-tuning: options by the kind of the backbone, the number of images, and the minutes that are left.

Sources: AutoGluon's MultiModalPredictor (AdamW 1e-4, layer decay 0.9, cosine, 20 epochs, TrivialAugment); MAE (arXiv
2111.06377) and DINOv2 (arXiv 2304.07193): layer decay 0.65 to 0.75 for transformers; BiT (arXiv 1912.11370): no mixup
for few images; LP-FT (arXiv 2202.10054): start from the head of the probe, with a low rate. The statistics of batch
norm are kept, as those of 32 images are noisy. For few images, lower layers are frozen, as in surgical fine-tuning
(arXiv 2210.11466), which also saves much of the time on a CPU. With batch norm, the rate and the share of frozen layers
are those of a comparison with EfficientNet-Lite0, see docs/photographs.md. With LoRA, the rate is ten times that of all
weights of a transformer (Schulman et al., "LoRA Without Regret", 2025), and all layers have the same.
"""

import math
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distribuuuu.config import Config
from distribuuuu.data.batch_plan import plan_of
from distribuuuu.engine.run import begin_epoch
from distribuuuu.engine.trial_run import trial_run
from distribuuuu.launch.detect import Launch
from distribuuuu.optim.name_patterns import is_match
from distribuuuu.trainer import take_step

# The longest and the shortest training, and the number of images from which no layer is frozen.
MAX_EPOCHS, FEWEST_EPOCHS, MANY_IMAGES = 20, 2, 5000
# Seconds of the measurement of training steps, and how much longer they take in a whole training on a CPU.
_MEASURE_S, MARGIN = 6.0, 1.15
BATCH, WARMUP_STEPS, LORA_LR = 32, 12, 5e-4


class Kind(NamedTuple):
    """Options that depend on the kind of the backbone; rates are for AdamW and 32 images.

    Of few images, the share `frozen` of the layers is not trained.
    """

    name: str
    lr: float
    layer_decay: float
    frozen: float


KINDS = (
    Kind("transformer", 5e-5, 0.75, 1 / 3),
    Kind("convolutional with batch norm", 1e-3, 0.9, 2 / 3),
    Kind("convolutional with layer norm", 5e-5, 0.9, 1 / 3),
)


def find_kind(model: nn.Module) -> Kind:
    """Return the kind of a backbone by its layers."""
    if any(isinstance(layer, _NormBase) for layer in model.modules()):
        return KINDS[1]
    return KINDS[0 if hasattr(model, "pos_embed") or hasattr(model, "cls_token") else 2]


def build_recipe(model: nn.Module, num_images: int, epochs: int, has_lora: bool = False) -> dict[str, Any]:
    """Return the options of a fine-tuning for a number of training images and of epochs, 0: not known yet."""
    kind, epochs = find_kind(model), epochs or MAX_EPOCHS
    frozen = list(_lower_layers(model, kind.frozen)) if num_images < MANY_IMAGES else []
    norms = [name for name, layer in model.named_modules() if isinstance(layer, _NormBase)]
    frozen += [name for name in norms if not any(is_match(name, lower) for lower in frozen)]
    has_decay = hasattr(model, "group_matcher") and not has_lora
    batch = 1 << (min(BATCH, num_images).bit_length() - 1)  # any usual number of processes divides it
    return {
        "TRAIN.GLOBAL_BATCH_SIZE": batch,
        "TRAIN.BATCH_SIZE": batch,
        "DATA.CROP": "resized",
        "DATA.CROP_SCALE": [0.35, 1.0],
        "AUG.POLICY": "trivialaugment",
        "LOSS.LABEL_SMOOTHING": 0.1,
        "FINETUNE.FREEZE": [] if has_lora else frozen,
        "OPTIM.NAME": "adamw",
        "OPTIM.BASE_LR": LORA_LR if has_lora else kind.lr,
        "OPTIM.LAYER_DECAY": kind.layer_decay if has_decay else 1.0,
        "OPTIM.WEIGHT_DECAY": 0.05,
        "OPTIM.NORM_WEIGHT_DECAY": 0.0,
        "OPTIM.BIAS_WEIGHT_DECAY": 0.0,
        "OPTIM.LR_POLICY": "cos",
        "OPTIM.LR_UPDATE": "step",
        "OPTIM.WARMUP_EPOCHS": min(epochs / 2, max(0.5, WARMUP_STEPS * batch / num_images)),
        "OPTIM.MAX_EPOCH": epochs,
    }


def _lower_layers(model: Any, share: float) -> Iterator[str]:
    """Yield the names of the share of the layers of a model of timm that is lowest; none of another."""
    if not hasattr(model, "group_matcher"):
        return
    from timm.models import group_parameters

    layers = group_parameters(model, model.group_matcher(coarse=False))
    for number in sorted(layers)[: int(share * len(layers))]:
        owners = [name.rpartition(".")[0] or name for name in layers[number]]
        common = os.path.commonprefix([owner.split(".") for owner in owners])
        yield from [".".join(common)] if common else dict.fromkeys(owners)


def measure_epoch(folder: str, cfg: Config) -> float:
    """Return the seconds of an epoch of a training, measured in a few steps of a trial run in a temporary folder."""
    with trial_run(cfg, Launch("plan"), plan_of(cfg, 1), folder) as run:
        loader, state, seconds = run.train_loader, run.state, list[float]()
        begin_epoch(run)
        batches, steps = loader.batches_from(state.seed, 0, 0), loader.steps_of(0)
        for step in range(steps):
            started = time.perf_counter()
            take_step(run, batches, step)
            seconds.append(time.perf_counter() - started)
            if sum(seconds[1:]) > _MEASURE_S and step > 2:
                break
        return steps * statistics.median(seconds[1:] or seconds)


def choose_epochs(left_s: float, epoch_s: float, evaluation_s: float) -> int:
    """Return the number of epochs that fit into the seconds that are left, at most MAX_EPOCHS; 0: not FEWEST_EPOCHS."""
    epochs = math.floor((left_s - seconds_of(0, epoch_s, evaluation_s)) / (MARGIN * (epoch_s + evaluation_s)))
    return 0 if epochs < FEWEST_EPOCHS else min(MAX_EPOCHS, epochs)


def seconds_of(epochs: int, epoch_s: float, evaluation_s: float) -> float:
    """Return the seconds of a training, an evaluation after each epoch, the comparison of candidates and the test."""
    return MARGIN * (epochs * (epoch_s + evaluation_s) + 7 * evaluation_s)
