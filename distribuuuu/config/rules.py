"""What each option allows: its choices, its range, whether it may be unset."""

from distribuuuu.config.registry import DATASETS, LOSSES, METRICS, SCHEDULES, TASKS

# Keys that may be unset (null), and their type when they are set.
NULLABLE = {"MODEL.WEIGHTS": str, "RNG_SEED": int}
# Sections whose keys are not ours to know: the model checks them. Of the second kind all values are numbers.
NUMBER_SECTIONS = ("FINETUNE.LR_MULT",)
OPEN_SECTIONS = ("MODEL.KWARGS", "DISTILL.KWARGS", "TASK.KWARGS", *NUMBER_SECTIONS)
# Keys that hold a list of texts; all other lists are of numbers.
TEXT_LISTS = ("FINETUNE.FREEZE", "TRAIN.METRICS", "TEST.METRICS")

CHOICES = {
    "AUG.ERASING_MODE": ("const", "pixel"),
    "AUG.MIX_BY": ("pair", "step"),
    "DATA.CROP": ("auto", "resized", "pad"),
    "DATA.DECODER": ("auto", "torchvision", "pil", "simplejpeg"),
    "DATA.INTERPOLATION": ("bilinear", "bicubic"),
    "DATA.LOADER": ("host", "device"),
    "DATA.ON_BAD_IMAGE": ("raise", "skip"),
    "DATA.SAMPLING": ("uniform", "balanced", "sqrt"),
    "DATA.WORKER_KIND": ("process", "thread"),
    "DISTILL.KIND": ("soft", "hard"),
    "EMA.BUFFERS": ("average", "copy"),
    "MODEL.COMPILE": ("none", "default", "reduce-overhead", "max-autotune"),
    "TRAIN.AMP": ("none", "bf16", "fp16"),
    "TRAIN.MATMUL_PRECISION": ("highest", "high", "medium"),
    "DIST.BACKEND": ("auto", "nccl", "gloo"),
    "DIST.COMPRESS": ("none", "bf16", "fp16"),
    "DIST.SHARD": ("none", "zero1", "fsdp"),
    "LOSS.BCE_REDUCTION": ("mean", "sum"),
    "TEST.INTERPOLATION": ("bilinear", "bicubic"),
    "OPTIM.LR_SCALE": ("none", "linear", "sqrt"),
    "OPTIM.LR_UPDATE": ("epoch", "step"),
    "TRAIN.ON_NAN": ("stop", "rollback"),
}

# Keys whose value is a name in a registry, or, for METRICS, a list of such names.
REGISTERED = {"DATA.NAME": DATASETS, "OPTIM.LR_POLICY": SCHEDULES, "LOSS.NAME": LOSSES, "TASK.NAME": TASKS}
REGISTERED_LISTS = {"TRAIN.METRICS": METRICS, "TEST.METRICS": METRICS}

# Least and greatest value; None: no bound.
RANGES = {
    "AUG.ERASING": (0, 1),
    "AUG.MIXUP": (0, None),
    "AUG.CUTMIX": (0, None),
    "AUG.MIX_PROB": (0, 1),
    "AUG.CUTMIX_SHARE": (0, 1),
    "MODEL.NUM_CLASSES": (0, None),
    "MODEL.PRECISE_BN": (0, None),
    "DISTILL.ALPHA": (0, 1),
    "DISTILL.TEMPERATURE": (0.001, None),
    "EMA.HALF_LIFE": (0, None),
    "EMA.RAMP_UP": (0, 1),
    "TRAIN.BATCH_SIZE": (1, None),
    "TRAIN.GLOBAL_BATCH_SIZE": (0, None),
    # torch's resize with antialias fails at random where the result is a single pixel.
    "TRAIN.IM_SIZE": (2, None),
    "TRAIN.IM_SIZE_START": (0, None),
    "TRAIN.IM_SIZE_MULTIPLE": (1, None),
    "TRAIN.WORKERS": (-1, None),
    "TRAIN.PRINT_FREQ": (1, None),
    "TRAIN.TOPK": (1, None),
    "TEST.BATCH_SIZE": (1, None),
    "TEST.IM_SIZE": (2, None),
    "TEST.CROP_SIZE": (0, None),
    "TEST.PRINT_FREQ": (1, None),
    "DATA.CROP_PADDING": (0, None),
    "DATA.FLIP": (0, 1),
    "DATA.MAX_PIXELS": (1, None),
    "DATA.REPEATS": (1, None),
    "LOSS.LABEL_SMOOTHING": (0, 1),
    "LOSS.BCE_TARGET_THRESHOLD": (0, 1),
    "LOSS.FOCAL_GAMMA": (0, None),
    "OPTIM.MAX_EPOCH": (0, None),
    "OPTIM.BASE_LR": (0, None),
    "OPTIM.LR_SCALE_BATCH": (1, None),
    "OPTIM.EPS": (0, None),
    "OPTIM.MIN_LR": (0, 1),
    "OPTIM.LR_MULT": (0, None),
    "OPTIM.MOMENTUM": (0, 1),
    "OPTIM.DAMPENING": (0, 1),
    "OPTIM.WARMUP_FACTOR": (0, 1),
    "OPTIM.WARMUP_EPOCHS": (0, None),
    "OPTIM.WEIGHT_DECAY": (0, None),
    "OPTIM.NORM_WEIGHT_DECAY": (-1, None),
    "OPTIM.BIAS_WEIGHT_DECAY": (-1, None),
    "OPTIM.LAYER_DECAY": (0.001, 1),
    "OPTIM.CLIP_NORM": (0, None),
    "CHECKPOINT.EVERY_STEPS": (0, None),
    "CHECKPOINT.KEEP_LAST": (1, None),
    "CHECKPOINT.KEEP_EVERY": (0, None),
    "LOG.NUM_IMAGES": (0, None),
    "CHECKPOINT.MAX_HOURS": (0, None),
    "TRAIN.MAX_ROLLBACKS": (0, None),
    "DIST.TIMEOUT_S": (1, None),
    "DIST.STARTUP_TIMEOUT_S": (1, None),
    "DIST.BUCKET_MB": (0.001, None),
    "RNG_SEED": (0, 2**63 - 1),
}
