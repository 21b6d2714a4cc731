"""MODEL.COMPILE: every step of a resumed run executes the same compiled graph as in an uninterrupted run."""

from collections.abc import Iterator

import pytest
import torch
from support.runs import assert_same_run, train_and_stop

from distribuuuu.trainer import train_model

# Evaluations in batches of another size than those of training, the last one shorter; 48 and 37 images.
COMPILED = ("MODEL.COMPILE", "default", "TEST.BATCH_SIZE", 14, "EMA.HALF_LIFE", 30, "CHECKPOINT.EVERY_STEPS", 2)
PLACES = {"mid-epoch": (0, 2), "before the evaluation": (0, 4), "after the evaluation": (1, 0)}


@pytest.fixture
def executed(monkeypatch) -> Iterator[list[tuple]]:
    """Replace the compiler by one that records each execution of a graph: its code, and the shapes of its inputs."""
    calls: list[tuple] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: list, **options):
        shapes = [(tuple(map(str, value.shape)), tuple(map(str, value.stride()))) if torch.is_tensor(value) else value
                  for value in inputs]  # fmt: skip
        key = (graph.code, str(shapes))

        def run(*args):
            calls.append((*key, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return graph.forward(*args)

        return run

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_graph)
    torch._dynamo.reset()
    yield calls
    torch._dynamo.reset()


def train_anew(cfg, calls: list[tuple]) -> list[tuple]:
    """Train as in a new process, which has compiled nothing; return the executions."""
    torch._dynamo.reset()
    calls.clear()
    train_model(cfg)
    return calls[:]


@pytest.mark.slow
def test_a_resumed_run_executes_the_graphs_of_an_uninterrupted_run(small_cfg, tmp_path, monkeypatch, executed):
    words = (*COMPILED, "MODEL.PRECISE_BN", 24)
    expected = train_anew(small_cfg(*words, "OUT_DIR", tmp_path / "uninterrupted"), executed)
    # Each step, and each of the three evaluation batches of two kinds of weights, normalizes and runs the model.
    num = 2 * (4 + 3 * 2) * 2
    assert len(expected) >= num and len({shapes for _, shapes, *_ in expected}) >= 4
    for name, place in PLACES.items():
        cfg = small_cfg(*words, "OUT_DIR", tmp_path / name)
        train_and_stop(cfg, place, monkeypatch)
        resumed = train_anew(cfg, executed)
        assert resumed == expected[-len(resumed) :] and len(resumed) >= num // 2, name


@pytest.mark.slow
def test_each_size_of_progressive_resizing_is_compiled(small_cfg, executed):
    sizes = ("TRAIN.IM_SIZE_START", 8, "TRAIN.IM_SIZE", 26, "TRAIN.IM_SIZE_EPOCHS", [0, 3], "TRAIN.IM_SIZE_MULTIPLE", 6)
    words = ("TEST.IM_SIZE", 26, "OPTIM.MAX_EPOCH", 4, "TRAIN.EVAL_PERIOD", 4, "MODEL.COMPILE", "default", *sizes)
    calls = train_anew(small_cfg(*words), executed)
    steps = [shapes for _, shapes, has_grad, _ in calls if has_grad and "'12', '3'" in shapes]
    assert len(set(steps)) == 2 * 4 and len(steps) == 2 * 4 * 4  # normalization and model


@pytest.mark.slow
def test_a_compiled_run_resumes_bitwise(small_cfg, tmp_path, monkeypatch):
    train_model(small_cfg(*COMPILED, "OUT_DIR", tmp_path / "uninterrupted"))
    torch._dynamo.reset()
    train_and_stop(small_cfg(*COMPILED), PLACES["mid-epoch"], monkeypatch)
    torch._dynamo.reset()
    train_model(small_cfg(*COMPILED))
    assert_same_run(tmp_path / "uninterrupted", tmp_path / "out")
