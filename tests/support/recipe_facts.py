"""Facts of published recipes, from their papers, model zoos and code, which the configs of the same name must have.

A fact is an option or a measure of support/recipe_measures.py; a mapping is compared by its keys. `reported`: top-1,
and top-5 if it was published, which the header of the file states; `params` in M; `lr`: the learning rate at the 12
steps of `positions`, computed by the code of the source; `decay`: weight decay, and which parameters are exempt.
"""

import math

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from distribuuuu.data.crops import PaddedCrop
from distribuuuu.data.transforms import ResizedCrop

IMAGENET_STATISTICS = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
PLAIN = {
    "LOSS.NAME": "cross_entropy", "LOSS.LABEL_SMOOTHING": 0, "AUG.MIXUP": 0, "AUG.CUTMIX": 0, "AUG.ERASING": 0,
    "AUG.POLICY": "none", "AUG.COLOR_JITTER": (), "AUG.OPERATIONS": (), "average": None, "OPTIM.CLIP_NORM": 0,
    "MODEL.SYNCBN": False, "DATA.REPEATS": 1, "DATA.EXIF_ROTATE": False, "statistics": IMAGENET_STATISTICS,
}  # fmt: skip


def crop(side: int, interpolation: str = "bilinear", scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)) -> ResizedCrop:
    """Return torchvision's RandomResizedCrop and a flip of every second image."""
    return ResizedCrop(side, scale, 0.5, ratio, interpolation)


def sgd(lr: float, nesterov: bool) -> dict:
    """Return the settings of torch's SGD in all of these recipes."""
    return {"OPTIM.NAME": "sgd", "optimizer": {"lr": lr, "momentum": 0.9, "dampening": 0, "nesterov": nesterov}}


# Which parameters have no weight decay.
def no_parameter(name, parameter):
    return False


def vectors(name, parameter):
    return parameter.ndim == 1 or name.endswith(".bias") or name in ("pos_embed", "cls_token")


def norms_of_torchvision(name, parameter):
    return "bn" in name or "downsample.1" in name


def names_with_bn(name, parameter):  # `'bn' in k`, which the norms of the shortcuts, downsample.1, do not match
    return "bn" in name


# Config name: arch, parameters in M, global batch, base LR, weight decay, GPUs, and the reported top-1 and top-5.
BASELINES = {
    "resnet18": ("resnet18", "11.690", 256, 0.2, 5e-5, 8, "70.902", "89.894"),
    "resnet18_bs1024": ("resnet18", "11.690", 1024, 0.8, 5e-5, 8, "70.994", "89.892"),
    "resnet18_bs8192": ("resnet18", "11.690", 8192, 6.4, 5e-5, 64, "70.165", "89.374"),
    "resnet18_bs16384": ("resnet18", "11.690", 16384, 12.8, 5e-5, 64, "68.766", "88.381"),
    "efficientnet_b0": ("efficientnet_b0", "5.289", 512, 0.4, 1e-5, 8, "74.540", "91.744"),
    "resnet50": ("resnet50", "25.557", 256, 0.2, 5e-5, 8, "77.252", "93.430"),
    "botnet50": ("botnet50", "20.859", 256, 0.2, 5e-5, 8, "77.604", "93.682"),
    "regnetx_160": ("regnetx_160", "54.279", 512, 0.4, 5e-5, 8, "79.992", "95.118"),
    "regnety_160": ("regnety_160", "83.590", 512, 0.4, 5e-5, 8, "80.598", "95.090"),
    "regnety_320": ("regnety_320", "145.047", 512, 0.4, 5e-5, 8, "80.824", "95.276"),
}


# --- The 2021 distribuuuu (commit eaaa922): 0.1 per 128 images, cosine by epoch after 5 epochs from a tenth
EPOCH_COSINE = (0.1, 0.1, 0.1, 0.2799309185, 0.2799309185, 0.99384417, 0.99384417, 0.991143625, 0.75452071, 0.5,
                0.259123163, 0.000246719818)  # fmt: skip
ORIGINAL = {
    name: {
        **PLAIN, "reported": (top1, top5), "params": float(num_m), "MODEL.ARCH": arch, "global batch": batch,
        "images per GPU": {gpus: batch // gpus}, "OPTIM.MAX_EPOCH": 100, **sgd(lr, nesterov=True),
        "lr": [0.1 * batch / 128 * factor for factor in EPOCH_COSINE], "decay": (decay, no_parameter),
        "crop": crop(224), "is only cropped": True, "evaluation": (256, 224, "bilinear", False),
        "MODEL.INIT": "fan_out_own_norms" if arch.startswith("regnet") else "own",
    }
    for name, (arch, num_m, batch, lr, decay, gpus, top1, top5) in BASELINES.items()
}  # fmt: skip


# --- torchvision: ResNet-50 V1 and V2 (https://github.com/pytorch/vision, references/classification). train.py at
# 017e9b99b5da, transforms.py at 02a0a90b7ad1, presets.py at 080836e5824e, sampler.py at 775e76043cb8; the command of V2
# is in issue 3995, comment 1013906621; the rates are those of torch's StepLR, LinearLR and CosineAnnealingLR. The
# average is updated every 32 steps, and its share is multiplied by (images of 32 steps) / epochs.
V2_SHARE = (1 - 0.99998) * 1024 * 32 / 600
TORCHVISION_RESNET50 = {"params": 25.557, "TRAIN.AMP": "none"}
TORCHVISION = {
    "resnet50_torchvision_v1": {
        **PLAIN, **TORCHVISION_RESNET50, "reported": ("76.13",), "OPTIM.MAX_EPOCH": 90, "global batch": 256,
        "images per GPU": {8: 32}, **sgd(0.1, nesterov=False), "lr": [0.1] * 8 + [0.01] * 2 + [0.001] * 2,
        # DistributedSampler and DataLoader make a last, partial batch of 143 other images and a copy.
        "steps": 5004, "decay": (1e-4, no_parameter), "crop": crop(224), "is only cropped": True,
        "evaluation": (256, 224, "bilinear", False),
    },
    "resnet50_torchvision_v2": {
        **PLAIN, **TORCHVISION_RESNET50, "reported": ("80.858", "95.434"), "OPTIM.MAX_EPOCH": 600, "global batch": 1024,
        "images per GPU": {1: 128, 8: 128}, "AUG.MIX_GROUP": 128, **sgd(0.5, nesterov=False), "steps": 1251,
        "lr": [0.005, 0.005, 0.005, 0.104, 0.104, 0.5, 0.5, 0.499996515, 0.378790947, 0.253299896, 0.126910067,
               3.48477561e-06],
        "decay": (2e-5, norms_of_torchvision), "average": (1 - V2_SHARE, 32, 5),
        "EMA.HALF_LIFE": round(32 * 1024 * math.log(2) / -math.log(1 - V2_SHARE), -3), "EMA.RAMP_UP": 0,
        "LOSS.LABEL_SMOOTHING": 0.1, "AUG.MIXUP": 0.2, "AUG.CUTMIX": 1.0, "AUG.MIX_PROB": 1, "AUG.CUTMIX_SHARE": 0.5,
        "AUG.POLICY": "trivialaugment", "AUG.ERASING": 0.1, "AUG.ERASING_MODE": "const", "DATA.REPEATS": 4,
        "crop": crop(176), "evaluation": (232, 224, "bilinear", False),
    },
}  # fmt: skip


# --- ResNet strikes back (Wightman et al., arXiv 2110.00476), table 2, and timm of its date, commit 66253790 of October
# 19, 2021: defaults of train.py, scheduler/cosine_lr.py (--warmup-lr 1e-4, --min-lr 1e-6), data/mixup.py (--mixup-mode
# batch: one draw per GPU, of four), optim/lamb.py; --bce-target-thresh 0.2 is that of the commands in public use, e.g.
# in README.md of Alibaba-MIIL/ML_Decoder (12a67d98). LAMB clips by itself.
RAND_AUGMENT = [
    *("AutoContrast", "Equalize", "Invert", "Rotate", "PosterizeIncreasing", "SolarizeIncreasing", "SolarizeAdd"),
    *("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing", "ShearX", "ShearY"),
    *("TranslateXRel", "TranslateYRel"),
]


def rand_augment(magnitude: int) -> list[tuple]:
    """Return the operations of rand-m{magnitude}-mstd0.5-inc1."""
    return [(name, 0.5, magnitude, 0.5) for name in RAND_AUGMENT]


def rsb(epochs, decay, side, magnitude, mixup, smoothing, drop_path, repeats, reported, lr) -> dict:
    """Return procedure A1, A2 or A3."""
    lamb = {"betas": (0.9, 0.999), "eps": 1e-6, "max_grad_norm": 1.0, "trust_clip": False, "decoupled_decay": False,
            "always_adapt": False}  # fmt: skip
    return {
        **PLAIN, "reported": (reported,), "params": 25.557, "OPTIM.NAME": "lamb", "global batch": 2048, "steps": 625,
        "OPTIM.MAX_EPOCH": epochs, "optimizer": lamb, "lr": lr, "decay": (decay, vectors), "TRAIN.AMP": "fp16",
        "LOSS.NAME": "bce", "LOSS.BCE_TARGET_THRESHOLD": 0.2,
        "LOSS.LABEL_SMOOTHING": smoothing, "AUG.MIXUP": mixup, "AUG.CUTMIX": 1.0, "AUG.MIX_PROB": 1,
        "AUG.CUTMIX_SHARE": 0.5, "AUG.MIX_GROUP": 512, "AUG.POLICY": f"rand-m{magnitude}-n2-mstd0.5-inc1",
        "policy": rand_augment(magnitude), "DATA.REPEATS": repeats, "crop": crop(side, "random"),
        "evaluation": (235, 224, "bicubic", False), "drop path": [drop_path * block / 15 for block in range(16)],
    }  # fmt: skip


RSB = {
    "resnet50_a1": rsb(600, 0.01, 224, 7, 0.2, 0.1, 0.05, 3, "80.4", [
        1e-4, 1e-4, 1e-4, 1.08e-3, 1.08e-3, 4.99914348e-3, 4.99914348e-3, 4.99876665e-3, 3.75025e-3, 2.5005e-3,
        1.25075e-3, 1.03426253e-6]),
    "resnet50_a2": rsb(300, 0.02, 224, 7, 0.1, 0, 0.05, 3, "79.8", [
        1e-4, 1e-4, 1e-4, 1.08e-3, 1.08e-3, 4.99657452e-3, 4.99657452e-3, 4.99506781e-3, 3.75025e-3, 2.5005e-3,
        1.25075e-3, 1.13704917e-6]),
    "resnet50_a3": rsb(100, 0.02, 160, 6, 0.1, 0, 0, 1, "78.1", [
        1e-4, 1e-4, 1e-4, 1.68e-3, 1.68e-3, 7.95075952e-3, 7.95075952e-3, 7.92915786e-3, 6.03641114e-3, 4.0005e-3,
        2.07372618e-3, 2.97351182e-6]),
}  # fmt: skip


# --- DeiT (Touvron et al., arXiv 2012.12877) and DeiT-III (arXiv 2204.07118): facebookresearch/deit, commit 7e160fe4
# (main.py, engine.py, models_v2.py, augment.py, and the commands of README_deit.md and README_revenge.md), and timm
# 0.3.2, commit 6504a428, whose cosine_lr.py, called as in main.py (step(epoch) after the epoch, --warmup-lr 1e-6,
# --min-lr 1e-5), gave the rates: of 5e-4 x 1024 / 512 for DeiT, and of 4e-3, not scaled, for DeiT-III.
def vit(reported, params, width, heads, per_gpu) -> dict:
    """Return what DeiT and DeiT-III have in common; their average is saved, but not evaluated."""
    return {
        **PLAIN, "reported": (reported,), "params": params, "decay": (0.05, vectors), "TRAIN.AMP": "fp16",
        "optimizer": {"betas": (0.9, 0.999), "eps": 1e-8}, "vit": (12, width, heads, 197, 0), "norms": {(1e-6, None)},
        "AUG.MIXUP": 0.8, "AUG.CUTMIX": 1.0, "AUG.MIX_PROB": 1, "AUG.CUTMIX_SHARE": 0.5, "AUG.MIX_GROUP": per_gpu,
        "DATA.REPEATS": 3, "crop": crop(224, "bicubic"),
    }  # fmt: skip


def deit(*sizes) -> dict:
    """Return the recipe of a DeiT."""
    return {
        **vit(*sizes), "OPTIM.NAME": "adamw", "OPTIM.MAX_EPOCH": 300, "global batch": 1024, "steps": 1251,
        "lr": [1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 8.002e-4, 8.002e-4, 9.9932162e-4, 7.56975501e-4, 5.10183533e-4,
               2.62002642e-4, 1.01085617e-5],
        "LOSS.LABEL_SMOOTHING": 0.1, "AUG.POLICY": "rand-m9-mstd0.5-inc1", "policy": rand_augment(9),
        "AUG.ERASING": 0.25, "AUG.ERASING_MODE": "pixel", "drop path": [0.1 * block / 11 for block in range(12)],
        "evaluation": (256, 224, "bicubic", False),
    }  # fmt: skip


DEIT = {
    "deit_tiny": deit("72.2", 5.717, 192, 3, 256),
    "deit_small": deit("79.9", 22.051, 384, 6, 256),
    "deit_base": deit("81.8", 86.568, 768, 12, 64),
    "deit3_small": {
        # apex's FusedLAMB clips at 1, and adapts only what decays.
        **vit("81.4", 22.059, 384, 6, 256), "OPTIM.NAME": "lamb", "OPTIM.MAX_EPOCH": 800, "global batch": 2048,
        "steps": 625, "optimizer": {"betas": (0.9, 0.999), "eps": 1e-8, "max_grad_norm": 1.0, "always_adapt": False,
                                    "trust_clip": False},
        "lr": [1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 3.2002e-3, 3.2002e-3, 3.99961544e-3, 3.01378646e-3, 2.01283433e-3,
               1.01655996e-3, 1.00615305e-5],
        "LOSS.NAME": "bce", "LOSS.BCE_TARGET_THRESHOLD": 0, "AUG.POLICY": "3augment", "AUG.COLOR_JITTER": (0.3,),
        "policy": [("Solarize", 1.0, 5, 0.0), ("Desaturate", 1.0, 10, 0.0), ("GaussianBlurRand", 1.0, 10, 0.0)],
        "drop path": [0.05] * 12, "vit": (12, 384, 6, 196, 24), "evaluation": (224, 224, "bicubic", False),
    },
}  # fmt: skip


# --- Plain ViT-S/16 (Beyer et al., 2205.01580): google-research/big_vision at 0127fb6b337e: configs/vit_s16_i1k.py,
# models/vit.py, optax.py (1e-4 on .*/kernel$, scaled by the schedule but not by the rate of 1e-3), pp/ops_image.py;
# utils.py, create_learning_rate_schedule: cosine after 10,000 steps. Head: a hidden layer (rep_size True).
PLAIN_VIT = {
    "plain_vit_small": {
        **PLAIN, "reported": ("76.5",), "params": 22.198, "parameters": 22_049_896 + 384 * 384 + 384,
        "OPTIM.NAME": "adamw", "optimizer": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}, "OPTIM.MAX_EPOCH": 90,
        "global batch": 1024, "steps": 1251, "OPTIM.LR_UPDATE": "step", "OPTIM.CLIP_NORM": 1, "TRAIN.AMP": "bf16",
        "lr": [0, 1e-07, 0.000125, 0.0001251, 0.0001668, 0.0008757, 0.0009382, 0.000999999985, 0.0008325845,
               0.000576258208, 0.000286730825, 2.34438913e-13],
        "decay": (1e-4 / 1e-3, vectors), "drop path": [0] * 12, "norms": {(1e-6, None)},
        "AUG.OPERATIONS": ("randaugment_big_vision",), "AUG.MIXUP": 0.2, "AUG.MIX_BY": "step", "AUG.MIX_PROB": 1,
        "crop": crop(224, "opencv_linear", (0.05, 1), (0.75, 1.33)), "evaluation": (256, 224, "opencv_area", False),
        "statistics": ((0.5,) * 3, (0.5,) * 3),  # value_range(-1, 1)
    },
}  # fmt: skip


# --- ffcv-imagenet (https://github.com/libffcv/ffcv-imagenet), commit 4dd291a: train_imagenet.py, rn18_configs/*.yaml,
# rn50_configs/*.yaml, README.md; the rates are those of get_cyclic_lr, interpolated over the steps of an epoch as in
# train_loop. Resolution 160 to 192 by start_ramp and end_ramp. get_center_crop takes 224 / 256 of the shorter side.
def ffcv(epochs, batch, gpus, first_large, lr, decay, params, max_side, reported, rates) -> dict:
    """Return a recipe of ffcv-imagenet; `first_large`: epoch from which the side is 192."""
    return {
        **PLAIN, "reported": reported, "params": params, "TRAIN.AMP": "fp16", "MODEL.CHANNELS_LAST": True,
        "LOSS.LABEL_SMOOTHING": 0.1, "OPTIM.MAX_EPOCH": epochs, "global batch": batch * gpus,
        "TRAIN.BATCH_SIZE": batch, "images per GPU": {gpus: batch},
        **sgd(lr, nesterov=False), "lr": rates, "decay": (decay, names_with_bn),
        "sides": [160] * first_large + [192] * (epochs - first_large), "crop": crop(192, "opencv_area"),
        "is only cropped": True, "evaluation": (292, 256, "opencv_area", True), "max side of the pack": max_side,
    }  # fmt: skip


FFCV = {
    "resnet18_ffcv_16": ffcv(16, 1024, 1, 12, 0.5, 5e-5, 11.690, 400, ("66.9", "86.8"), [
        5e-05, 0.000249820144, 0.24982518, 0.250025, 0.33335, 0.5, 0.482157131, 0.464285714, 0.392828594, 0.285714286,
        0.196442846, 2.85485897e-05]),
    "resnet18_ffcv_88": ffcv(88, 1024, 1, 71, 0.5, 5e-5, 11.690, 400, ("72.4", "90.3"), [
        5e-05, 0.000249820144, 0.24982518, 0.250025, 0.33335, 0.5, 0.497095347, 0.494186047, 0.343018608, 0.255813953,
        0.171513952, 4.64744483e-06]),
    "resnet50_ffcv_16": ffcv(16, 512, 8, 12, 1.7, 1e-4, 25.557, 500, ("73.8", "90.8"), [
        0.00017, 0.00289408654, 0.847360913, 0.850085, 1.13339, 1.7, 1.63928571, 1.57857143, 1.33532509, 0.971428571,
        0.667857143, 0.000389194139]),
    "resnet50_ffcv_88": ffcv(88, 512, 8, 71, 1.7, 1e-4, 25.557, 500, ("78.4", "94.1"), [
        0.00017, 0.00289408654, 0.847360913, 0.850085, 1.13339, 1.7, 1.69011628, 1.68023256, 1.16621571, 0.869767442,
        0.583139535, 6.33571855e-05]),
}  # fmt: skip


# --- The model zoo of pycls (https://github.com/facebookresearch/pycls), commit 5719de6: configs/dds_baselines/*.yaml,
# MODEL_ZOO.md, dev/model_complexity.json (parameters), core/optimizer.py (rates), core/net.py (precise
# statistics over 8192 images), datasets/imagenet.py (cv2.imread applies the EXIF orientation), models/blocks.py
# (init_weights: sqrt(2 / (kernel area x output channels)), linear layers 0.01; BN.ZERO_INIT_FINAL_GAMMA False).
def pycls(reported, parameters, lr, batch, decay=5e-5, side=224, test_side=256) -> dict:
    """Return the recipe of a model of the zoo."""
    return {
        **PLAIN, "reported": (reported,), "params": round(parameters / 1e6, 3), "parameters": parameters,
        "global batch": batch, "images per GPU": {8: batch // 8},
        "OPTIM.MAX_EPOCH": 100, **sgd(lr, nesterov=True), "lr": [lr * factor for factor in EPOCH_COSINE],
        "decay": (decay, no_parameter), "MODEL.INIT": "fan_out", "MODEL.PRECISE_BN": 8192, "DATA.EXIF_ROTATE": True,
        "AUG.OPERATIONS": ("pca_noise",), "crop": crop(side, "opencv_linear"), "norms": {(1e-5, 0.1)},
        "evaluation": (test_side, side, "opencv_linear", False),
    }  # fmt: skip


PYCLS = {
    "resnet50_pycls": pycls("76.8", 25557032, 0.2, 256),
    "resnet101_pycls": pycls("78.6", 44549160, 0.2, 256),
    "resnet152_pycls": pycls("79.1", 60192808, 0.2, 256),
    "resnext50_32x4d_pycls": pycls("78.1", 25028904, 0.2, 256),
    "resnext101_32x4d_pycls": pycls("79.3", 44177704, 0.2, 256),
    "regnetx_004_pycls": pycls("72.6", 5157512, 0.8, 1024),
    "regnetx_040_pycls": pycls("78.6", 22118248, 0.4, 512),
    "regnetx_160_pycls": pycls("80.0", 54278536, 0.4, 512),
    "regnetx_320_pycls": pycls("80.5", 107811560, 0.2, 256),
    "regnety_004_pycls": pycls("74.1", 4344144, 0.8, 1024),
    "regnety_040_pycls": pycls("79.4", 20646656, 0.4, 512),
    "regnety_160_pycls": pycls("80.4", 83590140, 0.2, 256),
    "regnety_320_pycls": pycls("80.9", 145046770, 0.2, 256),
    "efficientnet_b0_pycls": pycls("75.1", 5288548, 0.4, 256, 1e-5),
    "efficientnet_b1_pycls": pycls("75.9", 7794184, 0.4, 256, 1e-5, 240, 274),
    "efficientnet_b2_pycls": pycls("76.5", 9109994, 0.4, 256, 1e-5, 260, 298),
}
RECIPES = {**TORCHVISION, **RSB, **DEIT, **PLAIN_VIT, **FFCV, **PYCLS}


# --- The CIFAR-10 ResNets of He et al. (https://arxiv.org/abs/1512.03385, version 1, section 4.2 and table 6): 0.1,
# divided by 10 at 32k and 48k of 64k steps; the deepest one starts at 0.01. Two GPUs.
def cifar(parameters: int, error: float, warmup: float = 0.1) -> dict:
    """Return the recipe of a model; `error` in percent."""
    return {
        **PLAIN, "reported": (f"top-1 {100 - error:.2f} (error {error}",), "parameters": parameters, "steps": 390,
        "global batch": 128, "images per GPU": {1: 64, 2: 64}, "OPTIM.MAX_EPOCH": 64_000 // 390, **sgd(0.1, False),
        "lr of steps": {0: warmup, 1: warmup, 389: warmup, 500: 0.1, 1000: 0.1, 10_000: 0.1, 31_900: 0.1, 32_000: 0.01,
                        40_000: 0.01, 47_900: 0.01, 48_000: 0.001, 63_900: 0.001},
        "decay": (1e-4, no_parameter), "crop": PaddedCrop(32, 4, 0.5), "is only cropped": True,
        "evaluation": (32, 32, "bilinear", False), "statistics": ((0.4914, 0.4822, 0.4465), (1, 1, 1)),
    }  # fmt: skip


CIFAR = {  # 0.27, 0.46, 0.66, 0.85 and 1.7 M as printed
    "resnet20": cifar(269_722, 8.75), "resnet32": cifar(464_154, 7.51), "resnet44": cifar(658_586, 7.17),
    "resnet56": cifar(853_018, 6.97), "resnet110": cifar(1_727_962, 6.43, warmup=0.01),
}  # fmt: skip

# Facts by the name of the config.
FACTS = (
    {f"imagenet2021/{name}": facts for name, facts in ORIGINAL.items()}
    | {f"imagenet/{name}": facts for name, facts in RECIPES.items()}
    | {f"cifar10/{name}": facts for name, facts in CIFAR.items()}
)
