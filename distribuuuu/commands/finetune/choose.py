"""Choice among the probe, the fine-tuned model and interpolations of both, by the validation images."""

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distribuuuu.checkpoint.io import load_state_dict, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.checkpoint.weights_files import EMA, merge_adapters, tensors_key
from distribuuuu.config import Config
from distribuuuu.config.config_node import changed
from distribuuuu.engine.evaluator import evaluate, open_evaluation
from distribuuuu.inference.calibration import fit_calibration
from distribuuuu.tasks.metrics import rank_classes

Tensors = dict[str, Tensor]
# Shares of the fine-tuned weights (WiSE-FT, arXiv 2109.01903). Of equally good candidates, the first is taken: the
# probe needs no training, and the interpolations are chosen by the same few images.
SHARES = (0.0, 1.0, 0.75, 0.5, 0.25)


def name_of(share: float) -> str:
    """Return the name of a candidate by its share of the fine-tuned weights."""
    return {0.0: "probe", 1.0: "fine-tuned"}.get(share, f"{share:.0%} fine-tuned")


def interpolate(probe: Tensors, tuned: Tensors, share: float) -> Tensors:
    """Return the weights between those of the probe (share 0) and the fine-tuned ones (share 1)."""
    if share in (0, 1):
        return tuned if share else probe
    return {
        name: torch.lerp(tensor, tuned[name], share) if tensor.is_floating_point() else tuned[name]
        for name, tensor in probe.items()
    }


def read_tuned(cfg: Config, probe: Tensors) -> Tensors:
    """Return the last weights of the training, or of their moving average if the user asked for one.

    With a rate that falls to 0, they are the best ones; the best epoch on few images would be a matter of chance.
    """
    path = CheckpointManager(cfg.OUT_DIR).find_latest()
    assert path, cfg.OUT_DIR  # the training is finished
    content = read_checkpoint(path, to_resume=True)  # with FINETUNE.LORA without the frozen weights
    return merge_adapters({**probe, **(content.get(tensors_key(EMA)) or content["state_dict"])})


def compare(cfg: Config, probe: Tensors, tuned: Tensors) -> dict[str, Any]:
    """Return the right answers, the loss at its temperature of each candidate, the share, and its calibration."""
    correct, losses, calibrations = dict[str, int](), dict[str, Tensor](), dict[float, dict[str, Any]]()
    outputs = list[tuple[Tensor, Tensor]]()
    with open_evaluation(changed(cfg, {"DATA.WORKER_KIND": "thread"})) as (task, model, loader):
        for share in SHARES:
            load_state_dict(model, interpolate(probe, tuned, share), name_of(share))
            outputs.clear()
            evaluate(task, model, loader, lambda _, one: outputs.append((one.logits.float().cpu(), one.targets.cpu())))
            logits, labels = (torch.cat(parts) for parts in zip(*outputs, strict=True))
            correct[name_of(share)] = int(rank_classes(logits, cfg.TRAIN.TOPK)[:, 0].eq(labels).sum())
            calibration = fit_calibration(logits, labels, loader.images.digest)
            calibrations[share] = asdict(calibration)
            losses[name_of(share)] = F.cross_entropy(logits / calibration.temperature, labels, reduction="none")
    best, means = choose_share(correct, losses), {name: float(own.mean()) for name, own in losses.items()}
    return {"correct": correct, "losses": means, "share": best, "calibration": calibrations[best]}


def choose_share(correct: dict[str, int], losses: dict[str, Tensor]) -> float:
    """Return the share with the lowest mean of the losses of images, (N,): right answers depend more on chance.

    The probe is kept if that one has not more right answers, and its loss is lower by one standard error of the
    difference at most (the rule of Breiman et al., "Classification and Regression Trees", 1984).
    """
    best = min(SHARES, key=lambda share: float(losses[name_of(share)].mean()))
    gain, is_righter = losses["probe"] - losses[name_of(best)], correct[name_of(best)] > correct["probe"]
    return best if is_righter or gain.mean() > gain.std() / len(gain) ** 0.5 else 0.0
