"""Classifiers of stored features: k-nearest neighbors and multinomial logistic regression.

Sizes of blocks are constants, so a result depends neither on a batch size nor on a number of workers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from distribuuuu.records.run_log import progress

# Neighbors, and the temperature of their votes (Wu et al., arXiv 1805.01978; the same in DINO, arXiv 2104.14294).
NUM_NEIGHBORS, TEMPERATURE = 20, 0.07
# L2 penalties of the linear probe, and the folds of the cross-validation that selects one.
PENALTIES, NUM_FOLDS = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6), 5
# Queries and neighbors of a block of similarities; images of a block of the linear probe.
_QUERIES, _NEIGHBORS, _ROWS = 1024, 16384, 8192


@torch.no_grad()
def predict_knn(rows: Tensor, labels: Tensor, queries: Tensor, num_classes: int, device: torch.device) -> Tensor:
    """Return the class of each query (M, dim), int64 (M,), by votes of its neighbors among the rows (N, dim).

    A vote has the weight exp(cosine / temperature). Similarities are computed on the device.
    """
    dtype, found, predicted = torch.promote_types(rows.dtype, torch.float32), [], []
    for block in progress(queries.split(_QUERIES), label="k-NN"):
        block, start = F.normalize(block.to(device, dtype), dim=1), 0
        best, indices = block.new_empty(len(block), 0), torch.empty(len(block), 0, dtype=torch.int64, device=device)
        for part in rows.split(_NEIGHBORS):
            similarities = torch.cat([best, block @ F.normalize(part.to(device, dtype), dim=1).T], dim=1)
            own = torch.arange(start, start + len(part), device=device).expand(len(block), -1)
            best, order = similarities.topk(min(NUM_NEIGHBORS, similarities.shape[1]))
            indices, start = torch.cat([indices, own], dim=1).gather(1, order), start + len(part)
        found.append((best, indices))
    best, indices = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    for similar, nearest in zip(best.split(_QUERIES), indices.split(_QUERIES), strict=True):
        weights = (similar.double() / TEMPERATURE).exp()  # on the CPU, the order of a sum does not vary
        votes = weights.new_zeros(len(weights), num_classes).scatter_add_(1, labels[nearest], weights)
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


def standardize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Center features (N, dim) in place and halve the differences of their scales; return the means and the factors.

    Each is divided by the geometric mean of its own deviation and that of all, and becomes 0 if it is constant. Equal
    deviations amplify features that are hardly ever active; unequal ones hide rare features where images are few.
    """
    sums = torch.zeros(2, rows.shape[1], dtype=torch.float64)
    for part in rows.split(_ROWS):
        sums += torch.stack([part.double().sum(0), part.double().square().sum(0)])
    mean, square = sums / len(rows)
    deviation = (square - mean.square()).clamp(min=0).sqrt()
    scale = torch.where(deviation > 1e-6, (deviation * deviation.square().mean().sqrt()).rsqrt(), 0)
    for part in rows.split(_ROWS):
        part.copy_((part - mean) * scale)
    return mean, scale


def fit_linear(rows: Tensor, labels: Tensor, shares: Tensor, penalty: float, start: Tensor) -> Tensor:
    """Return the weights (dim + 1, classes) of multinomial logistic regression by L-BFGS; the last row: biases.

    The loss is the cross-entropy of features (N, dim), weighted by the share (N,) of each image, plus `penalty / 2`
    times the sum of the squared weights without the biases, in the type and on the device of the initial weights. No
    entry of its gradient exceeds 1e-6 in double precision, and 1e-4 in single.
    """
    weights, tolerance = start.clone(), 1e-6 if start.dtype == torch.float64 else 1e-4
    optimizer = torch.optim.LBFGS([weights], max_iter=200, history_size=10, line_search_fn="strong_wolfe",
                                  tolerance_grad=tolerance, tolerance_change=1e-12)  # fmt: skip

    def compute_loss() -> Tensor:
        gradient = penalty * weights
        gradient[-1] = 0
        loss = (gradient * weights).sum() / 2
        for part, own, share in zip(rows.split(_ROWS), labels.split(_ROWS), shares.split(_ROWS), strict=True):
            inputs, own, share = part.to(weights), own.to(weights.device), share.to(weights)
            log_p = torch.addmm(weights[-1], inputs, weights[:-1]).log_softmax(1)
            loss -= log_p.gather(1, own[:, None])[:, 0] @ share
            errors = (log_p.exp() - F.one_hot(own, log_p.shape[1])) * share[:, None]
            gradient[:-1].addmm_(inputs.T, errors)
            gradient[-1] += errors.sum(0)
        weights.grad = gradient
        return loss

    optimizer.step(compute_loss)
    return weights


def compute_logits(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the logits (M, classes) of features (M, dim), on the CPU."""
    return torch.cat([(part.to(weights) @ weights[:-1] + weights[-1]).cpu() for part in rows.split(_ROWS)])


def fit_probe(
    rows: Tensor, labels: Tensor, num_classes: int, device: torch.device, views: int = 1
) -> tuple[Tensor, float]:
    """Return the weights of a linear probe of features (N, dim), which are standardized in place, and its penalty.

    The weights (dim + 1, classes) are those for features as they were before; the last row: biases. Of several views of
    the images, rows and labels are those of the first view of all, then those of the second one.
    """
    statistics = standardize(rows)
    weights, penalty = fit_cross_validated(rows, labels, num_classes, device, views)
    mean, scale = (part.to(weights.dtype).to(device) for part in statistics)
    matrix = weights[:-1] * scale[:, None]
    return torch.cat([matrix, (weights[-1] - mean @ matrix)[None]]), penalty


def fit_cross_validated(
    rows: Tensor, labels: Tensor, num_classes: int, device: torch.device, views: int = 1
) -> tuple[Tensor, float]:
    """Return weights, fitted on all images, and their penalty: that of the least loss on the held-out folds.

    The penalties are tried in descending order, until the loss rises; a fold has its share of each class. Comparing
    penalties needs neither double precision nor the exact minima, which would take most of the time.
    """
    starts = [torch.zeros(rows.shape[1] + 1, num_classes, device=device)] * NUM_FOLDS
    own = labels[: len(labels) // views]
    folds = torch.empty_like(own)
    folds[own.argsort(stable=True)] = torch.arange(len(own)) % NUM_FOLDS
    folds = folds.repeat(views)  # the views of an image are in one fold
    least, chosen = float("inf"), PENALTIES[0]
    for penalty in progress(PENALTIES, label="linear probe"):
        loss = 0.0
        for fold, start in enumerate(starts):
            kept = folds != fold
            starts[fold] = weights = fit_linear(rows, labels, kept / kept.sum(), penalty, start)
            logits = compute_logits(rows[~kept], weights)
            loss += float(F.cross_entropy(logits, labels[~kept], reduction="sum"))
        if loss >= least:
            break
        least, chosen = loss, penalty
    shares, dtype = torch.full((len(rows),), 1 / len(rows)), torch.float64 if device.type == "cpu" else torch.float32
    return fit_linear(rows, labels, shares, chosen, torch.stack(starts).mean(0).to(dtype)), chosen


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature, 0.5 to 20, by which logits (N, C) divided have the least cross-entropy.

    Guo et al., arXiv 1706.04599. The loss is convex in the inverse of the temperature: golden-section search. Without
    the lower bound, few images that are all right would ask for certainty.
    """
    ratio, low, high = (5**0.5 - 1) / 2, 0.05, 2.0
    logits = logits.double()
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        losses = [float(F.cross_entropy(logits * scale, labels)) for scale in (left, right)]
        low, high = (low, right) if losses[0] <= losses[1] else (left, high)
    return 2 / (low + high)
