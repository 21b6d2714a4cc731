"""The YAML files of the 2021 distribuuuu."""

# The seven files differ in these values only: arch (also in OUT_DIR), base LR, weight decay, batch size.
ORIGINAL = """\
CFG_DEST: config.yaml
CUDNN:
  BENCHMARK: true
  DETERMINISTIC: false
MODEL:
  ARCH: {arch}
  DUMMY_INPUT: false
  NUM_CLASSES: 1000
  PRETRAINED: false
  SYNCBN: false
  WEIGHTS: null
OPTIM:
  BASE_LR: {lr}
  DAMPENING: 0.0
  LR_MULT: 0.1
  LR_POLICY: cos
  MAX_EPOCH: 100
  MIN_LR: 0.0
  MOMENTUM: 0.9
  NESTEROV: true
  STEPS: []
  WARMUP_EPOCHS: 5
  WARMUP_FACTOR: 0.1
  WEIGHT_DECAY: {wd}
OUT_DIR: ./{arch}
RNG_SEED: null
TEST:
  BATCH_SIZE: 200
  DATASET: ./data/ILSVRC/
  IM_SIZE: 256
  PRINT_FREQ: 10
  SPLIT: val
TRAIN:
  AUTO_RESUME: true
  BATCH_SIZE: {batch}
  DATASET: ./data/ILSVRC/
  IM_SIZE: 224
  LOAD_OPT: true
  PIN_MEMORY: true
  PRINT_FREQ: 30
  SPLIT: train
  TOPK: 5
  WORKERS: 4
"""


ORIGINAL_FILES = {
    "botnet50": ("0.2", "5.0e-05", 32), "efficientnet_b0": ("0.4", "1.0e-05", 64),
    "regnetx_160": ("0.4", "5.0e-05", 64), "regnety_160": ("0.4", "5.0e-05", 64), "regnety_320": ("0.4", "5.0e-05", 64),
    "resnet18": ("0.2", "5.0e-05", 32), "resnet50": ("0.2", "5.0e-05", 32),
}  # fmt: skip
