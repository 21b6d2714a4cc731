"""Counters and reductions."""

import pytest
import torch
from conftest import on_processes

from distribuuuu import distributed as dist
from distribuuuu.launch import detect_launch
from distribuuuu.metrics import ClassificationMeter, scaled_all_reduce
from distribuuuu.parallel import broadcast_buffers, wrap_model

CPU = torch.device("cpu")


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, 7, generator=generator)
    labels = torch.randint(0, 7, (size,), generator=generator)
    return torch.nn.functional.cross_entropy(logits, labels), logits, labels


def by_hand(batches) -> dict:
    """Count with a loop over single images."""
    count = top1 = top3 = loss = 0
    for _, logits, labels in batches:
        for row, label in zip(logits, labels, strict=True):
            order = row.argsort(descending=True).tolist()
            count, top1, top3 = count + 1, top1 + (order[0] == label), top3 + (int(label) in order[:3])
            loss += float(torch.logsumexp(row, 0) - row[label])
    return {"count": count, "loss": loss / count, "top1": 100 * int(top1) / count, "topk": 100 * top3 / count}


def test_batches_of_any_size_weigh_by_their_images():
    batches = [batch(size, size) for size in (1, 5, 64, 3)]
    meter = ClassificationMeter(3, CPU)
    for loss, logits, labels in batches:
        meter.update(loss, logits, labels)
    assert meter.read() == pytest.approx(by_hand(batches))
    assert meter.read()["count"] == 0


def test_update_leaves_no_graph_behind():
    loss, logits, labels = batch(4, 0)
    logits.requires_grad_()
    meter = ClassificationMeter(1, CPU)
    meter.update((logits.sum() * 0 + loss), logits, labels)
    assert not meter._sums.requires_grad


def read_share() -> tuple[dict, list[float]]:
    with dist.process_group(detect_launch(), CPU, 60):
        meter = ClassificationMeter(3, CPU)
        for number in range(dist.rank()):  # rank 0 sees nothing
            meter.update(*batch(3 + number, 10 * dist.rank() + number))
        mean = scaled_all_reduce([torch.tensor([float(dist.rank())]), torch.ones(2)])
        return meter.read(), [mean[0].item(), mean[1].sum().item()]


def test_sums_are_reduced_before_they_are_divided():
    batches = [batch(3 + number, 10 * rank + number) for rank in range(3) for number in range(rank)]
    for metrics, mean in on_processes(3, read_share):
        assert metrics == pytest.approx(by_hand(batches))
        assert mean == [1.0, 2.0]


def test_everything_works_without_a_group():
    assert scaled_all_reduce([torch.ones(1)])[0].item() == 1
    assert (dist.rank(), dist.world_size(), dist.is_main(), dist.backend()) == (0, 1, True, "none")
    assert dist.broadcast_object("x") == "x" and dist.gather_objects(3) == [3]
    assert dist.call_first_on_node(lambda: 5) == 5
    dist.barrier()
    model = torch.nn.BatchNorm1d(2)
    broadcast_buffers(model)
    assert wrap_model(model, CPU, torch.ones(2, 2)) is model
    assert dist.differentiable_sum(torch.ones(1)).item() == 1


def fetch(log) -> str:
    with dist.process_group(detect_launch(), CPU, 60):
        return dist.call_first_on_node(lambda: fetch_once(log))


def fetch_once(log) -> str:
    if log.exists():
        return "read"
    log.write_text("here")
    return "fetched"


def test_one_process_of_a_node_fetches_and_the_others_wait(tmp_path):
    assert on_processes(3, fetch, tmp_path / "log") == ["fetched", "read", "read"]


def fail_first() -> str:
    with dist.process_group(detect_launch(), CPU, 60):
        try:
            dist.call_first_on_node(lambda: 1 / 0)
        except ZeroDivisionError:
            return "own error"
        except dist.PeerError as error:
            return str(error)


def test_when_the_first_fails_the_others_stop_with_its_reason():
    assert on_processes(2, fail_first) == ["own error", "division by zero"]
