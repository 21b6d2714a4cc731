"""Files of other programs: names of tensors with what wrappers add, and objects beside the tensors.

Of the objects, numpy scalars become numbers, and others are left out: nothing of them is executed. Imported for a state
dict whose names are not the model's, and for files that torch does not read as plain data.
"""

import logging
import pickle
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

# What wrappers add to the names of tensors: DDP, Lightning and others, detectors at the front; torch.compile, FSDP and
# activation checkpointing anywhere.
_IN_FRONT = ("module", "model", "backbone")
_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# What the last part of a tensor's name says about it, and the words of other programs for the same.
_ROLES = {
    **{name: name for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")},
    **{"kernel": "weight", "gamma": "weight", "scale": "weight", "beta": "bias"},
    **{"moving_mean": "running_mean", "moving_variance": "running_var", "moving_var": "running_var"},
}
_ROLE = re.compile(rf"(.*?)[._/]?({'|'.join(_ROLES)})")
# Least median correlation of the batch statistics in a file with those of synthetic images. Measured with the published
# EfficientNet-Lite0, 1 and 2 at 64 to 224 px: 0.66 to 0.78; with layers of equal shapes exchanged: 0.00 to 0.05.
_LEAST_CORRELATION = 0.3
_IMAGE_SIZE, _NUM_IMAGES = 128, 4
_MAX_NAME = 1000  # characters of a name that are looked at


class OrderError(ValueError):
    """Tensors whose order is not that of the model; the message names the first difference."""


def strip_wrappers(tensors: Tensors, known: Collection[str]) -> Tensors:
    """Return tensors under the known names that equal theirs up to what wrappers add; others keep their names.

    This is what common wrappers insert, and the one prefix under which the most known names stand.
    """
    plain = {".".join(part for part in name.split(".") if part not in _ANYWHERE): name for name in tensors}
    by_core = {_core(name): name for name in known}
    starts = ((name, start) for name in plain for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))))
    prefixes = Counter(name[:start] for name, start in starts if name[start:] in by_core)
    prefix = prefixes.most_common(1)[0][0] if prefixes else ""
    renamed = {name: tensors[given] for name, given in plain.items() if name in known}
    for name, given in plain.items():
        if name not in known:
            target = by_core.get(name.removeprefix(prefix), name)
            renamed[name if target in renamed else target] = tensors[given]
    return renamed


def _core(name: str) -> str:
    """Return a name without the prefixes of common wrappers."""
    while name.partition(".")[0] in _IN_FRONT and "." in name:
        name = name.partition(".")[2]
    return name


def adopt_names(tensors: Tensors, model: nn.Module) -> tuple[Tensors, str]:
    """Return the tensors of a file under the names of a model, by name or in order, and why not in order, for an error.

    The reason is empty if most names are those of the model.
    """
    own = model.state_dict()
    renamed = strip_wrappers(tensors, own)
    if own.keys() <= renamed.keys():
        return renamed, ""
    try:
        return match_in_order(model, tensors), ""
    except OrderError as error:
        return renamed, "" if 2 * len(own.keys() & renamed.keys()) > len(own) else f"{error}; "


def match_in_order(model: nn.Module, tensors: Tensors, head: Collection[str] = ()) -> Tensors:
    """Return the tensors of another program under the names of a model that has as many, in the same order.

    Shapes must be equal, but those of a head, a file of RGB images may have three channels, and the file may lack the
    head and `num_batches_tracked`. That equal shapes mean equal layers is checked: by the last parts of names (weight,
    bias, ...), which tensors belong to one layer, the numbers in names, which must not decrease, and by the batch
    statistics, if there are any, against those of synthetic images.

    Args:
        head: names of the layers whose shapes depend on the number of classes.

    Raises:
        OrderError: the order is another one; with the first names that differ.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if _has(tensors, name)}
    if len(tensors) < len(own):
        own = {name: tensor for name, tensor in own.items() if name.rpartition(".")[0] not in head}
    layers: dict[str, str] = {}
    for index, (name, given) in enumerate(zip(own, tensors, strict=False)):
        layer, role = _split_role(given)
        own_layer, own_role = _split_role(name)
        is_same = role == own_role or role not in _ROLES.values() or own_role not in _ROLES.values()
        shape, expected = tuple(tensors[given].shape), tuple(own[name].shape)
        in_head, of_rgb = own_layer in head, index == 0 and shape[1:2] == (3,)
        fits = shape == expected or (in_head and shape[1:] == expected[1:]) or (of_rgb and shape[2:] == expected[2:])
        if not (is_same and fits and layers.setdefault(layer, own_layer) == own_layer):
            raise OrderError(f"tensor {index + 1} of the file is {given} {shape}; expected {name} {expected}")
    if len(own) != len(tensors) or len({*layers.values()}) < len(layers):
        raise OrderError(f"the file has {len(tensors)} tensors in {len(layers)} layers, the model {len(own)}")
    _check_numbers(tensors)
    matched = dict(zip(own, tensors.values(), strict=True))
    agreement = _compare_statistics(model, matched)
    if agreement is not None and not agreement > _LEAST_CORRELATION:
        reason = f"a median correlation of {agreement:.2f} between its batch statistics and those of synthetic images"
        raise OrderError(f"order and shapes are those of the model, but {reason} says that layers are exchanged")
    found = "no batch statistics to check it by" if agreement is None else f"batch statistics agree: {agreement:.2f}"
    examples = ", ".join(f"{given} -> {name}" for name, given in list(zip(own, tensors, strict=True))[:2])
    logger.info("%d tensors of other names are matched by order and shape (%s, ...); %s", len(matched), examples, found)
    return matched


def _has(tensors: Tensors, name: str) -> bool:
    """Tell whether a file can have a tensor: files of old versions of torch have no counts of batches."""
    is_count = _split_role(name)[1] == "num_batches_tracked"
    return not is_count or any(_split_role(given)[1] == "num_batches_tracked" for given in tensors)


def _split_role(name: str) -> tuple[str, str]:
    """Return the layer of a tensor, and its role in it, in torch's words if it is known."""
    if found := _ROLE.fullmatch(name):
        return found[1], _ROLES[found[2]]
    layer, _, role = name.rpartition(".")
    return layer, role


def _check_numbers(names: Iterable[str]) -> None:
    """Raise OrderError if the numbers of modules decrease: in alphabetical order, block 10 is before block 2."""
    last: dict[str, int] = {}
    for name in names:
        for number in re.finditer(r"(?<![^.])[0-9]{1,9}(?![^.])", name[:_MAX_NAME]):
            place = name[: number.start()]
            if int(number[0]) < last.get(place, 0):
                raise OrderError(f"the order of the file is not that of a model: {place}{last[place]} precedes {name}")
            last[place] = int(number[0])


@torch.no_grad()
def _compare_statistics(model: nn.Module, tensors: Tensors) -> float | None:
    """Return the median over batch norms of the correlation of logarithms of variances; None: there are none.

    One is that in the file of a channel, the other one that of synthetic images, whose spectrum is that of photographs.
    """
    correlations: list[float] = []

    def compare(variance: torch.Tensor, inputs: tuple) -> None:
        both = torch.stack([variance, inputs[0].var(dim=(0, 2, 3))]).clamp(min=1e-6).log()
        if (both.std(dim=1) > 0).all():
            correlations.append(float(both.corrcoef()[0, 1]))

    kernel = next((tensor for tensor in tensors.values() if tensor.ndim == 4), None)
    norms = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.BatchNorm2d) and f"{name}.running_var" in tensors
    }
    if kernel is None or not norms or any(hasattr(tensor, "full_tensor") for tensor in model.parameters()):
        return None
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: compare(tensors[f"{name}.running_var"], inputs))
        for name, layer in norms.items()
    ]
    was_training, values = model.training, {name: tensor.float() for name, tensor in tensors.items()}
    try:
        torch.func.functional_call(model.eval(), values, (_draw_images(kernel.shape[1]),))
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError):  # e.g. a model of one fixed size
        return None
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return statistics.median(correlations) if correlations else None


def _draw_images(channels: int) -> torch.Tensor:
    """Return normalized noise (N, C, H, W) whose amplitude falls with the frequency, with correlated channels."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_NUM_IMAGES, channels, _IMAGE_SIZE, _IMAGE_SIZE, generator=generator)
    row = torch.fft.fftfreq(_IMAGE_SIZE)
    frequency = torch.hypot(row[:, None], row).clamp(min=1 / _IMAGE_SIZE)
    images = torch.fft.ifft2(torch.fft.fft2(noise) / frequency).real
    images = images + 2 * images.mean(dim=1, keepdim=True)
    return images / images.std(dim=(1, 2, 3), keepdim=True)


def load_without_objects(path: Path, is_zip: bool) -> Any:
    """Return the content of a file on the CPU, as `torch.load`, which raises the errors."""
    stubs = _stub_unknown_classes(path) if is_zip else ()
    with torch.serialization.safe_globals([*_NUMPY_GLOBALS, *stubs]):
        return torch.load(path, map_location="cpu", weights_only=True)


class _NumpyType:
    """Safe replacement of `numpy.dtype`, whose own unpickling does not validate its input."""

    def __init__(self, name: str, *_: Any):
        if not re.fullmatch("[fiu][1248]|b1", name):
            raise pickle.UnpicklingError(f"a numpy scalar of type {name[:20]!r}")
        self.name, self.byte_order = name, "="

    def __setstate__(self, state: tuple) -> None:
        self.byte_order = {"<": "<", ">": ">"}.get(state[1], "=")


def _read_numpy_scalar(kind: _NumpyType, data: bytes) -> bool | int | float:
    """Return a pickled numpy scalar as a Python number (checkpoints of 2021 hold a learning rate of this type)."""
    (number,) = np.frombuffer(data, kind.byte_order + kind.name)
    return number.item()


_NUMPY_GLOBALS: list[Callable | tuple[Callable, str]] = [
    (_NumpyType, "numpy.dtype"),
    (_read_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_read_numpy_scalar, "numpy._core.multiarray.scalar"),
]


class _Left:
    """Stands for an object of an unknown class, of which nothing is kept."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Left":
        """Ignore the arguments of the constructor."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""


def _stub_unknown_classes(path: Path) -> list[tuple[Callable, str]]:
    """Return a harmless replacement of each class in a file that torch does not unpickle, with the class's name."""
    known = {name for _, name in _NUMPY_GLOBALS}  # type: ignore[misc]
    names = [name for name in torch.serialization.get_unsafe_globals_in_checkpoint(path) if name not in known]
    if names:
        logger.warning("%s: objects other than tensors are left out: %s", path, ", ".join(sorted(names)[:5]))
    # torch fills plain containers only.
    containers: dict[str, Callable] = {
        "collections.deque": lambda *arguments: [],
        "collections.defaultdict": lambda *arguments: {},
    }
    return [(containers.get(name, _Left), name) for name in names]
