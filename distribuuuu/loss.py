"""Losses."""

from torch import nn


def build_loss(cfg) -> nn.Module:
    """Return the criterion: (logits (N, classes), labels (N,)) to the mean loss ()."""
    return nn.CrossEntropyLoss()
