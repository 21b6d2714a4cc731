"""Every option of a run: its default, and above it what it means, its unit and what it allows.

These comments are what `--help-config` prints, so each key has one.
"""

from yacs.config import CfgNode

_C = CfgNode()

_C.MODEL = CfgNode()
# Model name: first this package's, then timm's, then torchvision's; timm/NAME or torchvision/NAME forces one.
_C.MODEL.ARCH = "resnet18"
# Number of classes; must be the number in the data. 0: as many as the data has.
_C.MODEL.NUM_CLASSES = 1000
# Start from the published weights of timm or torchvision; a head of another size starts fresh.
_C.MODEL.PRETRAINED = False
# Batch norm over the images of all processes instead of each process's own.
_C.MODEL.SYNCBN = False
# Checkpoint or state dict to start from (.pth.tar, .pth, .safetensors); null: none.
_C.MODEL.WEIGHTS = None
# Batch norm's statistics from so many training images, afresh before each evaluation; 0: their moving average.
_C.MODEL.PRECISE_BN = 0
# Compute the activations of each block again in the backward pass instead of keeping them: less memory, slower.
_C.MODEL.ACT_CHECKPOINT = False
# Compile the model (torch.compile): none, default, reduce-overhead (CUDA graphs) or max-autotune.
_C.MODEL.COMPILE = "none"
# Keep images and weights in the order that tensor cores like: (N, H, W, C) in memory, the same numbers.
_C.MODEL.CHANNELS_LAST = False
# Train on random images from memory instead of the data set, to measure or to try out.
_C.MODEL.DUMMY_INPUT = False
# Arguments for the model's constructor, by its own lower-case names: {width: 32}, or MODEL.KWARGS.width 32.
_C.MODEL.KWARGS = CfgNode(new_allowed=True)

_C.TASK = CfgNode()
# What is learned: classification, multilabel, distillation, or a task of your own. auto: distillation with a
# DISTILL.TEACHER, multilabel for data of several labels per image, else classification.
_C.TASK.NAME = "auto"
# Settings of a task of your own, by its own lower-case names: {temperature: 0.2}, or TASK.KWARGS.temperature 0.2.
_C.TASK.KWARGS = CfgNode(new_allowed=True)

_C.TRAIN = CfgNode()
# Images per process and step; with TRAIN.GLOBAL_BATCH_SIZE, the most that one process takes at a time.
_C.TRAIN.BATCH_SIZE = 32
# Images per step over all processes; the rest is accumulated. 0: TRAIN.BATCH_SIZE x number of processes.
_C.TRAIN.GLOBAL_BATCH_SIZE = 0
# Side of the square training image, in pixels.
_C.TRAIN.IM_SIZE = 224
# Side of the training image at the start of the run, in pixels, from where it grows to TRAIN.IM_SIZE; 0: TRAIN.IM_SIZE.
_C.TRAIN.IM_SIZE_START = 0
# The epoch until which the side is IM_SIZE_START, and that from which on it is IM_SIZE, e.g. [0, 80].
_C.TRAIN.IM_SIZE_EPOCHS = ()
# Pixels that the sides in between are multiples of.
_C.TRAIN.IM_SIZE_MULTIPLE = 32
# Folder of the data: with TRAIN.SPLIT/CLASS/IMAGE beneath for `imagefolder`, the root for the other sets.
_C.TRAIN.DATASET = "./data/ILSVRC/"
# Sub-folder of TRAIN.DATASET that holds the training classes.
_C.TRAIN.SPLIT = "train"
# Go on from the newest sound checkpoint in OUT_DIR if there is one; False sets an older run aside, at its first start.
_C.TRAIN.AUTO_RESUME = True
# When MODEL.WEIGHTS is a whole checkpoint, restore its optimizer and epoch too.
_C.TRAIN.LOAD_OPT = True
# Loader workers per training process; 0: it loads by itself; -1: as many as there are cores for it.
_C.TRAIN.WORKERS = 4
# Copy batches through page-locked memory (CUDA only).
_C.TRAIN.PIN_MEMORY = True
# Steps between two reads of the training metrics.
_C.TRAIN.PRINT_FREQ = 30
# What the model computes in: none (float32), bf16 or fp16 (with loss scaling); weights stay float32.
_C.TRAIN.AMP = "none"
# Precision of float32 matrix products on CUDA: highest (float32), high (TF32: 10 of 23 bits of the fraction) or medium
# (bfloat16 where torch has it, else TF32). Convolutions of cuDNN use TF32 with each of them.
_C.TRAIN.MATMUL_PRECISION = "high"
# When the loss is not finite: stop, or rollback (to the newest checkpoint, from there on with other randomness).
_C.TRAIN.ON_NAN = "stop"
# Rollbacks of a run after which it stops nevertheless.
_C.TRAIN.MAX_ROLLBACKS = 3
# The k of top-k accuracy; more than the number of classes counts as that number.
_C.TRAIN.TOPK = 5
# Metrics of the training batches, by name, e.g. [top1, ece]. Empty: those of the task (top1 and topk, or map).
_C.TRAIN.METRICS = ()

_C.TEST = CfgNode()
# Folder of the evaluation data; follows TRAIN.DATASET unless the command line sets it, or a file sets it to a folder
# that is neither this default nor the file's TRAIN.DATASET.
_C.TEST.DATASET = "./data/ILSVRC/"
# Sub-folder of TEST.DATASET that holds the evaluation classes.
_C.TEST.SPLIT = "val"
# Images per process and step in evaluation; does not change the result.
_C.TEST.BATCH_SIZE = 200
# Shorter side that evaluation images are resized to, in pixels.
_C.TEST.IM_SIZE = 256
# Side of the centre crop taken after the resize, in pixels. 0: TRAIN.IM_SIZE.
_C.TEST.CROP_SIZE = 0
# Average the logits of each evaluation image and its mirror image.
_C.TEST.FLIP = False
# How evaluation images are resized: bilinear or bicubic.
_C.TEST.INTERPOLATION = "bilinear"
# Metrics of the evaluation: top1, topk, macro_recall, macro_f1, ece, map, or names of your own. The first one selects
# the best checkpoint. Empty: those of the task (top1 and topk, or map).
_C.TEST.METRICS = ()
# Steps between two updates of the evaluation's progress bar.
_C.TEST.PRINT_FREQ = 10

_C.DATA = CfgNode()
# Data set: imagefolder, packed, cifar10, cifar100, mnist, fashion_mnist, shapes, dummy or multilabel (DATASET/SPLIT.csv
# with the columns image and labels: any number of classes an image).
_C.DATA.NAME = "imagefolder"
# What feeds the device: host (workers read, decode and crop), device (the whole set lies and is cropped on the device).
_C.DATA.LOADER = "host"
# What workers are: process, or thread (cheaper, since decoding leaves Python's lock).
_C.DATA.WORKER_KIND = "process"
# Decoder: auto (torchvision for JPEG, PIL for the rest), torchvision, pil, simplejpeg (scales while it decodes).
_C.DATA.DECODER = "auto"
# Pixels (width x height) above which an image counts as broken, before memory is taken for it; 1 or more.
_C.DATA.MAX_PIXELS = 178_956_970
# Rotate and flip images as the orientation in their EXIF says: True or False (as torchvision's reference training).
_C.DATA.EXIF_ROTATE = False
# Training crop: resized (random resized crop), pad (pad, then random crop), auto (what suits the set).
_C.DATA.CROP = "auto"
# Least and greatest share of the image's area that a random resized crop takes, 0 to 1.
_C.DATA.CROP_SCALE = (0.08, 1.0)
# Least and greatest width over height of a random resized crop.
_C.DATA.CROP_RATIO = (0.75, 1.3333333333333333)
# How training crops are resized, and turned and sheared by AUG.POLICY: bilinear or bicubic.
_C.DATA.INTERPOLATION = "bilinear"
# Pixels of padding on each side before a random crop (DATA.CROP pad).
_C.DATA.CROP_PADDING = 4
# Probability of a horizontal flip in training, 0 to 1.
_C.DATA.FLIP = 0.5
# How often each image of a step comes in it, each time augmented otherwise; an epoch sees 1 / REPEATS of the images.
_C.DATA.REPEATS = 1
# How training images are drawn: uniform (each once an epoch), balanced (with replacement, every class equally often) or
# sqrt (a class as often as the root of its number of images says).
_C.DATA.SAMPLING = "uniform"
# Mean of each of the three channels, of 1.0; empty: the set's own.
_C.DATA.MEAN = ()
# Standard deviation of each of the three channels, of 1.0; empty: the set's own.
_C.DATA.STD = ()
# What a broken image does: raise (stop and name it) or skip (log it and take another in its place).
_C.DATA.ON_BAD_IMAGE = "raise"
# Fetch a missing cifar10, cifar100, mnist or fashion_mnist into TRAIN.DATASET.
_C.DATA.DOWNLOAD = True
# Folder for what is drawn or computed once (the shapes). Empty: $XDG_CACHE_HOME/distribuuuu.
_C.DATA.CACHE_DIR = ""

_C.AUG = CfgNode()
# After crop and flip: none; autoaugment, randaugment or trivialaugment (torchvision's); 3augment; or text that timm
# understands: rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original, v0, ...
_C.AUG.POLICY = "none"
# Colour jitter: one number for brightness, contrast and saturation, or three, or a fourth for the hue; empty: none.
_C.AUG.COLOR_JITTER = ()
# Probability that a rectangle of 2 % to a third of the image is erased, 0 to 1.
_C.AUG.ERASING = 0.0
# What an erased rectangle becomes: const (the mean colour) or pixel (normal noise around it, clipped to bytes).
_C.AUG.ERASING_MODE = "const"
# The alpha of mixup, whose share is drawn from Beta(alpha, alpha); 0: off.
_C.AUG.MIXUP = 0.0
# The alpha of cutmix; 0: off. With mixup on as well, AUG.CUTMIX_SHARE decides between the two.
_C.AUG.CUTMIX = 0.0
# Share of the pairs, or of the steps, that are mixed at all, 0 to 1.
_C.AUG.MIX_PROB = 1.0
# Of what is mixed, the share that gets cutmix when mixup is on too, 0 to 1.
_C.AUG.CUTMIX_SHARE = 0.5
# What draws a share and a box of its own: pair (each two images) or step (all images of a step get the same).
_C.AUG.MIX_BY = "pair"

_C.LOSS = CfgNode()
# What training makes small: cross_entropy, bce (a yes or no for each class) or focal. Evaluation: always cross_entropy,
# or bce where an image has any number of classes.
_C.LOSS.NAME = "cross_entropy"
# Share of each target that goes evenly to all classes, 0 to 1.
_C.LOSS.LABEL_SMOOTHING = 0.0
# A factor for each class, in the order of the classes; the loss stays a mean over images. Empty: none.
_C.LOSS.CLASS_WEIGHTS = ()
# The loss of an image from those of its classes with bce: mean or sum.
_C.LOSS.BCE_REDUCTION = "mean"
# Smoothed targets above it become 1 and all others 0 with bce, 0 to 1; 0: they stay what they are.
_C.LOSS.BCE_TARGET_THRESHOLD = 0.0
# How little well-classified images count with focal; 0: like all others.
_C.LOSS.FOCAL_GAMMA = 2.0

_C.FINETUNE = CfgNode()
# Weights for all but the head: `pretrained` (as MODEL.PRETRAINED), a file (.pth, .pth.tar, .safetensors, ...), or a
# folder of the Hugging Face Hub; what fits is taken, the rest starts fresh. Empty: off.
_C.FINETUNE.WEIGHTS = ""
# Where the file has a moving average of the weights too, take that.
_C.FINETUNE.EMA = True
# Start the head fresh even where the file's would fit.
_C.FINETUNE.HEAD_RESET = False
# What is not trained: patterns of parameter or module names, e.g. [conv1, 'layer1.*']; batch norms among them also keep
# their statistics.
_C.FINETUNE.FREEZE = ()
# Factors of the learning rate, above 0, by such patterns, e.g. {fc: 10, layer4: 2, '*': 1}; of those that match a
# parameter the first counts.
_C.FINETUNE.LR_MULT = CfgNode(new_allowed=True)

_C.DISTILL = CfgNode()
# Teacher to learn from as well: a model name as for MODEL.ARCH; empty: none.
_C.DISTILL.TEACHER = ""
# The teacher's weights: a file as for MODEL.WEIGHTS, or pretrained (those of timm or torchvision).
_C.DISTILL.WEIGHTS = ""
# Arguments for the teacher's constructor, as MODEL.KWARGS.
_C.DISTILL.KWARGS = CfgNode(new_allowed=True)
# What is learnt from it: soft (its probabilities) or hard (its answer).
_C.DISTILL.KIND = "soft"
# The teacher's share of the loss, 0 to 1.
_C.DISTILL.ALPHA = 0.5
# What logits are divided by for soft, above 0.
_C.DISTILL.TEMPERATURE = 1.0

_C.EMA = CfgNode()
# Images after which an image's share in the moving average of the weights has halved; 0: no average.
_C.EMA.HALF_LIFE = 0.0
# The half-life is at most this share of the images seen so far, 0 to 1; 0: it is never shortened.
_C.EMA.RAMP_UP = 0.1
# What the average does with buffers, such as batch norm's statistics: average or copy.
_C.EMA.BUFFERS = "average"

_C.OPTIM = CfgNode()
# Epochs to train; 0 only writes the config.
_C.OPTIM.MAX_EPOCH = 100
# Learning rate over the run: cos, steps, exp, lin, or tri (lin from the end of the warm-up on: a triangle).
_C.OPTIM.LR_POLICY = "cos"
# How often the learning rate changes: epoch (held for the epoch) or step.
_C.OPTIM.LR_UPDATE = "epoch"
# Learning rate that the schedule's factors multiply; LR_SCALE may scale it by the batch size.
_C.OPTIM.BASE_LR = 0.2
# BASE_LR by the images per step: none (as it is), linear (x images / LR_SCALE_BATCH) or sqrt (x the root of that).
_C.OPTIM.LR_SCALE = "none"
# Images per step at which `linear` and `sqrt` leave BASE_LR as it is.
_C.OPTIM.LR_SCALE_BATCH = 256
# Where cos, exp, lin and tri end, as a factor of BASE_LR, 0 to 1; exp needs more than 0.
_C.OPTIM.MIN_LR = 0.0
# Epochs at which `steps` multiplies the rate by LR_MULT, ascending; a first 0 is the start.
_C.OPTIM.STEPS = ()
# Factor of each step of `steps`.
_C.OPTIM.LR_MULT = 0.1
# Optimizer: sgd, or any name of timm's: adamw, lamb, lars, lion, adan, muon, rmsproptf, ...
_C.OPTIM.NAME = "sgd"
# The optimizer's betas, e.g. [0.9, 0.95]; empty: its own.
_C.OPTIM.BETAS = ()
# The optimizer's epsilon, above 0; 0: its own.
_C.OPTIM.EPS = 0.0
# Momentum of sgd and of others that have one, 0 up to 1.
_C.OPTIM.MOMENTUM = 0.9
# Dampening of sgd's momentum, 0 to 1; must be 0 with NESTEROV.
_C.OPTIM.DAMPENING = 0.0
# Nesterov's momentum, of sgd only; needs MOMENTUM above 0.
_C.OPTIM.NESTEROV = True
# Factor of the learning rate at the start of the warm-up, 0 to 1.
_C.OPTIM.WARMUP_FACTOR = 0.1
# Epochs of linear warm-up, e.g. 0.5; 0: none.
_C.OPTIM.WARMUP_EPOCHS = 5.0
# Weight decay of every parameter that the next two do not set apart; for sgd an L2 penalty.
_C.OPTIM.WEIGHT_DECAY = 5e-5
# Weight decay of norm layers, other one-dimensional scales, and what the model exempts; below 0: WEIGHT_DECAY.
_C.OPTIM.NORM_WEIGHT_DECAY = -1.0
# Weight decay of biases outside norm layers; below 0: WEIGHT_DECAY.
_C.OPTIM.BIAS_WEIGHT_DECAY = -1.0
# Factor of a layer's learning rate compared with the layer after it, above 0 to 1; 1: off. Models of timm only.
_C.OPTIM.LAYER_DECAY = 1.0
# Norm that the gradients of a step, as one vector, are scaled down to; 0: off.
_C.OPTIM.CLIP_NORM = 0.0

_C.CHECKPOINT = CfgNode()
# The most steps that a crash may cost: checkpoints at its multiples and once in between. 0: at the epochs' ends only.
_C.CHECKPOINT.EVERY_STEPS = 0
# Hours after which the run saves, stops and exits with status 75, to be started again; 0: no limit.
_C.CHECKPOINT.MAX_HOURS = 0.0
# Newest checkpoints to keep, at least 1.
_C.CHECKPOINT.KEEP_LAST = 3
# Also keep the checkpoint of every Kth epoch; 0: none.
_C.CHECKPOINT.KEEP_EVERY = 0

_C.LOG = CfgNode()
# Write TensorBoard events to OUT_DIR/tensorboard.
_C.LOG.TENSORBOARD = True
# Images in the grid of one augmented batch that TensorBoard shows; 0: none.
_C.LOG.NUM_IMAGES = 32

_C.DIST = CfgNode()
# How processes talk: nccl, gloo, or auto (nccl on CUDA, else gloo).
_C.DIST.BACKEND = "auto"
# Seconds without progress after which all processes write their stacks to OUT_DIR/stacks and end, 1 or more; also the
# seconds that processes wait in their start for one that has not come.
_C.DIST.TIMEOUT_S = 300
# The same, if it is more, until a start has done its first step, and later its first batch of evaluation: models are
# compiled and weights fetched in that time.
_C.DIST.STARTUP_TIMEOUT_S = 1800
# MiB of gradients that are sent at once, while the backward pass goes on; with MODEL.COMPILE 1 or more.
_C.DIST.BUCKET_MB = 25.0
# Type that gradients are sent in: none (their own), bf16 or fp16.
_C.DIST.COMPRESS = "none"
# What the processes share out among them: none, zero1 (the optimizer's state) or fsdp (that, gradients and weights).
_C.DIST.SHARD = "none"
# Keep weights, gradients and the optimizer in the host's memory, with DIST.SHARD fsdp.
_C.DIST.CPU_OFFLOAD = False

_C.CUDNN = CfgNode()
# Let cuDNN time its algorithms and take the fastest.
_C.CUDNN.BENCHMARK = True
# Use deterministic algorithms only, so that a run repeats bitwise on CUDA; slower.
_C.CUDNN.DETERMINISTIC = False

# Folder for all that a run writes.
_C.OUT_DIR = "./exp"
# Name of the file in OUT_DIR that gets the resolved config.
_C.CFG_DEST = "config.yaml"
# Seed of everything random, 0 or more; null: drawn at the first start, logged, and kept over resumes.
_C.RNG_SEED = None
