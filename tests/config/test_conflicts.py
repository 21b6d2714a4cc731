"""Options that are set without effect are reported, and only those."""

from support.baselines import FILES
from support.original_configs import ORIGINAL, ORIGINAL_FILES

from distribuuuu.config import load_cfg
from distribuuuu.config.conflicts import find_unused_options
from distribuuuu.config.derived import CONDITIONS
from distribuuuu.config.options import OPTIONS
from distribuuuu.trainer import train_model

TEACHER, STEPS = "DISTILL.TEACHER resnet18 DISTILL.WEIGHTS pretrained", "OPTIM.LR_POLICY steps OPTIM.STEPS [30]"
# Words that set an option without effect -> words that give it one.
CASES = {
    "AUG.MIX_PROB 0.5": "AUG.MIXUP 1", "AUG.MIX_BY step": "AUG.CUTMIX 1", "AUG.MIX_GROUP 8": "AUG.CUTMIX 1",
    "AUG.CUTMIX_SHARE 0.2": "AUG.CUTMIX 1 AUG.MIXUP 1", "AUG.ERASING_MODE pixel": "AUG.ERASING 0.1",
    "DATA.CROP_SCALE [0.5,1] DATA.NAME cifar10": "DATA.CROP resized", "DATA.CROP_PADDING 2": "DATA.NAME cifar10",
    "DATA.CROP_RATIO [1,1] DATA.CROP pad": "DATA.CROP auto", "DATA.CROP_PADDING_MODE reflect": "DATA.CROP pad",
    "DATA.FLIP_MODE alternating DATA.FLIP 0": "DATA.FLIP 0.5",
    "DATA.CACHE_GB 5 DATA.NAME packed": "TRAIN.DATASET s3://bucket/pack",
    "DATA.TIMEOUT_S 9 DATA.NAME packed": "TEST.DATASET https://host/pack",
    "DIST.BUCKET_MB 5 DIST.SHARD fsdp": "DIST.SHARD zero1", "DISTILL.KIND hard": TEACHER,
    "DISTILL.ALPHA 0.2": TEACHER, "DISTILL.KWARGS.width 3": TEACHER, "DISTILL.TEMPERATURE 2": TEACHER,
    **{f"EMA.{words}": "EMA.HALF_LIFE 10" for words in ("RAMP_UP 0", "BUFFERS copy", "EVERY_STEPS 2", "START_EPOCH 1")},
    "FINETUNE.EMA False": "FINETUNE.WEIGHTS pretrained", "FINETUNE.HEAD_RESET True": "FINETUNE.WEIGHTS pretrained",
    "LOSS.BCE_REDUCTION sum": "LOSS.NAME bce", "LOSS.BCE_TARGET_THRESHOLD 0": "LOSS.NAME bce",
    "DISTILL.WEIGHTS pretrained": TEACHER, "DIST.CPU_OFFLOAD True": "DIST.SHARD fsdp",
    "OPTIM.BETAS [0.9,0.9]": "OPTIM.NAME adamw", "OPTIM.EPS 1e-6": "OPTIM.NAME adamw",
    "OPTIM.CLIP_NORM 1 OPTIM.CLIP agc OPTIM.CLIP_LIMIT 0.1": "OPTIM.CLIP norm OPTIM.CLIP_LIMIT 0",
    "MODEL.INIT fan_out MODEL.PRETRAINED True": "MODEL.PRETRAINED False",
    "LOG.NUM_IMAGES 3 LOG.TENSORBOARD False": "LOG.TRACKERS [tensorboard]",
    "LOSS.FOCAL_GAMMA 3": "LOSS.NAME focal",
    "OPTIM.STEPS [30]": "OPTIM.LR_POLICY steps", "OPTIM.LR_MULT 0.2": STEPS,
    f"OPTIM.MIN_LR 0.1 {STEPS}": "OPTIM.LR_POLICY exp OPTIM.STEPS []",
    "OPTIM.CLIP_LIMIT 1": "OPTIM.CLIP value", "OPTIM.LR_SCALE_BATCH 512": "OPTIM.LR_SCALE linear",
    "OPTIM.WARMUP_FACTOR 0.5 OPTIM.WARMUP_EPOCHS 0": "OPTIM.WARMUP_EPOCHS 1",
    "OPTIM.DAMPENING 0.5 OPTIM.NESTEROV False OPTIM.NAME adamw": "OPTIM.NAME SGD",
    "TRAIN.IM_SIZE_EPOCHS [0,8]": "TRAIN.IM_SIZE_START 128", "TRAIN.LOAD_OPT False": "MODEL.WEIGHTS a.pth",
    "TRAIN.IM_SIZE_MULTIPLE 16": "TRAIN.IM_SIZE_START 128 TRAIN.IM_SIZE_EPOCHS [0,8]",
    "TRAIN.MAX_ROLLBACKS 1": "TRAIN.ON_NAN rollback", "TRAIN.SPLIT train2 DATA.NAME cifar10": "DATA.NAME imagefolder",
    "TEST.SPLIT train DATA.NAME shapes": "DATA.NAME packed", "TEST.IM_SIZE 300 TEST.CROP squash": "TEST.CROP center",
}  # fmt: skip


def test_an_option_without_effect_is_named_with_what_it_needs_and_each_condition_has_a_case():
    for unused, more in CASES.items():
        (problem,) = find_unused_options(load_cfg(None, unused.split()))
        assert unused.startswith(problem.key) and "has no effect; it needs " in problem.message
        assert find_unused_options(load_cfg(None, f"{unused} {more}".split())) == [], unused
    needs = {key: option.needs for key, option in OPTIONS.items() if option.needs}
    assert len(needs) == len(CASES) and all(any(case.startswith(key) for case in CASES) for key in needs)
    assert set(needs.values()) == set(CONDITIONS)


def test_configs_that_are_there_have_no_such_option(tmp_path):
    words = ["DATA.NAME", "packed", "DATA.CROP_PADDING", "2", "DATA.CROP_SCALE", "[0.5, 1]"]
    assert find_unused_options(load_cfg(None, words)) == [], "a pack tells its crop only when it is opened"
    for arch, (lr, wd, batch) in ORIGINAL_FILES.items():
        (tmp_path / f"{arch}.yaml").write_text(ORIGINAL.format(arch=arch, lr=lr, wd=wd, batch=batch))
    for path in [*FILES, *tmp_path.iterdir()]:
        assert find_unused_options(cfg := load_cfg(str(path))) == [], path
    (tmp_path / "dump.yaml").write_text(cfg.dump())  # which sets every option
    assert find_unused_options(load_cfg(str(tmp_path / "dump.yaml"))) == [], path


def test_the_log_names_such_options_and_the_folders(small_cfg, tmp_path, image_folder):
    train_model(small_cfg("OPTIM.STEPS", "[1]", "OPTIM.MAX_EPOCH", 1, "TEST.DATASET", f"{image_folder}/."))
    log = (tmp_path / "out" / "train.log").read_text()
    assert "OPTIM.STEPS (command line): [1] has no effect; it needs OPTIM.LR_POLICY steps" in log
    assert log.count("has no effect") == 1
    assert f"validation data: {image_folder}/. (TEST.DATASET), training data: {image_folder}" in log
