"""Hyperparameters of published recipes, from their papers, model zoos and configuration files.

The files of the same name in configs/imagenet must have these values. Each entry maps options to values, and has
`reported` (top-1, and top-5 if it was published) and `params` in M.
"""

NO_DECAY = {"OPTIM.NORM_WEIGHT_DECAY": 0, "OPTIM.BIAS_WEIGHT_DECAY": 0}
BICUBIC = {"DATA.INTERPOLATION": "bicubic", "TEST.INTERPOLATION": "bicubic"}


def evaluated(resize: int, crop: int) -> dict:
    """Return the sizes of the evaluation in pixels."""
    return {"TEST.IM_SIZE": resize, "crop": crop}


# --- torchvision: ResNet-50 V1 and V2 (https://github.com/pytorch/vision, references/classification)
TORCHVISION = {
    "resnet50_torchvision_v1": {
        "reported": ("76.13",), "params": 25.557, "OPTIM.NAME": "sgd", "OPTIM.MOMENTUM": 0.9, "OPTIM.NESTEROV": False,
        "OPTIM.MAX_EPOCH": 90, "TRAIN.GLOBAL_BATCH_SIZE": 256, "OPTIM.BASE_LR": 0.1, "OPTIM.LR_POLICY": "steps",
        "OPTIM.STEPS": (30, 60), "OPTIM.LR_MULT": 0.1, "OPTIM.WARMUP_EPOCHS": 0, "OPTIM.WEIGHT_DECAY": 1e-4,
        "LOSS.LABEL_SMOOTHING": 0, "AUG.POLICY": "none", "TRAIN.IM_SIZE": 224, **evaluated(256, 224),
    },
    "resnet50_torchvision_v2": {
        "reported": ("80.858", "95.434"), "params": 25.557, "OPTIM.NAME": "sgd", "OPTIM.MOMENTUM": 0.9,
        "OPTIM.NESTEROV": False, "OPTIM.MAX_EPOCH": 600, "TRAIN.GLOBAL_BATCH_SIZE": 1024, "TRAIN.BATCH_SIZE": 128,
        "TRAIN.AMP": "none", "AUG.MIX_GROUP": 128, "EMA.EVERY_STEPS": 32, "EMA.START_EPOCH": 5, "EMA.RAMP_UP": 0,
        "OPTIM.BASE_LR": 0.5, "OPTIM.LR_POLICY": "cos_after_warmup", "OPTIM.WARMUP_EPOCHS": 5,
        "OPTIM.WARMUP_FACTOR": 0.01, "OPTIM.WEIGHT_DECAY": 2e-5, "OPTIM.NORM_WEIGHT_DECAY": 0,
        "LOSS.LABEL_SMOOTHING": 0.1, "AUG.MIXUP": 0.2,
        "AUG.CUTMIX": 1.0, "AUG.POLICY": "trivialaugment", "AUG.ERASING": 0.1, "DATA.REPEATS": 4, "TRAIN.IM_SIZE": 176,
        "TEST.INTERPOLATION": "bilinear", **evaluated(232, 224),
    },
}  # fmt: skip


# --- ResNet strikes back (Wightman et al., arXiv 2110.00476), table 2; defaults of timm's train.py of October 2021
def rsb(epochs, lr, decay, pixels, magnitude, mixup, smoothing, drop_path, repeats, reported) -> dict:
    """Return procedure A1, A2 or A3."""
    kwargs = {"MODEL.KWARGS.drop_path_rate": drop_path} if drop_path else {}
    return {
        "reported": (reported,), "params": 25.557, "OPTIM.NAME": "lamb", "TRAIN.GLOBAL_BATCH_SIZE": 2048,
        "LOSS.NAME": "bce", "LOSS.BCE_TARGET_THRESHOLD": 0.2, "OPTIM.LR_POLICY": "cos_timm", "OPTIM.WARMUP_EPOCHS": 5,
        "warmup_lr": 1e-4, "OPTIM.MAX_EPOCH": epochs, "OPTIM.BASE_LR": lr, "min_lr": 1e-6,
        "OPTIM.WEIGHT_DECAY": decay, **NO_DECAY, "TRAIN.AMP": "fp16", "AUG.MIX_GROUP": 512,
        "TRAIN.IM_SIZE": pixels, "AUG.POLICY": f"rand-m{magnitude}-n2-mstd0.5-inc1", "AUG.MIXUP": mixup,
        "AUG.CUTMIX": 1.0, "AUG.CUTMIX_SHARE": 0.5, "LOSS.LABEL_SMOOTHING": smoothing, "DATA.REPEATS": repeats,
        "DATA.INTERPOLATION": "random", "TEST.INTERPOLATION": "bicubic", **kwargs, **evaluated(235, 224),
    }  # fmt: skip


RSB = {
    "resnet50_a1": rsb(600, 5e-3, 0.01, 224, 7, 0.2, 0.1, 0.05, 3, "80.4"),
    "resnet50_a2": rsb(300, 5e-3, 0.02, 224, 7, 0.1, 0, 0.05, 3, "79.8"),
    "resnet50_a3": rsb(100, 8e-3, 0.02, 160, 6, 0.1, 0, 0, 1, "78.1"),
}


# --- DeiT (Touvron et al., arXiv 2012.12877), DeiT-III (arXiv 2204.07118), plain ViT-S/16 (Beyer et al., 2205.01580)
DEIT_SCHEDULE = {
    "OPTIM.LR_POLICY": "cos_timm", "OPTIM.LR_LAG": 1, "OPTIM.WARMUP_EPOCHS": 5, "warmup_lr": 1e-6, "min_lr": 1e-5,
}  # fmt: skip


def deit(reported: str, params: float, images_per_gpu: int) -> dict:
    """Return the recipe of a DeiT, whose script tracks an average of the weights but does not evaluate it."""
    return {
        "reported": (reported,), "params": params, "OPTIM.NAME": "adamw", "OPTIM.MAX_EPOCH": 300,
        "TRAIN.GLOBAL_BATCH_SIZE": 1024, "OPTIM.BASE_LR": 5e-4, "OPTIM.LR_SCALE": "linear", "OPTIM.LR_SCALE_BATCH": 512,
        "OPTIM.WEIGHT_DECAY": 0.05, **NO_DECAY, **DEIT_SCHEDULE, "TRAIN.AMP": "fp16", "AUG.MIX_GROUP": images_per_gpu,
        "AUG.POLICY": "rand-m9-mstd0.5-inc1", "AUG.ERASING": 0.25, "AUG.MIXUP": 0.8, "AUG.CUTMIX": 1.0,
        "LOSS.LABEL_SMOOTHING": 0.1, "MODEL.KWARGS.drop_path_rate": 0.1, "DATA.REPEATS": 3, "ema_decay": 0,
        "TRAIN.IM_SIZE": 224, **BICUBIC, **evaluated(256, 224),
    }  # fmt: skip


VIT = {
    "deit_tiny": deit("72.2", 5.717, 256),
    "deit_small": deit("79.9", 22.051, 256),
    "deit_base": deit("81.8", 86.568, 64),
    "deit3_small": {
        "reported": ("81.4",), "params": 22.059, "OPTIM.NAME": "lamb", "OPTIM.MAX_EPOCH": 800,
        "TRAIN.GLOBAL_BATCH_SIZE": 2048, "OPTIM.BASE_LR": 4e-3, "OPTIM.WEIGHT_DECAY": 0.05, **NO_DECAY,
        **DEIT_SCHEDULE, "OPTIM.EPS": 1e-8, "LOSS.NAME": "bce", "LOSS.BCE_TARGET_THRESHOLD": 0,
        "LOSS.LABEL_SMOOTHING": 0, "AUG.MIXUP": 0.8, "AUG.CUTMIX": 1.0, "AUG.MIX_GROUP": 256, "TRAIN.AMP": "fp16",
        "AUG.POLICY": "3augment", "AUG.COLOR_JITTER": (0.3,), "DATA.REPEATS": 3, "MODEL.KWARGS.drop_path_rate": 0.05,
        "TRAIN.IM_SIZE": 224, **BICUBIC, **evaluated(224, 224),
    },
    "plain_vit_small": {
        "reported": ("76.5",), "params": 22.198, "OPTIM.NAME": "adamw", "OPTIM.MAX_EPOCH": 90,
        "TRAIN.GLOBAL_BATCH_SIZE": 1024, "OPTIM.BASE_LR": 1e-3, "decoupled_decay": 1e-4, "warmup_steps": 10_000,
        "OPTIM.LR_POLICY": "cos_after_warmup", "OPTIM.LR_UPDATE": "step", "OPTIM.CLIP_NORM": 1, **NO_DECAY,
        "AUG.POLICY": "randaugment_big_vision", "AUG.MIXUP": 0.2, "AUG.MIX_BY": "step", "DATA.CROP_SCALE": (0.05, 1),
        "DATA.INTERPOLATION": "opencv_linear", "TEST.INTERPOLATION": "opencv_area",
        "DATA.CROP_RATIO": (0.75, 1.33), "DATA.MEAN": (0.5,) * 3, "DATA.STD": (0.5,) * 3, "TRAIN.IM_SIZE": 224,
        **evaluated(256, 224),
    },
}  # fmt: skip


# --- ffcv-imagenet (https://github.com/libffcv/ffcv-imagenet)
def ffcv(epochs, batch, lr, decay, params, *reported) -> dict:
    """Return a recipe of ffcv-imagenet."""
    return {
        "reported": reported, "params": params, "TRAIN.AMP": "fp16", "MODEL.CHANNELS_LAST": True,
        "LOSS.LABEL_SMOOTHING": 0.1, "TRAIN.IM_SIZE_START": 160, "TRAIN.IM_SIZE": 192, "TEST.FLIP": True, "crop": 256,
        "OPTIM.LR_POLICY": "tri", "OPTIM.WARMUP_EPOCHS": 2, "OPTIM.WARMUP_FACTOR": 1e-4, "OPTIM.MAX_EPOCH": epochs,
        "OPTIM.NO_WEIGHT_DECAY": ("*bn*",), "OPTIM.NESTEROV": False, "TRAIN.BATCH_SIZE": batch[0],
        "TRAIN.GLOBAL_BATCH_SIZE": batch[1], "OPTIM.BASE_LR": lr, "OPTIM.WEIGHT_DECAY": decay,
    }  # fmt: skip


FFCV = {
    "resnet50_ffcv_16": ffcv(16, (512, 4096), 1.7, 1e-4, 25.557, "73.8", "90.8"),
    "resnet50_ffcv_88": ffcv(88, (512, 4096), 1.7, 1e-4, 25.557, "78.4", "94.1"),
    "resnet18_ffcv_16": ffcv(16, (1024, 1024), 0.5, 5e-5, 11.690, "66.9", "86.8"),
    "resnet18_ffcv_88": ffcv(88, (1024, 1024), 0.5, 5e-5, 11.690, "72.4", "90.3"),
}


# --- the model zoo of pycls (https://github.com/facebookresearch/pycls)
def pycls(batch: int, lr: float, reported: str, params: float, decay: float = 5e-5) -> dict:
    """Return the recipe of a model of the zoo."""
    return {
        "reported": (reported,), "params": params, "OPTIM.NAME": "sgd", "OPTIM.MOMENTUM": 0.9, "OPTIM.NESTEROV": True,
        "OPTIM.MAX_EPOCH": 100, "OPTIM.LR_POLICY": "cos", "OPTIM.WARMUP_EPOCHS": 5, "OPTIM.WARMUP_FACTOR": 0.1,
        "TRAIN.GLOBAL_BATCH_SIZE": batch, "OPTIM.BASE_LR": lr, "OPTIM.WEIGHT_DECAY": decay, "AUG.POLICY": "none",
        "AUG.OPERATIONS": ("pca_noise",), "MODEL.PRECISE_BN": 8192, "DATA.EXIF_ROTATE": True,
    }  # fmt: skip


PYCLS = {
    "resnet50_pycls": pycls(256, 0.2, "76.8", 25.557),
    "resnet101_pycls": pycls(256, 0.2, "78.6", 44.549),
    "resnet152_pycls": pycls(256, 0.2, "79.1", 60.193),
    "resnext50_32x4d_pycls": pycls(256, 0.2, "78.1", 25.029),
    "resnext101_32x4d_pycls": pycls(256, 0.2, "79.3", 44.178),
    "regnetx_004_pycls": pycls(1024, 0.8, "72.6", 5.158),
    "regnetx_040_pycls": pycls(512, 0.4, "78.6", 22.118),
    "regnetx_160_pycls": pycls(512, 0.4, "80.0", 54.279),
    "regnetx_320_pycls": pycls(256, 0.2, "80.5", 107.812),
    "regnety_004_pycls": pycls(1024, 0.8, "74.1", 4.344),
    "regnety_040_pycls": pycls(512, 0.4, "79.4", 20.647),
    "regnety_160_pycls": pycls(256, 0.2, "80.4", 83.590),
    "regnety_320_pycls": pycls(256, 0.2, "80.9", 145.047),
    "efficientnet_b0_pycls": pycls(256, 0.4, "75.1", 5.289, 1e-5),
    "efficientnet_b1_pycls": pycls(256, 0.4, "75.9", 7.794, 1e-5),
    "efficientnet_b2_pycls": pycls(256, 0.4, "76.5", 9.110, 1e-5),
}

RECIPES = {**TORCHVISION, **RSB, **VIT, **FFCV, **PYCLS}
