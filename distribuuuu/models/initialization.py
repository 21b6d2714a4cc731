"""Initial weights of other recipes, MODEL.INIT."""

from torch import nn

from distribuuuu.models.head import draw_small_weights


def initialize(model: nn.Module, keep_norms: bool = False) -> None:
    """Initialize as pycls does (models/blocks.py): N(0, 2 / fan-out) and N(0, 0.01) for linear layers, scales of 1.

    The groups of a convolution do not divide its fan-out, unlike in timm since 0.6. Biases of convolutions start as in
    torch. With `keep_norms`, norms keep their scales: timm's regnet.py before 0.6 had zeros at the ends of blocks.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) or (isinstance(layer, nn.BatchNorm2d) and not keep_norms):
            layer.reset_parameters()
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            draw_small_weights(layer)
