"""Checkpoint files: reading with verification, and loading into a model and an optimizer.

torch's zip files have a CRC-32 of every entry, so any damage is detected. torch's format before 1.6 and safetensors
have no checksums: damage to their structure is detected, changed values of tensors are not. Only plain data is
unpickled. A tensor or an entry that claims more bytes than its file has is refused.
"""

import errno
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.distributed.comm import to_local
from distribuuuu.distributed.sharding import load_full_state_dict
from distribuuuu.files.untrusted import InvalidFileError, untrusted

# Values, with containers, that a file may hold. Containers that refer to each other can multiply them without bound.
_MAX_VALUES = 1_000_000
_FOLDER_ATTRIBUTE = 0x10  # of MS-DOS, in a zip entry
# What torch reports as a RuntimeError if memory does not suffice.
_NO_MEMORY = re.compile("allocate memory|not enough memory|bad_alloc")

# The entry with the average of the weights in files of DeiT, ConvNeXt and torchvision, which have them under `model`.
AVERAGE = "model_ema"
# The remedy when weights may be used, but not the rest of a checkpoint.
WEIGHTS_ONLY = "to take only its weights name it as MODEL.WEIGHTS, with TRAIN.LOAD_OPT False and another OUT_DIR"


class CheckpointError(ConfigError):
    """Unusable checkpoint; the message names the file and the reason."""


class UnreadableError(CheckpointError):
    """The system cannot read a file now, or has no memory for it, which says nothing about its content."""


def find_class_mismatch(content: dict[str, Any], classes: Sequence[str]) -> str | None:
    """Return the first difference between the class names of a checkpoint and those of the data.

    None: there is no difference, or the file has no class names or another number of them.
    """
    saved = content.get("classes")
    if not is_list_of(saved, str) or len(saved) != len(classes):
        return None
    pairs = zip(saved, classes, strict=True)
    return next((f"{other!r} where the data has {own!r}" for other, own in pairs if other != own), None)


def read_checkpoint(path: str | os.PathLike, to_resume: bool = False) -> dict[str, Any]:
    """Return the content of a checkpoint or of a weights file on the CPU.

    A bare state dict, or one under `model`, `model_state` or `model_state_dict`, is returned under `state_dict`. An
    object of an unknown class beside the tensors is left out, and nothing of it is executed.

    Raises:
        UnreadableError: the system cannot read it.
        CheckpointError: it does not exist, its checksums do not match, or it holds no state dict; or, unless
            `to_resume`, it leaves out tensors of the model, see `Task.unsaved_tensors`.
    """
    try:
        with untrusted(path, "checkpoint"):
            content = _read_verified(Path(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except InvalidFileError as error:
        from distribuuuu.files.file_kinds import explain_no_weights

        raise CheckpointError(explain_no_weights(path, str(error))) from None
    except (OSError, MemoryError) as error:
        reason = "out of memory" if isinstance(error, MemoryError) else error.strerror or error
        fix = "the file was not changed; fix: repeat the command once it can be read"
        raise UnreadableError(f"{path}: cannot be read: {reason}; {fix}") from None
    state_dict = _find_state_dict(content)
    if state_dict is None:
        raise CheckpointError(f"{path}: holds no state dict of a model, but a {type(content).__name__}")
    if "unsaved" in content and not to_resume:
        raise CheckpointError(f"{path}: leaves out tensors that only a resume adds; fix: name the run's best.pth.tar")
    entries = content if "state_dict" in content else {key: content[key] for key in (AVERAGE,) if key in content}
    return {**entries, "state_dict": {key.removeprefix("module."): value for key, value in state_dict.items()}}


def is_state_dict(value: Any) -> bool:
    """Tell whether a value is a dict of tensors by name."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    )


def is_list_of(value: Any, kind: type | tuple[type, ...]) -> TypeGuard[Sequence[Any]]:
    """Tell whether a value is a list or a tuple whose items are of a type."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)


def _read_verified(path: Path) -> Any:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\3\4"  # as torch decides
    try:
        if is_zip:
            _verify_zip(path, status.st_size)
        content = _load(path, is_zip)
    except OSError as error:
        if error.errno in (None, errno.EINVAL, errno.EOVERFLOW):  # a place outside of the file
            raise ValueError(str(error)) from error
        raise
    except RuntimeError as error:
        if _NO_MEMORY.search(str(error)):
            raise MemoryError from error
        raise
    verify_content(content, status.st_size)
    return content


def _load(path: Path, is_zip: bool) -> Any:
    """Return the plain data of a file, also of one with objects of other programs."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, LookupError):  # not of this package, or damaged
        from distribuuuu.checkpoint.foreign_files import load_without_objects

        try:
            return load_without_objects(path, is_zip)
        except (pickle.UnpicklingError, LookupError):
            # Not torch's text, which advises to unpickle anything.
            tensors = "torch.load(FILE, weights_only=False)['state_dict']"
            fix = f"if you trust the file, save its tensors alone: torch.save({tensors}, NEW_FILE)"
            raise ValueError(f"it is damaged, or holds objects other than plain data; fix: {fix}") from None


def _verify_zip(path: Path, size: int) -> None:
    """Raise BadZipFile unless all entries are uncompressed, as torch writes them, and match their checksums."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise zipfile.BadZipFile(f"{entry.filename} is compressed, which torch does not write")
            if entry.external_attr & _FOLDER_ATTRIBUTE:  # torch would leave its tensor uninitialized
                raise zipfile.BadZipFile(f"{entry.filename} is marked as a folder")
        if len({entry.filename for entry in entries}) < len(entries):
            raise zipfile.BadZipFile("several entries have the same name")
        if sum(entry.file_size for entry in entries) > size:
            raise zipfile.BadZipFile("its entries have more bytes than the file")
        damaged = archive.testzip()
    if damaged:
        raise zipfile.BadZipFile(f"checksum of {damaged} does not match")


def verify_content(content: Any, size: int) -> None:
    """Raise ValueError for an unusual tensor, one with more bytes than the file, or containers without end."""
    stack, num_values = [content], 0
    while stack:
        value = stack.pop()
        num_values += 1
        if num_values > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES} values, or containers that hold themselves")
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, torch.Tensor) and (problem := _find_tensor_problem(value, size)):
            raise ValueError(f"a tensor {problem}")


def _find_tensor_problem(tensor: torch.Tensor, size: int) -> str | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type != "cpu":
        return "is not a dense one on the CPU"
    if min((*tensor.shape, *tensor.stride()), default=0) < 0:
        return f"has the shape {tuple(tensor.shape)} and the strides {tensor.stride()}"
    if max(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) > size:
        return f"of the shape {tuple(tensor.shape)} needs more bytes than the file has"
    return None


def _find_state_dict(content: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(content, dict):
        return None
    for key in ("state_dict", "model", "model_state", "model_state_dict"):
        if isinstance(content.get(key), dict):
            return _find_state_dict(content[key])
    return content if content and is_state_dict(content) else None


def check_resumable(content: dict[str, Any], path: str | os.PathLike) -> None:
    """Raise CheckpointError if a checkpoint holds weights only."""
    if "optimizer" not in content or "epoch" not in content:
        raise CheckpointError(f"{path}: holds weights only, so it cannot be resumed; give it as MODEL.WEIGHTS")


def load_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor], path: str | os.PathLike) -> None:
    """Load all weights of a state dict into a model; CheckpointError: class counts, names or shapes differ."""
    own, order = model.state_dict(), ""
    if own.keys() != state_dict.keys():
        from distribuuuu.checkpoint.foreign_files import adopt_names

        state_dict, order = adopt_names(state_dict, model)
    shapes = {key: (tuple(state_dict[key].shape), tuple(own[key].shape)) for key in own if key in state_dict}
    different = {key: pair for key, pair in shapes.items() if pair[0] != pair[1]}
    missing, extra = [key for key in own if key not in state_dict], [key for key in state_dict if key not in own]
    if not (different or missing or extra):
        load_full_state_dict(model, state_dict)
        return
    if not missing and not extra and all(a[1:] == b[1:] for a, b in different.values()) and len(different) <= 2:
        key, (saved, expected) = next(iter(different.items()))
        classes = counted(saved[0], "class")
        raise CheckpointError(f"{path}: has {classes} ({key}), but MODEL.NUM_CLASSES is {expected[0]}")
    parts = [f"{key} is {a}, here {b}" for key, (a, b) in list(different.items())[:2]]
    parts += [f"lacks {counted(len(missing), 'tensor')}, e.g. {missing[0]}"] if missing else []
    parts += [f"has {len(extra)} that the model lacks, e.g. {extra[0]}"] if extra else []
    raise CheckpointError(f"{path}: does not fit the model: {'; '.join(parts)}; {order}was MODEL.ARCH another one?")


def load_optimizer(optimizer: torch.optim.Optimizer, content: dict[str, Any], path: str | os.PathLike) -> None:
    """Load the state of an optimizer and its rates; other settings (momentum, ...) stay the config's.

    Raises:
        CheckpointError: the groups, their sizes or the shapes of the state differ.
    """
    own = {*optimizer.defaults} - {"lr"}
    settings = [{key: group[key] for key in group if key in own} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(content)
        _match_strides(optimizer)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its optimizer does not fit: {error}; {WEIGHTS_ONLY}") from error
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)


@torch.no_grad()
def _match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give state tensors the strides of their parameters, which fused kernels require; the values stay."""
    own_share = getattr(optimizer, "optim", optimizer)  # of an optimizer that is partitioned by ZeRO-1
    for parameter, entry in own_share.state.items():
        for name, value in entry.items() if isinstance(parameter, torch.Tensor) else ():
            has_shape = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if has_shape and to_local(value).stride() != to_local(parameter).stride():
                entry[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                to_local(entry[name]).copy_(to_local(value))
