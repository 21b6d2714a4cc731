"""Config files: the format of every file, and the facts of the published recipes."""

import math
import os
import re
from pathlib import Path

import pytest
import torch
from support.images import draw_folder
from support.recipe_facts import BASELINES, FACTS
from support.recipe_measures import FILES, decay_of_parameters, measure, meta_model, recipe
from support.runs import ROOT, small_options
from support.tables import each_row, slow

from distribuuuu.config import load_cfg
from distribuuuu.config.locate import find_base, find_config, find_shipped
from distribuuuu.data.loader import build_loader
from distribuuuu.engine.build import build_run
from distribuuuu.launch.detect import detect_launch
from distribuuuu.trainer import train_epoch, train_model

# Facts that are compared by tests of their own.
TESTED_ALONE = {"reported", "decay", "max side of the pack"}
# What every recipe states, also where it is the default.
STATED = ("MODEL.ARCH", "TRAIN.BATCH_SIZE", "TRAIN.IM_SIZE", "TEST.IM_SIZE", "DATA.CROP", "DATA.FLIP", "AUG.POLICY",
          "OPTIM.NAME", "OPTIM.MAX_EPOCH", "OPTIM.LR_POLICY", "OPTIM.BASE_LR", "OPTIM.WARMUP_EPOCHS",
          "OPTIM.WEIGHT_DECAY", "OUT_DIR")  # fmt: skip


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT / "configs"))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_states_its_recipe_the_command_and_the_accuracy(path):
    header = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert re.search(rf"--cfg ((configs/)?{relative(path)[:-5]}(?![\w/-])|{path.stem} )", header)
    assert "top-1" in header and "easured" in header
    cfg = recipe(relative(path).removesuffix(".yaml"))
    assert [key for key in STATED if key not in cfg.origins] == [] and "_BASE_" not in path.read_text()
    is_2021 = path.parent.name == "imagenet2021"
    assert is_2021 or cfg.TRAIN.GLOBAL_BATCH_SIZE, "the same on any number of processes"
    assert (cfg.DIST.PROCESSES > 0) == is_2021


def test_the_old_names_of_the_rows_of_2021_find_them():
    for name in BASELINES:
        expected = str(ROOT / "configs" / "imagenet2021" / f"{name}.yaml")
        for given in (f"imagenet/{name}", f"configs/imagenet/{name}.yaml", f"imagenet/{name}.yaml"):
            assert os.path.samefile(find_config(given), expected)
        assert find_shipped(f"imagenet/{name}") == find_shipped(f"imagenet2021/{name}") == [expected]
        assert find_base(f"imagenet/{name}", "/no/folder") == expected


def test_each_published_recipe_has_a_file_and_its_header_the_published_figures():
    names = {relative(path).removesuffix(".yaml") for path in FILES}
    others = {"cifar10/resnet20_fast", "cifar10/airbench94", "cifar10/airbench94_muon"}  # these have tests of their own
    assert {name for name in names if name.startswith(("imagenet", "cifar10"))} == {*FACTS, *others}
    for name, facts in FACTS.items():
        header = (ROOT / "configs" / f"{name}.yaml").read_text()
        figures = [*facts["reported"]]
        if name.removeprefix("imagenet2021/") in BASELINES:
            figures += [f"{facts['params']:.3f}", str(facts["global batch"])]
        if "max side of the pack" in facts:
            figures.append(f"at most {facts['max side of the pack']} px")
        assert [figure for figure in figures if figure not in header] == [], name


def near(expected):
    """Return the expected value with a tolerance for the numbers in it."""
    if isinstance(expected, (list, tuple)):
        return type(expected)(map(near, expected))
    return pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected


@pytest.mark.project
@each_row("name", FACTS)
def test_a_recipe_has_the_published_facts(name):
    cfg = recipe(name)
    for fact, expected in FACTS[name].items():
        if fact not in TESTED_ALONE:
            found = measure(cfg, fact)
            if isinstance(expected, dict):
                found, expected = [found[key] for key in expected], [*expected.values()]
            assert found == near(expected), fact


@pytest.mark.project
@pytest.mark.parametrize("name", FACTS)
def test_a_parameter_has_the_published_weight_decay(name):
    decay, is_exempt = FACTS[name]["decay"]
    trainable = {key: value for key, value in meta_model(recipe(name)).named_parameters() if value.requires_grad}
    expected = {key: 0.0 if is_exempt(key, value) else decay for key, value in trainable.items()}
    assert decay_of_parameters(recipe(name)) == pytest.approx(expected)
    assert {*expected.values()} == ({decay} if is_exempt.__name__ == "no_parameter" else {0.0, decay})


@pytest.fixture(scope="module")
def twenty_images(tmp_path_factory):
    root = tmp_path_factory.mktemp("twenty")
    for split, num in (("train", 2), ("val", 1)):
        draw_folder(root, split, {f"class{number}": num for number in range(10)}, size=(80, 72))
    return root


# One of each source and family of models.
OTHERS = ("resnet18_ffcv_16", "deit_tiny", "regnetx_004_pycls", "resnet50_torchvision_v2", "resnet50_a1", "deit3_small",
          "plain_vit_small", "efficientnet_b0_pycls")  # fmt: skip


@pytest.mark.parametrize("name", ["cifar10/resnet20", *(slow(f"imagenet/{name}") for name in OTHERS)])
def test_two_steps_of_a_recipe(name, twenty_images, tmp_path):
    is_cifar = name.startswith("cifar10")
    words = ["TRAIN.DATASET", twenty_images, "DATA.NAME", "imagefolder", "MODEL.NUM_CLASSES", 10, "TRAIN.WORKERS", 0,
             "TRAIN.BATCH_SIZE", 4 if is_cifar else 8, "TRAIN.GLOBAL_BATCH_SIZE", 8, "TEST.CROP_SIZE", 0, "RNG_SEED", 1,
             "OUT_DIR", tmp_path, "LOG.TENSORBOARD", False, "OPTIM.WARMUP_EPOCHS", 0]  # fmt: skip
    words += ["DATA.CROP", "pad"] if is_cifar else ["TRAIN.IM_SIZE", 64, "TEST.IM_SIZE", 64]
    if recipe(name).TRAIN.IM_SIZE_START:
        words += ["TRAIN.IM_SIZE_START", 32]
    if recipe(name).TRAIN.AMP == "fp16":  # takes 20 s on a CPU, and skips the first steps
        words += ["TRAIN.AMP", "bf16"]
    cfg, launch, device = recipe(name, *words), detect_launch(), torch.device("cpu")
    loader = build_loader(cfg, launch, device, train=True)
    run = build_run(cfg, loader, build_loader(cfg, launch, device, train=False))
    state, rows = run.state, []
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    with run.stop, run.log:
        run.log.add_train_row = lambda *record: rows.append(record[3])
        train_epoch(run)
    assert state.step == loader.num_steps == 2 and rows[-1]["count"] == 16 and math.isfinite(rows[-1]["loss"])
    changed = [not torch.equal(old, new) for old, new in zip(before, state.model.parameters(), strict=True)]
    assert sum(changed) > 0.9 * len(changed)


def test_the_rows_of_2021_warn_on_another_number_of_processes_unless_the_batch_is_set(small_cfg, tmp_path):
    said = "the recipe is for 8 processes, a global batch of 96 images; here it is 12; to train as intended, add"
    for number, words in enumerate([(), ("TRAIN.GLOBAL_BATCH_SIZE", 24)]):
        file = tmp_path / f"{number}.yaml"
        file.write_text("OPTIM: {BASE_LR: 0.1}\nDIST: {PROCESSES: 8}\n")
        options = dict(zip(*[iter(small_options(tmp_path, tmp_path / str(number)))] * 2, strict=True))
        del options["OPTIM.BASE_LR"]
        train = ("TRAIN.DATASET", small_cfg().TRAIN.DATASET, "OPTIM.MAX_EPOCH", 1)
        words = [word for pair in options.items() for word in pair] + [str(word) for word in (*train, *words)]
        train_model(load_cfg(str(file), words))
        log = (tmp_path / str(number) / "train.log").read_text()
        assert (f"{said} TRAIN.GLOBAL_BATCH_SIZE 96" in log) == (number == 0)
