"""The table of options: of each its meaning, unit and allowed values, its default and its properties.

A plain default declares an option of any value; `Option` (declaration.py) adds a range, words and properties. From this
table come the config tree, the checks of values, `--help-config` and docs/options.md.
"""

from distribuuuu.config.declaration import AUTO, Option, Section, iter_declared
from distribuuuu.config.registry import AUGMENTATIONS, DATASETS, LOSSES, METRICS, SCHEDULES, TASKS, TRACKERS

# The values of MODEL.COMPILE without torch.compile, and those with which it replays CUDA graphs.
UNCOMPILED, GRAPH_MODES = ("none", "step"), ("reduce-overhead", "max-autotune")
# The decoders of optional packages, and the module that each one needs.
OPTIONAL_DECODERS = {"nvimgcodec": "nvidia.nvimgcodec"}
INTERPOLATIONS = ("bilinear", "bicubic", "opencv_linear", "opencv_area")
# Crops that keep the whole image.
WHOLE_IMAGE = ("squash", "letterbox")
# The values of DATA.PIXELS, and the value of a pixel that counts as 1 in DATA.MEAN and DATA.STD.
PIXEL_RANGES = {"uint8": 255, "uint16": 65535, "float32": 1}
IMAGENET_CLASSES = 1000
OF_WEIGHTS = "weights"
TEST_SETS = ("imagenet", "imagenet_a", "imagenet_r", "imagenet_v2", "imagenet_sketch")
_SAME_METRIC = "all trials need the same metric on the same images"

_SECTIONS = "MODEL TASK TRAIN TEST DATA AUG LOSS FINETUNE DISTILL EMA OPTIM CHECKPOINT LOG DIST CUDNN"
_C = Section(**{name: Section() for name in _SECTIONS.split()})

# Model name, looked up in this package, timm, then torchvision; timm/NAME or torchvision/NAME selects one of them.
_C.MODEL.ARCH = "resnet18"
# Number of classes; must match the data. 0: that of the data; 1000 with MODEL.DUMMY_INPUT or TEST.LABELS.
_C.MODEL.NUM_CLASSES = Option(0, least=0)
# Start with the published weights; a head of another size is drawn anew, and unset preprocessing follows them.
_C.MODEL.PRETRAINED = False
# Initial weights: own (the constructor's), fan_out (as in pycls) or fan_out_own_norms (norms keep the constructor's).
_C.MODEL.INIT = Option("own", choices=("own", "fan_out", "fan_out_own_norms"), needs="MODEL.PRETRAINED False")
# Synchronized batch norm: statistics over the images of all processes. With MODEL.COMPILE, each one ends a graph.
_C.MODEL.SYNCBN = False
# Checkpoint or state dict with the initial weights (.pth.tar, .pth, .safetensors); null: none.
_C.MODEL.WEIGHTS = Option(None, of=str, path=True)
# License of the weights that the model starts with, for the records; empty: what their publisher says.
_C.MODEL.LICENSE = Option("", hashed=False)
# Training images from which the batch-norm statistics are recomputed before each evaluation; 0: use the moving average.
_C.MODEL.PRECISE_BN = Option(0, least=0)
# Activation checkpointing: recompute the activations of each block in the backward pass; less memory, slower.
_C.MODEL.ACT_CHECKPOINT = False
# Mode of torch.compile: none (off), default, reduce-overhead (CUDA graphs) or max-autotune. step: eager operations, on
# CUDA one CUDA graph for a whole training step, for models whose operations are short.
_C.MODEL.COMPILE = Option("none", choices=(*UNCOMPILED, "default", *GRAPH_MODES))
# Memory format channels_last (N, H, W, C), faster on tensor cores. auto: the faster one, together with TRAIN.AMP auto.
_C.MODEL.CHANNELS_LAST = Option(False, auto=True)
# Train on random images from memory instead of the data set, for benchmarks and tests.
_C.MODEL.DUMMY_INPUT = False
# Keyword arguments of the model's constructor, in lower case: {width: 32}, or MODEL.KWARGS.width 32.
_C.MODEL.KWARGS = Option({})

# What is learned: classification, multilabel, distillation, a task of your own. auto: by DISTILL.TEACHER and the data.
_C.TASK.NAME = Option("auto", choices=(AUTO,), names=TASKS, not_swept=_SAME_METRIC)
# Registered tasks that change the one of TASK.NAME, e.g. [sam, pruning]: base classes that call each other by super().
_C.TASK.MIXINS = Option((), names=TASKS, hash_default=())
# Settings of a task of your own, declared by its class `Settings`: {temperature: 0.2}, or TASK.KWARGS.temperature 0.2.
_C.TASK.KWARGS = Option({})

# Images per process and step; with GLOBAL_BATCH_SIZE the maximum of a forward pass.
_C.TRAIN.BATCH_SIZE = Option(32, least=1)
# Images per step over all processes, reached by gradient accumulation; 0: TRAIN.BATCH_SIZE x number of processes.
_C.TRAIN.GLOBAL_BATCH_SIZE = Option(0, least=0)
# Side of the square training images, in pixels; or [height, width].
_C.TRAIN.IM_SIZE = Option(224, least=2, shape=True)  # torch's antialiased resize to a single pixel fails at random
# Progressive resizing: side at the start of the run, in pixels, which grows to TRAIN.IM_SIZE, a square; 0: off.
_C.TRAIN.IM_SIZE_START = Option(0, least=0)
# Epoch up to which the side is TRAIN.IM_SIZE_START, and epoch from which it is TRAIN.IM_SIZE, e.g. [0, 80].
_C.TRAIN.IM_SIZE_EPOCHS = Option((), needs="TRAIN.IM_SIZE_START", is_epoch=True)
# Sides in between are multiples of this many pixels.
_C.TRAIN.IM_SIZE_MULTIPLE = Option(32, least=1, needs="TRAIN.IM_SIZE_START")
# Folder of the data, with TRAIN.SPLIT/CLASS/IMAGE beneath for `imagefolder`; for `archive` also a file or a pattern,
# train-{000..009}.tar; for `packed` a URL: https://, http://, s3://, gs:// or hf://.
_C.TRAIN.DATASET = Option("./data/ILSVRC/", path=True, hashed=False)
# Sub-folder of TRAIN.DATASET with the training classes; for `archive` the archive SPLIT.tar, SPLIT.zip or SPLIT-*.tar.
_C.TRAIN.SPLIT = Option("train", needs="a DATA.NAME with folders of splits")
# Resume from the newest valid checkpoint in OUT_DIR, if there is one; False: archive an older run at the first start.
_C.TRAIN.AUTO_RESUME = Option(True, neutral=True, not_swept="the runs of a sweep are resumed; fix: remove it")
# If MODEL.WEIGHTS is a training checkpoint, restore its optimizer and epoch too.
_C.TRAIN.LOAD_OPT = Option(True, needs="MODEL.WEIGHTS")
# Loader workers per training process; 0: load in the training process; -1: one per available core.
_C.TRAIN.WORKERS = Option(4, least=-1, neutral=True)
# Copy batches to the GPU through page-locked (pinned) memory; CUDA only.
_C.TRAIN.PIN_MEMORY = Option(True, neutral=True)
# Steps between two readings of the training metrics, which are logged.
_C.TRAIN.PRINT_FREQ = Option(30, least=1, neutral=True)
# Mixed precision: none, bf16 or fp16 (with loss scaling). auto: none or bf16, the faster one here if the logits agree.
_C.TRAIN.AMP = Option("none", choices=(AUTO, "none", "bf16", "fp16"))
# Precision of float32 matrix products on CUDA (torch.set_float32_matmul_precision): highest (float32), high (TF32) or
# medium (bfloat16 if available, else TF32). cuDNN convolutions use TF32 in each case.
_C.TRAIN.MATMUL_PRECISION = Option("high", choices=("highest", "high", "medium"))
_C.TRAIN.ON_NAN = Option("stop", removed="after a stop, run the command again with another RNG_SEED")
_C.TRAIN.MAX_ROLLBACKS = Option(3, removed="see TRAIN.ON_NAN")
# Epochs between two evaluations; the last epoch is always evaluated.
_C.TRAIN.EVAL_PERIOD = Option(1, least=1)
# Epochs without a better first metric after which an evaluation ends the run; 0: never. Of little use with cos.
_C.TRAIN.PATIENCE = Option(0, least=0, not_swept="the trials need the same epochs; --asha stops trials early")
# The k of top-k accuracy; limited to the number of classes.
_C.TRAIN.TOPK = Option(5, least=1, not_swept=_SAME_METRIC)
# Metrics of the training batches, by name, e.g. [top1, ece]. Empty: those of the task (top1 and topk, or map).
_C.TRAIN.METRICS = Option((), names=METRICS)

# Folder of the evaluation data; empty: TRAIN.DATASET.
_C.TEST.DATASET = Option("", path=True, hashed=False, not_swept=_SAME_METRIC)
# Sub-folder of TEST.DATASET with the evaluation classes; archives as TRAIN.SPLIT.
_C.TEST.SPLIT = Option("val", needs="a DATA.NAME with folders of splits", not_swept=_SAME_METRIC)
# Images per process and step in evaluation; does not affect the result.
_C.TEST.BATCH_SIZE = Option(200, least=1, neutral=True)
# Shorter side to which evaluation images are resized, in pixels; [height, width]: the smallest size that covers them.
_C.TEST.IM_SIZE = Option(256, least=2, shape=True, needs="TEST.CROP center")
# Side of the evaluation images after resize and crop, in pixels, or [height, width]; 0: TRAIN.IM_SIZE.
_C.TEST.CROP_SIZE = Option(0, least=0, shape=True)
# Evaluation crop: center, or the whole image resized to TEST.CROP_SIZE: squash, or letterbox (with black borders).
_C.TEST.CROP = Option("center", choices=("center", *WHOLE_IMAGE))
# Test-time augmentation: average the logits of each evaluation image and its horizontal flip.
_C.TEST.FLIP = Option(False, needs="a task without a predict_step of its own")
# Test-time augmentation: shift each image by this many pixels, to both sides; its own logits count half. 0: off.
_C.TEST.SHIFT = Option(0, least=0, needs="a task without a predict_step of its own")
# Interpolation when evaluation images are resized: values as for DATA.INTERPOLATION.
_C.TEST.INTERPOLATION = Option("bilinear", choices=INTERPOLATIONS)
# Metrics of the evaluation; the first selects the best checkpoint. Empty: those of the task (top1 and topk, or map).
_C.TEST.METRICS = Option((), names=METRICS, not_swept=_SAME_METRIC)
# Classes of an evaluation, in `test` only. weights: by name those of the weights. Others: the 1000 of ImageNet, on its
# test sets; imagenet_a and imagenet_r restrict the logits to 200 classes. Empty: those of the training data.
_C.TEST.LABELS = Option("", choices=("", OF_WEIGHTS, *TEST_SETS), hashed=False, not_swept=_SAME_METRIC)
# Evaluation images that cannot be read, with DATA.ON_BAD_IMAGE skip: wrong (they count as wrong answers) or left_out.
_C.TEST.BROKEN = Option("wrong", choices=("wrong", "left_out"), hash_default="wrong")
# Write predictions.npz to OUT_DIR in `test` and after the last epoch; never for more than a million images or 52
# million scores.
_C.TEST.SAVE_PREDICTIONS = Option(True, hashed=False)
# Steps between two updates of the progress bar of an evaluation.
_C.TEST.PRINT_FREQ = Option(10, least=1, neutral=True)

# Data set. archive: tar or ZIP; imagenet: as distributed; list: DATASET/SPLIT.csv with the columns path and label;
# multilabel: with the columns image and labels; torchvision/NAME: one of torchvision.datasets, e.g. torchvision/KMNIST.
_C.DATA.NAME = Option("imagefolder", names=DATASETS, not_swept=_SAME_METRIC)
# Where images are read and augmented: host (by loader workers) or device (the whole set is in device memory).
_C.DATA.LOADER = Option("host", choices=("host", "device"))
# Type of the loader workers: process or thread (cheaper; decoding releases Python's interpreter lock).
_C.DATA.WORKER_KIND = Option("process", choices=("process", "thread"), neutral=True)
# Image decoder: auto (torchvision for JPEG, else PIL; torchvision means the same), pil, or nvimgcodec (only the crop).
_C.DATA.DECODER = Option("auto", choices=("auto", "torchvision", "pil", *OPTIONAL_DECODERS))
# Maximum pixels (width x height) of an image, 1 or more; a larger one is not decoded and stops the run.
_C.DATA.MAX_PIXELS = Option(178_956_970, least=1)
# Rotate and flip images as their EXIF orientation says; torchvision's reference training does not.
_C.DATA.EXIF_ROTATE = False
# Training crop: resized (random resized crop), pad (pad, then random crop), auto (the data set's), squash or letterbox.
_C.DATA.CROP = Option("auto", choices=("auto", "resized", "pad", *WHOLE_IMAGE))
# Minimum and maximum area of a random resized crop, as fractions of the image's area, 0 to 1.
_C.DATA.CROP_SCALE = Option((0.08, 1.0), needs="DATA.CROP resized")
# Minimum and maximum aspect ratio (width / height) of a random resized crop.
_C.DATA.CROP_RATIO = Option((0.75, 1.3333333333333333), needs="DATA.CROP resized")
# Interpolation of random resized crops and AUG.POLICY: bilinear or bicubic, antialiased; random: one of both each time
# (not with torchvision's policies); opencv_linear or opencv_area, not antialiased, with bilinear for AUG.POLICY.
_C.DATA.INTERPOLATION = Option("bilinear", choices=(*INTERPOLATIONS, "random"))
# Padding on each side before a random crop, in pixels (DATA.CROP pad).
_C.DATA.CROP_PADDING = Option(4, least=0, needs="DATA.CROP pad")
# Content of the padding: zeros, or reflect (the image mirrored at its border, without repeating the border itself).
_C.DATA.CROP_PADDING_MODE = Option("zeros", choices=("zeros", "reflect"), needs="DATA.CROP pad")
# Probability of a horizontal flip in training, 0 to 1.
_C.DATA.FLIP = Option(0.5, least=0, most=1)
# Horizontal flips: random, or alternating (each epoch flips exactly the images that the epoch before did not).
_C.DATA.FLIP_MODE = Option("random", choices=("random", "alternating"), needs="DATA.FLIP above 0")
# Probability of a vertical flip in training, 0 to 1.
_C.DATA.VFLIP = Option(0.0, least=0, most=1)
# Repeated augmentation: differently augmented copies of each image in a step; an epoch has 1 / REPEATS of the images.
_C.DATA.REPEATS = Option(1, least=1)
# Views of each training image in a step, for a task that takes several: independent augmentations of one decoded image.
_C.DATA.VIEWS = Option(1, least=1)
# Sampling: uniform (each image once per epoch); with replacement: balanced (classes equally often) or sqrt (between).
_C.DATA.SAMPLING = Option("uniform", choices=("uniform", "balanced", "sqrt"))
_C.DATA.SHUFFLE = Option("global", removed="images are shuffled over the whole epoch")
# Channels of an image: 3 (RGB), 1 (gray; colors are converted) or the number of bands in .npy and TIFF files.
_C.DATA.CHANNELS = Option(3, least=1)
# Pixels of an image: uint8, uint16 or float32. The last two are not rounded.
_C.DATA.PIXELS = Option("uint8", choices=tuple(PIXEL_RANGES))
# Mean of each channel, of pixel values 0 to 1, of float32 in the units of the files; empty: the data set's own.
_C.DATA.MEAN = ()
# Standard deviation of each channel for normalization, in the units of DATA.MEAN; empty: the data set's own.
_C.DATA.STD = ()
# When an image is damaged: raise (stop and report it) or skip (log it; in training, use another image instead).
_C.DATA.ON_BAD_IMAGE = Option("raise", choices=("raise", "skip"))
# Download a missing cifar10, cifar100, mnist or fashion_mnist to TRAIN.DATASET.
_C.DATA.DOWNLOAD = Option(True, neutral=True)
# Folder for generated files (shapes, indexes, copies of data at a URL); empty: $XDG_CACHE_HOME/distribuuuu.
_C.DATA.CACHE_DIR = Option("", path=True, hashed=False)
_C.DATA.CACHE_GB = Option(100.0, hashed=False, removed="free disk space is the only limit")
# Seconds of failures to read a part of data at a URL, after which the start ends with an error, 1 or more.
_C.DATA.TIMEOUT_S = Option(300.0, least=1, needs="data at a URL", hashed=False)
# Settings of a custom data set, like TASK.KWARGS, or of torchvision/NAME.
_C.DATA.KWARGS = Option({})
# Columns of a table of images: {path: id, label: breed, template: train/{}.jpg}, or DATA.TABLE.path id.
_C.DATA.TABLE = Option({})

# Augmentation policy after crop and flip: none; autoaugment, randaugment or trivialaugment (torchvision); 3augment;
# or a policy string of timm: rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original, v0, ...
_C.AUG.POLICY = "none"
# Color jitter: one factor for brightness, contrast and saturation, or three, or a fourth for the hue; empty: none.
_C.AUG.COLOR_JITTER = ()
# Operations after the color jitter, in this order: names registered in AUGMENTATIONS, e.g. [grayscale]; empty: none.
_C.AUG.OPERATIONS = Option((), names=AUGMENTATIONS)
# Random erasing: probability that a rectangle of 2 % to 33 % of the image is erased, 0 to 1.
_C.AUG.ERASING = Option(0.0, least=0, most=1)
# Content of an erased rectangle: const (the mean color) or pixel (normal noise around it, clipped to valid pixels).
_C.AUG.ERASING_MODE = Option("const", choices=("const", "pixel"), needs="AUG.ERASING above 0")
# Alpha of mixup, whose mixing coefficient is drawn from Beta(alpha, alpha); 0: off.
_C.AUG.MIXUP = Option(0.0, least=0)
# Alpha of CutMix; 0: off. If mixup is on as well, AUG.CUTMIX_SHARE selects between them.
_C.AUG.CUTMIX = Option(0.0, least=0)
# Probability that a pair, a group or a step of images is mixed at all, 0 to 1.
_C.AUG.MIX_PROB = Option(1.0, least=0, most=1, needs="AUG.MIXUP or AUG.CUTMIX above 0")
# Probability of CutMix instead of mixup if both are on, 0 to 1.
_C.AUG.CUTMIX_SHARE = Option(0.5, least=0, most=1, needs="both AUG.MIXUP and AUG.CUTMIX above 0")
# Draw the mixing coefficient and the box per pair of images (pair) or once per step (step).
_C.AUG.MIX_BY = Option("pair", choices=("pair", "step"), needs="AUG.MIXUP or AUG.CUTMIX above 0")
# Draw them once per group of this many consecutive images of the global batch, an even number; 0: as MIX_BY says.
_C.AUG.MIX_GROUP = Option(0, least=0, needs="AUG.MIXUP or AUG.CUTMIX above 0")
# Epochs at the end of the training without augmentation: crop and flip only, neither mixup nor CutMix.
_C.AUG.OFF_EPOCHS = Option(0, least=0)

# Training loss; bce: binary cross-entropy of each class. Evaluation uses cross_entropy, or bce for several labels.
_C.LOSS.NAME = Option("cross_entropy", names=LOSSES)
# Label smoothing: part of each target that is distributed evenly over all classes, 0 to 1.
_C.LOSS.LABEL_SMOOTHING = Option(0.0, least=0, most=1)
# Weight of each class, in their order or by name, {cat: 2}; the loss remains a mean over images. Empty: none. auto: in
# proportion to 1 / n for n training images.
_C.LOSS.CLASS_WEIGHTS = Option((), auto=True)
# Weight of the positive term in bce: one number, one per class, {NAME: NUMBER}, or auto (negatives by positives).
_C.LOSS.POSITIVE_WEIGHT = Option((), auto=True, needs="LOSS.NAME bce", hash_default=())
_C.LOSS.BCE_REDUCTION = Option("mean", removed="for the sum, register a loss of your own, see docs/extending.md")
# With bce, smoothed targets above this become 1 and all others 0, 0 to 1; 0: all classes of a mixture; null: off.
_C.LOSS.BCE_TARGET_THRESHOLD = Option(None, of=float, least=0, most=1, needs="LOSS.NAME bce")
# Focusing parameter gamma of the focal loss: down-weights well-classified images; 0: none.
_C.LOSS.FOCAL_GAMMA = Option(2.0, least=0, needs="LOSS.NAME focal")
# Settings of a custom loss, like TASK.KWARGS.
_C.LOSS.KWARGS = Option({})

# Initial weights for all layers but the head: `pretrained`, a name of published weights, a file, the OUT_DIR of a run
# (its best weights); tensors that do not fit are drawn anew. Empty: off.
_C.FINETUNE.WEIGHTS = Option("", path=True)
_C.FINETUNE.EMA = Option(True, removed="for the raw weights of a run, name its best.pth.tar")
# Initialize the head randomly even if the file's fits.
_C.FINETUNE.HEAD_RESET = False
# Initial head: a file of `distribuuuu finetune`, e.g. exp/my_images/probe.pth.tar. Empty: that of the weights.
_C.FINETUNE.HEAD = Option("", path=True, hash_default="")
# Layers to freeze, with their batch norms: patterns of names, e.g. [conv1, 'layer1.*']; backbone: all but the head.
_C.FINETUNE.FREEZE = Option((), of=str)
# Low-rank adapters of linear layers (LoRA), e.g. {rank: 8, alpha: 16, targets: ['*.attn.*']}, where alpha is the scale
# times the rank. Only adapters and head are trained; best weights are merged. Empty: off.
_C.FINETUNE.LORA = Option({}, hash_default={})
# Factors of the learning rate, above 0, by such patterns, e.g. {fc: 10, layer4: 2, '*': 1}; the first match applies.
_C.FINETUNE.LR_MULT = Option({}, of=float)

# Teacher model for knowledge distillation, named as in MODEL.ARCH; empty: none.
_C.DISTILL.TEACHER = ""
# Weights of the teacher: a file as for MODEL.WEIGHTS, or pretrained (those of timm or torchvision).
_C.DISTILL.WEIGHTS = Option("", path=True)
# Keyword arguments of the teacher's constructor, as MODEL.KWARGS.
_C.DISTILL.KWARGS = Option({}, needs="a DISTILL.TEACHER")
# Targets from the teacher: soft (its probabilities) or hard (its predicted class).
_C.DISTILL.KIND = Option("soft", choices=("soft", "hard"), needs="a DISTILL.TEACHER")
# Weight of the distillation loss in the total loss, 0 to 1.
_C.DISTILL.ALPHA = Option(0.5, least=0, most=1, needs="a DISTILL.TEACHER")
# Softmax temperature for soft targets, above 0.
_C.DISTILL.TEMPERATURE = Option(1.0, least=0.001, needs="a DISTILL.TEACHER and DISTILL.KIND soft")

# Half-life of the moving average of the weights (EMA), in images; 0: no average.
_C.EMA.HALF_LIFE = Option(0.0, least=0)
# Maximum half-life early in the run, as a fraction of the images so far, 0 to 1; 0: no limit.
_C.EMA.RAMP_UP = Option(0.1, least=0, most=1, needs="EMA.HALF_LIFE above 0")
_C.EMA.BUFFERS = Option("average", removed="for another average, return one from the `averages` of a task")
# Steps from one update of the average to the next, counted from the first step of the epoch, 1 or more.
_C.EMA.EVERY_STEPS = Option(1, least=1, needs="EMA.HALF_LIFE above 0")
# Epoch at which averaging starts; until its first step, updates copy the weights.
_C.EMA.START_EPOCH = Option(0, least=0, needs="EMA.HALF_LIFE above 0", is_epoch=True)

# Epochs to train; 0: only write the config.
_C.OPTIM.MAX_EPOCH = Option(100, least=0)
# Fraction of the last epoch to train, above 0 to 1, rounded up to whole steps: 9.9 epochs are MAX_EPOCH 10 and 0.9.
_C.OPTIM.LAST_EPOCH = Option(1.0, least=0.001, most=1)
# Learning-rate schedule, times the warm-up; cos_after_warmup and tri start after it; with cos_timm it comes instead.
_C.OPTIM.LR_POLICY = Option("cos", names=SCHEDULES)
# Update the learning rate every epoch or every step.
_C.OPTIM.LR_UPDATE = Option("epoch", choices=("epoch", "step"))
# Epochs by which the schedule lags, as if the first epoch were repeated, 0 or more.
_C.OPTIM.LR_LAG = Option(0, least=0, is_epoch=True)
# Base learning rate, multiplied by the factors of the schedule; OPTIM.LR_SCALE may scale it with the batch size.
_C.OPTIM.BASE_LR = Option(0.2, least=0)
# Scaling of BASE_LR with the images per step: none, linear (x images / LR_SCALE_BATCH) or sqrt (x its square root).
_C.OPTIM.LR_SCALE = Option("none", choices=("none", "linear", "sqrt"))
# Images per step for which BASE_LR is given, with linear and sqrt.
_C.OPTIM.LR_SCALE_BATCH = Option(256, least=1, needs="OPTIM.LR_SCALE linear or sqrt")
# Final factor of BASE_LR with every schedule but steps, 0 to 1.
_C.OPTIM.MIN_LR = Option(0.0, least=0, most=1, needs="an OPTIM.LR_POLICY other than steps")
# Epochs at which `steps` multiplies the learning rate by LR_MULT, ascending; a leading 0 has no effect.
_C.OPTIM.STEPS = Option((), needs="OPTIM.LR_POLICY steps", is_epoch=True)
# Factor of the learning rate at each of the `steps`.
_C.OPTIM.LR_MULT = Option(0.1, least=0, needs="OPTIM.LR_POLICY steps")
# Optimizer: sgd, a registered one (docs/extending.md), or one of timm: adamw, lamb, lars, lion, adan, muon, ...
_C.OPTIM.NAME = "sgd"
# Betas of the optimizer, e.g. [0.9, 0.95]; empty: the optimizer's default.
_C.OPTIM.BETAS = Option((), needs="an OPTIM.NAME other than sgd")
# Epsilon of the optimizer, above 0; 0: the optimizer's default.
_C.OPTIM.EPS = Option(0.0, least=0, needs="an OPTIM.NAME other than sgd")
# Momentum of sgd and other optimizers with momentum, 0 to 1.
_C.OPTIM.MOMENTUM = Option(0.9, least=0, most=1)
# Dampening of the momentum of sgd, 0 to 1; must be 0 with NESTEROV.
_C.OPTIM.DAMPENING = Option(0.0, least=0, most=1, needs="OPTIM.NAME sgd")
# Nesterov momentum of sgd; needs MOMENTUM above 0.
_C.OPTIM.NESTEROV = True
# Arguments of the optimizer's constructor that are no options: {amsgrad: true}, or OPTIM.KWARGS.amsgrad true.
_C.OPTIM.KWARGS = Option({})
# Factor of the learning rate at the start of the warm-up, 0 to 1.
_C.OPTIM.WARMUP_FACTOR = Option(0.1, least=0, most=1, needs="OPTIM.WARMUP_EPOCHS above 0")
# Epochs of linear warm-up, e.g. 0.5; 0: none.
_C.OPTIM.WARMUP_EPOCHS = Option(5.0, least=0)
# Weight decay of all parameters that the next two options do not cover; for sgd an L2 penalty.
_C.OPTIM.WEIGHT_DECAY = Option(5e-5, least=0)
# Weight decay of norm layers, other one-dimensional scales, and those that the model exempts; negative: WEIGHT_DECAY.
_C.OPTIM.NORM_WEIGHT_DECAY = Option(-1.0, least=-1)
# Weight decay of biases outside norm layers; negative: WEIGHT_DECAY.
_C.OPTIM.BIAS_WEIGHT_DECAY = Option(-1.0, least=-1)
_C.OPTIM.WEIGHT_DECAY_END = Option(-1.0, removed="set weight_decay in the `update` of a task, see docs/extending.md")
# Parameters without weight decay whatever their kind, by patterns of parameter or module names, e.g. ['*bn*'].
_C.OPTIM.NO_WEIGHT_DECAY = Option((), of=str)
# Layer-wise learning-rate decay: factor of a layer relative to the layer after it, above 0 to 1; 1: off. timm only.
_C.OPTIM.LAYER_DECAY = Option(1.0, least=0.001, most=1)
_C.OPTIM.CLIP = Option("norm", removed="clip in the `update` of a task, see docs/extending.md")
# Gradient clipping: maximum norm of all gradients as one vector; 0: off.
_C.OPTIM.CLIP_NORM = Option(0.0, least=0)
_C.OPTIM.CLIP_LIMIT = Option(0.0, removed="see OPTIM.CLIP")

# Maximum steps that a crash costs: checkpoints at its multiples and halfway between. 0: at the ends of epochs only.
_C.CHECKPOINT.EVERY_STEPS = Option(0, least=0, neutral=True)
# Hours after which the run saves, stops and exits with status 75, to be started again; 0: no limit.
_C.CHECKPOINT.MAX_HOURS = Option(0.0, least=0, neutral=True)
# Number of newest checkpoints to keep, 1 or more.
_C.CHECKPOINT.KEEP_LAST = Option(3, least=1, neutral=True)
# Also keep the checkpoint of every Kth epoch; 0: none.
_C.CHECKPOINT.KEEP_EVERY = Option(0, least=0, neutral=True)

# Write TensorBoard events to OUT_DIR/tensorboard.
_C.LOG.TENSORBOARD = Option(True, hashed=False, neutral=True)
# Experiment trackers: mlflow, wandb or a plug-in (docs/trackers.md); tensorboard means LOG.TENSORBOARD True.
_C.LOG.TRACKERS = Option((), names=TRACKERS, hashed=False, neutral=True)
# Augmented training images in the image grid of TensorBoard; 0: none.
_C.LOG.NUM_IMAGES = Option(32, least=0, needs="LOG.TENSORBOARD True", hashed=False, neutral=True)
_C.LOG.LAYER_NORMS = Option(False, hashed=False, removed="use PLUGINS docs/examples/layer_norms.py")

# Number of processes that TRAIN.BATCH_SIZE and OPTIM.BASE_LR are meant for; the log warns of another one. 0: any.
_C.DIST.PROCESSES = Option(0, least=0, hashed=False, neutral=True)
# Communication backend: nccl, gloo or auto (nccl on CUDA, else gloo; of a single process no group).
_C.DIST.BACKEND = Option("auto", choices=("auto", "nccl", "gloo"), neutral=True)
# Seconds without progress, also at the start, after which all processes write their stacks and exit, 1 or more.
_C.DIST.TIMEOUT_S = Option(300, least=1, neutral=True)
# The same, if larger, until the first step and the first evaluated batch, which may compile or download.
_C.DIST.STARTUP_TIMEOUT_S = Option(1800, least=1, neutral=True)
_C.DIST.BUCKET_MB = Option(25.0, removed="a bucket of DDP has 25 MiB")
_C.DIST.COMPRESS = Option("none", removed="gradients are sent in their own type")
# Sharding over the processes: none, zero1 (optimizer state) or fsdp (optimizer state, gradients and weights).
_C.DIST.SHARD = Option("none", choices=("none", "zero1", "fsdp"))
_C.DIST.CPU_OFFLOAD = Option(False, removed="MODEL.ACT_CHECKPOINT True saves memory too")

# Benchmark cuDNN's algorithms and use the fastest.
_C.CUDNN.BENCHMARK = True
# Use deterministic algorithms only, so that a run is bitwise reproducible on CUDA; slower.
_C.CUDNN.DETERMINISTIC = False

# Output folder of the run, or its URL in object storage, e.g. s3://bucket/run, see docs/mirror.md.
_C.OUT_DIR = Option("./exp", path=True, hashed=False, neutral=True,
                    not_swept="each run has its own folder in OUT_DIR; fix: OUT_DIR DIR")  # fmt: skip
# Name of the file in OUT_DIR with the resolved config.
_C.CFG_DEST = Option("config.yaml", hashed=False, neutral=True, not_swept="it does not change a run; fix: remove it")
# Plug-ins: Python code outside of the package that registers entries, imported first: names of modules, or paths of .py
# files, relative to this file (on the command line: to the current folder), e.g. [my_lab.tasks, ./sam.py].
_C.PLUGINS = Option((), of=str, hashed=False, not_swept="it is code; fix: PLUGINS FILE")
# Random seed, 0 or more; null: drawn at the first start, logged, and kept when the run resumes.
_C.RNG_SEED = Option(None, of=int, least=0, most=2**63 - 1, hashed=False,
                     not_swept="other seeds repeat the best trials; fix: --seeds N")  # fmt: skip

DECLARED = dict(iter_declared(_C))
OPTIONS = {key: option for key, option in DECLARED.items() if not option.removed}
# The sections whose names the model, the task or the user defines.
OPEN_SECTIONS = tuple(key for key, option in OPTIONS.items() if option.is_open)


def option_of(key: str) -> Option:
    """Return the declaration of an option of a config; of a name in an open section, that of the section."""
    return DECLARED[key if key in DECLARED else next(name for name in OPEN_SECTIONS if key.startswith(f"{name}."))]
