"""The small training of kill_resume.py, chaos.py and gpu_check.py: its images and options."""

import random
from pathlib import Path

from PIL import Image

TRAIN_NET = str(Path(__file__).resolve().parents[2] / "tools" / "train_net.py")
SETTINGS = (
    "MODEL.NUM_CLASSES 3 TRAIN.IM_SIZE 32 TRAIN.PRINT_FREQ 1 TEST.IM_SIZE 36 TEST.BATCH_SIZE 1 DATA.CROP_SCALE [0.5,1] "
    "OPTIM.BASE_LR 0.05 OPTIM.WARMUP_EPOCHS 1 OPTIM.LR_UPDATE step CHECKPOINT.EVERY_STEPS 2 "
    "CHECKPOINT.KEEP_EVERY 1 RNG_SEED 7"
)
NUM_IMAGES = {"train": 90, "val": 37}
CLASSES = ("blue", "green", "red")
WORKERS = (0, 1, 2, 3)
# Seconds after which a start with a compiled model hangs.
COMPILED_HANGS_AFTER_S = 900


def draw_images(folder: Path) -> None:
    """Write JPEGs of noise, tinted by class, to folder/SPLIT/CLASS."""
    rng = random.Random(0)
    for split, number in NUM_IMAGES.items():
        for index in range(number):
            name = CLASSES[index % len(CLASSES)]
            tint = [10 * (name == other) for other in ("red", "green", "blue")]
            noise = Image.frombytes("RGB", (12, 10), rng.randbytes(360)).resize((48, 40))
            image = Image.blend(noise, Image.new("RGB", noise.size, tuple(100 + value for value in tint)), 0.5)
            path = folder / split / name / f"{index:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, quality=90)
