"""What the measured times of a step mean: a table, and one sentence on what holds training back and what would help."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distribuuuu.config.errors import counted
from distribuuuu.report.step_timing import MOST_WAIT

# Data sets that are arrays in memory: nothing is read or decoded.
_ARRAYS = ("dummy", "cifar10", "cifar100", "mnist", "fashion_mnist")
# Share of the slower one's speed that loader and model must reach together, or they are in each other's way.
_LEAST_TOGETHER = 0.8
# Bytes of pixels up to which a set is small enough for a device.
_SMALL = 2e9
# Of a line, so that it has 80 columns with the time before it.
_WIDTH = 71


@dataclass(frozen=True)
class Speeds:
    """Images per second of all processes.

    Attributes:
        model: of steps on a batch in memory.
        loader: of the loader alone, up to the normalised batch on the device.
        together: of steps on the loader's batches.
        wait: the share of these steps' time that was spent waiting for data.
    """

    model: float
    loader: float
    together: float
    wait: float


def diagnose_bottleneck(
    speeds: Speeds, num_workers: int, most_workers: int, remedies: Sequence[str], shares_cores: bool = False
) -> str:
    """Return the sentence.

    Args:
        speeds: what was measured.
        num_workers: workers of a process; 0: it loads by itself.
        most_workers: cores of a process; 0: workers are of no use.
        remedies: what would make an image cheaper, in words, the best first.
        shares_cores: the model computes on the cores too.
    """
    model, loader = f"{speeds.model:,.0f} images/s", f"{speeds.loader:,.0f} images/s"
    if speeds.wait < MOST_WAIT and speeds.loader >= speeds.model:
        return f"model-bound: the model takes {model}, the loader could give {loader}"
    if speeds.wait < MOST_WAIT:
        start = f"in balance: the model takes {model}, the loader gives {loader}"
        return f"{start}, and {speeds.wait:.0%} of the time is spent waiting"
    if num_workers == 0 and most_workers:
        start = f"loader-bound: the process loads by itself ({loader}) in turns with the model ({model})"
        if shares_cores:  # so that how fast workers would be does not follow from how fast it is
            return f"{start}; set TRAIN.WORKERS 1 or more, and measure again; what else would help: {_either(remedies)}"
        return f"{start}; {_more_workers(speeds, 0, most_workers, remedies)}"
    slower = min(speeds.loader, speeds.model)
    if speeds.loader >= speeds.model or num_workers and speeds.together < _LEAST_TOGETHER * slower:
        start = f"loader-bound: the model alone takes {model}, the loader alone gives {loader}, but they compete"
        return f"{start} and make {speeds.together:,.0f} together; what would help: {_either(remedies)}"
    start = f"loader-bound: {loader} against the model's {model}"
    return f"{start}; {_more_workers(speeds, num_workers, most_workers, remedies)}"


def _more_workers(speeds: Speeds, num_workers: int, most_workers: int, remedies: Sequence[str]) -> str:
    """Return what workers would do, as if each were as fast as one is now, and never more than there are cores."""
    if most_workers == 0:
        return f"what would help: {_either(remedies)}"
    per_worker = speeds.loader / max(1, num_workers)
    needed = max(num_workers + 1, math.ceil(speeds.model / per_worker))
    if needed <= most_workers:
        more = needed - num_workers
        workers = f"{counted(more, 'more worker' if num_workers else 'worker')} a process (TRAIN.WORKERS {needed})"
        return f"{workers}{f' or {remedies[0]}' if remedies else ''} would fix it"
    if num_workers < most_workers:
        reached = f"a worker for each core (TRAIN.WORKERS {most_workers}) would give about"
        return f"{reached} {most_workers * per_worker:,.0f} images/s; beyond that: {_either(remedies)}"
    used = f"TRAIN.WORKERS {num_workers} on {counted(most_workers, 'core')} a process"
    return f"the cores are used up ({used}); what is left: {_either(remedies)}"


def _either(remedies: Sequence[str]) -> str:
    return " or ".join(remedies) or "more cores for each process"


def find_remedies(cfg, images, num_workers: int) -> tuple[str, ...]:
    """Return what would make an image of this config cheaper to load, in words, the best first.

    Args:
        cfg: the config.
        images: the training set.
        num_workers: workers of a process.
    """
    data, name = cfg.DATA, "dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME
    if data.LOADER == "device":
        return ("DATA.LOADER host with TRAIN.WORKERS -1",)
    # The files are larger than the crop by so much at most, unless they were made smaller before.
    is_small = name in _ARRAYS or len(images) * 3 * (2 * cfg.TRAIN.IM_SIZE) ** 2 <= _SMALL
    is_raw = name == "packed" and images.meta["options"]["format"] == "raw"
    found = {
        "a packed set (tools/pack_dataset.py)": name not in (*_ARRAYS, "packed"),
        "DATA.DECODER simplejpeg": name not in _ARRAYS and not is_raw and data.DECODER != "simplejpeg",
        "DATA.LOADER device": is_small and name != "dummy",
        "DATA.WORKER_KIND thread": num_workers > 0 and data.WORKER_KIND != "thread",
    }
    return tuple(remedy for remedy, fits in found.items() if fits)


def show_parts(result: dict, compress: str) -> Iterator[str]:
    """Yield the lines of a table of what was measured, and the verdict.

    Args:
        result: as `timing.measure` returns it, with the verdict.
        compress: DIST.COMPRESS.
    """
    yield f"{'per step':<36} {'images':>8} {'ms':>10} {'images/s':>10}"
    yield _row("model: forward", result["forward"])
    yield _row("model: forward + backward", result["forward_backward"])
    yield f"{'optimizer step':<36} {'':>8} {1e3 * result['optimizer']['seconds']:>10.2f}"
    yield _row("whole step, batch in memory", result["step"])
    yield _row("model: forward in evaluation", result["evaluation"])
    yield _row("loader: uint8 batches", result["pixels"])
    yield _row("loader: normalised, on the device", result["loader"])
    yield _row("loader + model", result["together"])
    yield f"of which waiting for data: {result['wait']:.0%}"
    yield show_exchange(result, compress)
    mb = {name: value / 1e6 for name, value in result["memory"].items()}
    yield f"MB: parameters {mb['parameters']:,.1f}, gradients {mb['gradients']:,.1f}, optimizer {mb['optimizer']:,.1f}"
    if mb["training"]:
        yield f"peak of a process: {mb['training']:,.0f} MB in training, {mb['evaluation']:,.0f} MB with evaluation"
    yield from textwrap.wrap(f"verdict: {result['verdict']}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def show_exchange(result: dict, compress: str) -> str:
    """Return the line on the all-reduce of the gradients."""
    if "not_exchanged" not in result:
        return "all-reduce of the gradients: one process: none"
    exposed_ms = 1e3 * (result["forward_backward"]["seconds"] - result["not_exchanged"]["seconds"])
    sent_mb = result["memory"]["gradients"] / 1e6 / (1 if compress == "none" else 2)
    as_type = "" if compress == "none" else f" as {compress}"
    exposed = f"{exposed_ms:.2f} ms" if exposed_ms > 0 else "not measurable"
    return f"all-reduce: {sent_mb:,.1f} MB of gradients{as_type}, exposed: {exposed}"


def _row(name: str, part: dict) -> str:
    return f"{name:<36} {part['images']:>8,} {1e3 * part['seconds']:>10.2f} {part['images_per_s']:>10,.0f}"
