"""Counters and reductions."""

import numpy as np
import pytest
import torch
from support.processes import on_processes

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.ddp import broadcast_buffers, wrap_model
from distribuuuu.distributed.process_group import process_group
from distribuuuu.launch.detect import detect_launch
from distribuuuu.tasks.metrics import ClassificationMeter, MultilabelMeter, average_precisions, scaled_all_reduce

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
    with process_group(detect_launch(), CPU, 60):
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
    assert dist.local_main_first(lambda: 5) == 5
    dist.barrier()
    model = torch.nn.BatchNorm1d(2)
    broadcast_buffers(model)
    assert wrap_model(model, CPU, torch.ones(2, 2)) is model
    assert dist.differentiable_sum(torch.ones(1)).item() == 1


def fetch(log) -> str:
    with process_group(detect_launch(), CPU, 60):
        return dist.local_main_first(lambda: fetch_once(log))


def fetch_once(log) -> str:
    if log.exists():
        return "read"
    log.write_text("here")
    return "fetched"


def test_one_process_of_a_node_fetches_and_the_others_wait(tmp_path):
    assert on_processes(3, fetch, tmp_path / "log") == ["fetched", "read", "read"]


def fail_first() -> str:
    with process_group(detect_launch(), CPU, 60):
        try:
            dist.local_main_first(lambda: 1 / 0)
        except ZeroDivisionError:
            return "own error"
        except dist.PeerError as error:
            return str(error)


def test_when_the_first_fails_the_others_stop_with_its_reason():
    assert on_processes(2, fail_first) == ["own error", "division by zero"]


def naive_average_precision(scores: np.ndarray, applies: np.ndarray) -> float:
    """Return the average precision of one class, threshold by threshold, as scikit-learn defines it."""
    total = recall = 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        hits = int(applies[chosen].sum())
        total += (hits / applies.sum() - recall) * hits / chosen.sum()
        recall = hits / applies.sum()
    return total


def scored(num: int, seed: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of few or many levels, so with many or few ties, and labels; the fourth class never applies."""
    random = np.random.default_rng(seed)
    scores = random.integers(-levels, levels, (num, 4)).astype(np.float32) / 8
    applies = random.random((num, 4)) < [0.1, 0.5, 0.9, 0.0]
    applies[0, :3] = True
    return scores, applies


@pytest.mark.parametrize("num", [1, 2, 7, 100])
@pytest.mark.parametrize("levels", [1, 4, 10**6])
def test_average_precision_is_that_of_the_definition(num, levels, monkeypatch):
    for seed in range(5):
        scores, applies = scored(num, seed, levels)
        expected = [naive_average_precision(scores[:, number], applies[:, number]) for number in range(3)]
        found = average_precisions(torch.from_numpy(scores), torch.from_numpy(applies))
        assert found[:3].tolist() == pytest.approx(expected, abs=1e-12) and found[3].isnan()
        with monkeypatch.context() as patch:
            patch.setattr("distribuuuu.tasks.metrics._MOST_SCORES", 2 * num)
            in_parts = average_precisions(torch.from_numpy(scores), torch.from_numpy(applies))
        assert torch.equal(in_parts.nan_to_num(), found.nan_to_num())


def test_the_order_of_images_and_of_ties_changes_no_bit():
    scores, applies = map(torch.from_numpy, scored(500, 0, 4))
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    one, other = average_precisions(scores, applies), average_precisions(scores[order], applies[order])
    assert torch.equal(one[:3], other[:3])


def test_known_values_and_scores_that_are_none():
    def precision(scores: list, applies: list) -> float:
        return float(average_precisions(torch.tensor([scores]).T, torch.tensor([applies]).T))

    assert precision([0.9, 0.8, 0.1], [1, 1, 0]) == 1
    assert precision([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == pytest.approx(5 / 6)  # scikit-learn's own example
    assert precision([0.5] * 4, [1, 0, 0, 0]) == 0.25
    assert precision([float("nan"), 0.0, 1.0], [1, 0, 0]) == pytest.approx(1 / 3)


def test_map_is_the_mean_over_classes_that_apply_and_reading_resets():
    scores, applies = scored(40, 3, 10)
    targets = torch.from_numpy(applies).float()
    meter = MultilabelMeter(4, CPU)
    for part in (slice(0, 1), slice(1, 30), slice(30, 40)):
        logits = torch.from_numpy(scores[part]).clone().requires_grad_()
        meter.update(logits.sum() * 0 + part.start, logits, targets[part] * 0.3 + 0.3)  # 0.6 applies, 0.3 does not
        logits.data.zero_()  # the meter keeps a copy
    expected = np.mean([naive_average_precision(scores[:, number], applies[:, number]) for number in range(3)])
    assert meter.read() == pytest.approx({"count": 40, "loss": (29 + 300) / 40, "map": 100 * expected})
    empty = meter.read()
    assert empty["count"] == 0 and np.isnan(empty["loss"]) and np.isnan(empty["map"])


@pytest.mark.parametrize("limit", [10**6, 100])
def test_counters_that_were_saved_and_loaded_read_the_same(limit, monkeypatch):
    monkeypatch.setattr("distribuuuu.tasks.metrics._MOST_SAVED", limit)
    scores, applies = (torch.from_numpy(array).float() for array in scored(40, 3, 10))
    for make in (lambda: MultilabelMeter(4, CPU), lambda: ClassificationMeter(2, CPU)):
        whole, before, after, anew = make(), make(), make(), make()
        is_kept = limit > 120 or isinstance(whole, ClassificationMeter)
        after.update(torch.tensor(7.0), scores, applies)  # replaced by what is loaded
        for meter, parts in ((whole, (0, 30, 40)), (before, (0, 30))):
            for start, end in zip(parts, parts[1:], strict=False):
                meter.update(torch.tensor(start / 7), scores[start:end], applies[start:end])
        after.load_state_dict([before.state_dict()])
        for meter in (after, anew):
            meter.update(torch.tensor(30 / 7), scores[30:], applies[30:])
        assert after.read() == (whole if is_kept else anew).read()
        after.load_state_dict([])
        assert after.read()["count"] == 0


def read_scores_share() -> dict:
    with process_group(detect_launch(), CPU, 60):
        meter = MultilabelMeter(4, CPU)
        scores, applies = scored(41, 3, 10)
        of_rank = [slice(0, 0), slice(0, 5), slice(5, 41)][dist.rank()]  # rank 0 sees nothing
        if dist.rank():
            logits, targets = torch.from_numpy(scores[of_rank]), torch.from_numpy(applies[of_rank]).float()
            meter.update(torch.tensor(float(dist.rank())), logits, targets)
        return meter.read()


def test_map_over_processes_is_that_of_all_images():
    meter, (scores, applies) = MultilabelMeter(4, CPU), scored(41, 3, 10)
    meter.update(torch.tensor((5 + 2 * 36) / 41), torch.from_numpy(scores), torch.from_numpy(applies).float())
    expected = meter.read()
    results = on_processes(3, read_scores_share)
    assert [result["map"] for result in results] == [expected["map"]] * 3
    assert results[0] == pytest.approx(expected)
