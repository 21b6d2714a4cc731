"""Less memory: ZeRO-1 and FSDP give the run of DDP, recomputed activations the same step to the last bit."""

from collections import Counter
from pathlib import Path

import pytest
import timm.optim
import torch
import torchvision
from support.processes import on_processes
from support.runs import assert_close, make_cfg, newest, records, train_and_kill
from support.tables import slow
from torch import nn

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.activation_checkpoint import find_blocks, recompute_blocks
from distribuuuu.distributed.comm import to_local
from distribuuuu.distributed.process_group import process_group
from distribuuuu.distributed.sharding import build_parallelize_fn, inference, is_sharded
from distribuuuu.distributed.zero1 import PartitionedOptimizer
from distribuuuu.engine.state import TrainState
from distribuuuu.launch.detect import detect_launch
from distribuuuu.models import build_model
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.precision import build_clipper
from distribuuuu.tasks.metrics import Meter
from distribuuuu.trainer import train_model

CPU = torch.device("cpu")
# Clipped, accumulated and averaged, with groups of their own; processes have different numbers of evaluation batches.
# With Adam's own epsilon, gradients that are nothing but rounding (of the keys' biases) would be steps of full size.
ALL_ON = (
    "MODEL.ARCH", "timm/test_vit", "MODEL.KWARGS.depth", 2, "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 32,
    "TEST.BATCH_SIZE", 18, "TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.BATCH_SIZE", 3,
    "OPTIM.NAME", "adamw", "OPTIM.EPS", 1e-4,
    "OPTIM.BASE_LR", 2e-3, "OPTIM.WEIGHT_DECAY", 0.05, "OPTIM.NORM_WEIGHT_DECAY", 0.0, "OPTIM.LAYER_DECAY", 0.8,
    "OPTIM.CLIP_NORM", 0.5, "EMA.HALF_LIFE", 30, "CHECKPOINT.EVERY_STEPS", 3,
    "OPTIM.MAX_EPOCH", 1, "OPTIM.WARMUP_EPOCHS", 0,
)  # fmt: skip
needs_fsdp = pytest.mark.skipif(torch.__version__ < (2, 7), reason="FSDP2 on a CPU needs torch 2.7")
SHARDED = ["zero1", pytest.param("fsdp", marks=[needs_fsdp, pytest.mark.slow])]
DROPS = ("MODEL.KWARGS.drop_path_rate", 0.3, "MODEL.KWARGS.proj_drop_rate", 0.2)
KINDS = {
    "ddp": (), "zero1": ("DIST.SHARD", "zero1"), "fsdp": ("DIST.SHARD", "fsdp"),
    "fsdp, recomputed": ("DIST.SHARD", "fsdp", "MODEL.ACT_CHECKPOINT", True),
}  # fmt: skip


def assert_same_content(one: dict, other: dict, tolerance: float) -> None:
    """Compare the weights, their average and the optimizer's state; with a tolerance of 0 bit by bit."""
    assert_close(one, other, tolerance)
    averages = [{"state_dict": content["ema_state_dict"]} for content in (one, other)]
    assert_close(*averages, tolerance)
    states = [content["optimizer"]["state"] for content in (one, other)]
    assert list(states[0]) == list(states[1]) and len(states[0]) > 10
    for index, entry in states[0].items():
        for name, value in entry.items():
            torch.testing.assert_close(value, states[1][index][name], rtol=tolerance, atol=tolerance)
    groups = [[group["params"] for group in content["optimizer"]["param_groups"]] for content in (one, other)]
    assert groups[0] == groups[1] and len(groups[0]) > 3


def evaluations(out_dir: Path | str) -> list[float]:
    """Return the losses of the evaluations of each epoch, of the weights and of their average."""
    found = [entry for entry in records(out_dir) if entry["kind"].startswith("eval")]
    assert len(found) in (2, 4) and all(entry["count"] == 37 for entry in found)
    return [entry["loss"] for entry in found]


@pytest.fixture(scope="module")
def run(image_folder, tmp_path_factory):
    """Return run(kind, processes, more words): the folder of a finished run of ALL_ON, each made only once."""
    from support.runs import small_options

    done = {}

    def make(kind: str, num: int, *words) -> Path:
        key = (kind, num, words)
        if key not in done:
            out_dir = tmp_path_factory.mktemp("run")
            cfg = load_cfg(None, small_options(image_folder, out_dir, *ALL_ON, *KINDS[kind], *words))
            on_processes(num, train_model, cfg)
            done[key] = out_dir
        return done[key]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("kind", ["zero1", *(pytest.param(kind, marks=needs_fsdp) for kind in KINDS if "fsdp" in kind)])
def test_a_sharded_run_is_the_run_of_ddp(run, kind, num):
    if num == 3 and "," in kind:
        pytest.skip("2 processes tell")
    words = ("TRAIN.BATCH_SIZE", 2) if num == 3 else ()
    expected, got = run("ddp", num, *words, *DROPS), run(kind, num, *words, *DROPS)
    assert_same_content(newest(got), newest(expected), 1e-5)
    assert evaluations(got) == pytest.approx(evaluations(expected), rel=1e-5)
    if num == 2 and kind == "zero1":
        assert_same_content(newest(got), newest(expected), 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARDED)
def test_a_sharded_run_resumes_bitwise(run, small_cfg, kind):
    on_processes(2, train_and_kill, small_cfg(*ALL_ON, *KINDS[kind], *DROPS), (0, 3))
    cfg = small_cfg(*ALL_ON, *KINDS[kind], *DROPS)
    on_processes(2, train_model, cfg)
    assert_same_content(newest(cfg.OUT_DIR), newest(run(kind, 2, *DROPS)), 0)


@needs_fsdp
@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [
    (("ddp", 1), ("fsdp", 2)), (("fsdp", 2), ("ddp", 1)), (("zero1", 2), ("fsdp", 3)), (("fsdp", 3), ("zero1", 2)),
])  # fmt: skip
def test_a_checkpoint_of_one_kind_goes_on_as_another(run, small_cfg, first, second):
    words = {num: ("TRAIN.BATCH_SIZE", 2 if num == 3 else 3) for num in (1, 2, 3)}
    on_processes(first[1], train_and_kill, small_cfg(*ALL_ON, *KINDS[first[0]], *words[first[1]]), (0, 3))
    cfg = small_cfg(*ALL_ON, *KINDS[second[0]], *words[second[1]])
    on_processes(second[1], train_model, cfg)
    assert_same_content(newest(cfg.OUT_DIR), newest(run("ddp", 1)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("kind, tolerance", [("ddp", 0), ("zero1", 0), pytest.param("fsdp", 1e-6, marks=needs_fsdp)])
def test_one_process_alone_or_in_a_group_has_nothing_to_share(run, small_cfg, kind, tolerance, backend):
    """The tolerance is that of the norm by which sharded gradients are clipped."""
    cfg = small_cfg(*ALL_ON, *KINDS[kind], "DIST.BACKEND", backend)
    on_processes(1, train_model, cfg)
    assert_same_content(newest(cfg.OUT_DIR), newest(run("ddp", 1)), tolerance)
    assert evaluations(cfg.OUT_DIR) == pytest.approx(evaluations(run("ddp", 1)), rel=tolerance)


@pytest.mark.slow
@needs_fsdp
@pytest.mark.parametrize(("words", "tolerance"), [
    (("MODEL.SYNCBN", True, "MODEL.PRECISE_BN", 24), 1e-5),
    (("OPTIM.NAME", "lamb", "OPTIM.BASE_LR", 0.01, "OPTIM.NESTEROV", False), 1e-5),
    (("TRAIN.AMP", "bf16", "MODEL.KWARGS.width", 8), 1e-3),
], ids=["sgd, batch norm", "lamb", "bf16"])  # fmt: skip
def test_fsdp_goes_with_other_options(small_cfg, tmp_path, words, tolerance):
    words = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "EMA.HALF_LIFE", 40, "MODEL.CHANNELS_LAST", True, "OPTIM.BASE_LR", 0.05,
             *words)  # fmt: skip
    kinds = {"ddp": (), "fsdp": ("DIST.SHARD", "fsdp", "MODEL.ACT_CHECKPOINT", True)}
    for kind, more in kinds.items():
        on_processes(2, train_model, small_cfg(*words, *more, "OUT_DIR", tmp_path / kind))
    assert_close(newest(tmp_path / "fsdp"), newest(tmp_path / "ddp"), tolerance)
    losses = [evaluations(tmp_path / kind) for kind in kinds]
    assert losses[0] == pytest.approx(losses[1], rel=max(tolerance, 1e-5))


def measure_parts(cfg) -> dict:
    """Return what one of two processes holds after a step, clipped to 0.5, and what it gives for a checkpoint."""
    with process_group(detect_launch(), CPU, 60):
        torch.manual_seed(0)
        model = build_parallelize_fn(cfg, CPU)(build_model(cfg))
        optimizer = build_optimizer(cfg, model)
        model(torch.ones(2, 3, 32, 32)).square().sum().backward()
        if not is_sharded(model):
            dist.scaled_all_reduce([weight.grad for weight in model.parameters()])
        build_clipper(cfg)(model.parameters())
        grads = [to_local(weight.grad) for weight in model.parameters()]
        squares = torch.stack([grad.square().sum() for grad in grads]).sum()
        optimizer.step()
        local = getattr(optimizer, "optim", optimizer).state
        state = TrainState(model, optimizer, seed=0, arch="", classes=(), global_batch=1, meter=Meter({}, 1, CPU))
        content = state.to_dict()
        return {
            "weights": sum(to_local(weight).numel() for weight in model.parameters()),
            "momentum": sum(to_local(entry["momentum_buffer"]).numel() for entry in local.values()),
            "norm": dist.scaled_all_reduce([squares], 1.0)[0].sqrt().item() if is_sharded(model) else squares.sqrt(),
            "saved": sum(value is not None for value in content["state_dict"].values()),
            "saved state": len(content["optimizer"]["state"]),
            "all": sum(weight.numel() for weight in model.parameters()),
        }


@pytest.mark.parametrize("kind", SHARDED)
def test_each_process_holds_its_part_and_only_the_main_one_gathers(small_cfg, kind):
    words = (*ALL_ON[:8], "OPTIM.CLIP_NORM", 0.5)
    parts = on_processes(2, measure_parts, small_cfg(*words, *KINDS[kind]))
    for part in parts:
        assert part["momentum"] < 0.51 * part["all"]
        assert part["weights"] < 0.51 * part["all"] if kind == "fsdp" else part["weights"] == part["all"]
        assert part["norm"] == pytest.approx(0.5, rel=1e-4)
    assert sum(part["momentum"] for part in parts) == parts[0]["all"]
    if kind == "fsdp":
        assert [part["saved"] for part in parts] == [len(build_model(small_cfg(*words)).state_dict()), 0]


def test_an_optimizer_with_groups_of_its_own_is_refused_by_zero1():
    def split(groups: list[dict]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one]} for group in groups for one in group["params"]], lr=0.1)

    with pytest.raises(ConfigError, match="^DIST.SHARD: got zero1; SGD makes parameter groups of its own; fix: "):
        PartitionedOptimizer([{"params": list(torch.nn.Linear(2, 2).parameters())}], split)


def test_what_does_not_go_together_is_refused_before_the_start():
    for words, message in [
        (("DIST.SHARD", "fsdp", "OPTIM.NAME", "muon"), "OPTIM.NAME .*muon does not work .* or one of .*adamw"),
        (("MODEL.ACT_CHECKPOINT", True, "MODEL.COMPILE", "default"), "MODEL.ACT_CHECKPOINT .*MODEL.COMPILE default"),
        (("DIST.SHARD", "fsdp", "TRAIN.AMP", "fp16"), "TRAIN.AMP .*use bf16"),
        (("DIST.SHARD", "fsdp", "MODEL.COMPILE", "reduce-overhead"), "MODEL.COMPILE .*; fix: set it to default"),
        (("MODEL.COMPILE", "step", "TRAIN.AMP", "fp16"), "TRAIN.AMP .*expected none or bf16 with MODEL.COMPILE step"),
        (("MODEL.COMPILE", "step", "DIST.BACKEND", "gloo"), "DIST.BACKEND .*expected auto with MODEL.COMPILE step"),
        (("MODEL.COMPILE", "step", "OPTIM.NAME", "lamb"), "OPTIM.NAME .*expected sgd, adam or adamw with"),
        (("MODEL.COMPILE", "step", "OPTIM.DAMPENING", 1, "OPTIM.NESTEROV", False), "OPTIM.DAMPENING .*expected 0 with"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            make_cfg(*words)


def evaluate_twice(cfg) -> tuple[float, float]:
    """Return the greatest logit before and after the weights of the head are made zero, with a bias of 7."""
    with process_group(detect_launch(), CPU, 60):
        model = build_parallelize_fn(cfg, CPU)(build_model(cfg)).eval()
        found = []
        for _ in range(2):
            with inference(model):
                found.append(model(torch.ones(1, 3, 16, 16)).max().item())
            to_local(model.fc.weight).zero_()
            to_local(model.fc.bias).fill_(7)
        model.train()(torch.ones(2, 3, 16, 16)).sum().backward()  # what was gathered is no inference tensor
        return tuple(found)


@needs_fsdp
def test_an_evaluation_sees_what_the_weights_have_become(small_cfg):
    for before, after in on_processes(2, evaluate_twice, small_cfg("DIST.SHARD", "fsdp")):
        assert before != 7 and after == 7


def build_small(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "resnet8":
        return build_model(load_cfg(None, ["MODEL.ARCH", "resnet8", "MODEL.NUM_CLASSES", "5"]))
    drops = {"drop_path_rate": 0.5, "proj_drop_rate": 0.3} if "vit" in name else {"drop_path_rate": 0.5}
    return timm.create_model(name, num_classes=5, **drops, **({"img_size": 32} if "vit" in name else {}))


def train_steps(model: nn.Module, autocast: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return all that a model holds after a few steps of momentum, and the loss of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(3):
        images, labels = torch.randn(6, 3, 32, 32), torch.randint(0, 5, (6,))
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            logits = model(images)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
    return {**model.state_dict(), "loss": loss.detach(), "next random number": torch.rand(3)}


STEPS = {"resnet8": None, "test_resnet": torch.bfloat16, "test_vit": torch.bfloat16, "test_convnext": None}


@pytest.mark.parametrize("name", ["resnet8", "test_vit", slow("test_resnet"), slow("test_convnext")])
def test_a_recomputed_step_is_the_same_to_the_last_bit(name):
    plain, recomputed = build_small(name), build_small(name)
    assert recompute_blocks(recomputed) >= 2
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    results = [train_steps(model.train(), STEPS[name]) for model in (plain, recomputed)]
    assert results[0].keys() == results[1].keys()
    assert [key for key in results[0] if not torch.equal(results[0][key], results[1][key])] == []


def count_saved(model: nn.Module, images: torch.Tensor) -> int:
    """Return the numbers that a forward pass keeps for the backward pass, beside weights."""
    own, kept, alive = {tensor.data_ptr() for tensor in model.parameters()}, {}, []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
            alive.append(tensor)  # so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    return sum(kept.values())


def test_it_keeps_little_for_the_backward_pass():
    images = torch.randn(6, 3, 32, 32)
    plain, recomputed = build_small("test_vit"), build_small("test_vit")
    recompute_blocks(recomputed)
    assert count_saved(recomputed, images) < count_saved(plain, images) / 4


@pytest.mark.slow
def test_the_blocks_of_known_models_and_a_model_without_blocks_is_answered():
    for builder, name, expected in [
        (torchvision.models.get_model, "resnet50", {"Bottleneck": 16}),
        (torchvision.models.get_model, "vit_b_16", {"EncoderBlock": 12}),
        (timm.create_model, "convnext_tiny", {"ConvNeXtBlock": 18}),
        (timm.create_model, "swin_tiny_patch4_window7_224", {"SwinTransformerBlock": 12}),
        (timm.create_model, "efficientnet_b0", {"InvertedResidual": 15}),
        (torchvision.models.get_model, "vgg11", {}),
    ]:  # fmt: skip
        with torch.device("meta"):
            blocks = find_blocks(builder(name)).values()
        assert Counter(type(block).__name__ for block in blocks) == expected
    with pytest.raises(ConfigError, match="MODEL.ACT_CHECKPOINT.*the model has no repeated blocks"):
        recompute_blocks(nn.Linear(2, 2))
