"""ResNets, ResNeXts, wide ResNets and DenseNets of torchvision, so that state dicts match.

He et al., arXiv 1512.03385; Xie et al., arXiv 1611.05431; Zagoruyko and Komodakis, arXiv 1605.07146; Huang et al.,
arXiv 1608.06993. Registered here, they take precedence over timm models of the same names.
"""

from torchvision.models import get_model_builder

from distribuuuu.config.registry import MODELS

NAMES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d"),
    *("wide_resnet50_2", "wide_resnet101_2"),
    *("densenet121", "densenet161", "densenet169", "densenet201"),
)

for _name in NAMES:
    MODELS.register(_name)(get_model_builder(_name))
