"""Models by name.

- build.py: `build_model`, MODEL.ARCH to a model; `check_model`, the same checks without memory or downloads.
- find_architecture.py: MODEL.ARCH to a constructor of this package, timm or torchvision, and its arguments.
- input_channels.py: other channels than RGB.
- head.py: the layers whose shapes depend on the number of classes (FINETUNE.HEAD_RESET).
- pretrained.py: published weights of timm and torchvision (MODEL.PRETRAINED).
- finetune.py: weights trained on other data (FINETUNE.WEIGHTS).
- freeze.py, lora.py: frozen parameters and batch norms (FINETUNE.FREEZE), low-rank adapters (FINETUNE.LORA).
- cifar_resnet.py, torchvision_nets.py: a family per file; others stand beside the recipes in configs/.

To add a model, add one file with a function of `num_classes`, decorated with `@MODELS.register`. MODEL.KWARGS may set
its other parameters; a parameter `im_size` receives TRAIN.IM_SIZE, and `in_channels` DATA.CHANNELS.
"""

from distribuuuu.models.build import build_model, check_model, count_parameters

__all__ = ["build_model", "check_model", "count_parameters"]
