"""Error messages: advice of other libraries to load a file unsafely is cut, and what is not plain data is named."""

import functools
import os
import pickle

import numpy as np
import pytest
import timm
import torch

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import ConfigError, Problem
from distribuuuu.hints.weights import without_unsafe_advice

SYSTEM = f"{os.name}.system"


class _Payload:
    def __reduce__(self):
        return os.system, ("true",)


class _Own:
    pass


def fail(read) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        read()
    return str(caught.value)


@pytest.fixture
def texts(tmp_path) -> dict[str, tuple[str, str]]:
    """Errors of the readers of torch, timm and numpy, and what has to be named of each."""
    contents = {SYSTEM: _Payload(), "_Own": _Own(), "functools.partial": functools.partial(print), "eval": eval,
                "numpy": {"a": np.array([_Own()], dtype=object)}}  # fmt: skip
    found = {}
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pth")
        found[f"torch {name}"] = (fail(lambda name=name: torch.load(tmp_path / f"{name}.pth")), name)
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(_Payload(), protocol=2))
    found["torch pickle"] = (fail(lambda: torch.load(tmp_path / "plain.pth")), SYSTEM)
    (tmp_path / "new.pth").write_bytes(pickle.dumps(_Payload(), protocol=5))
    found["torch protocol 5"] = (fail(lambda: torch.load(tmp_path / "new.pth")), "Unsupported operand")
    found["timm"] = (fail(lambda: timm.models.load_state_dict(str(tmp_path / f"{SYSTEM}.pth"))), SYSTEM)
    np.save(tmp_path / "a.npy", np.array([_Own()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", a=np.array([_Own()], dtype=object))
    found["npy"] = (fail(lambda: np.load(tmp_path / "a.npy")), "Python objects")
    found["npz"] = (fail(lambda: np.load(tmp_path / "a.npz")["a"]), "Python objects")
    found["numpy pickle"] = (fail(lambda: np.load(tmp_path / "plain.pth")), "pickled (object) data")
    return found


def test_advice_to_load_unsafely_is_cut_and_what_is_not_plain_data_is_named(texts):
    for name, (text, expected) in texts.items():
        shown = str(ConfigError(Problem("MODEL.PRETRAINED", f"my/file.pth: cannot be read: {text}")))
        assert shown.startswith("MODEL.PRETRAINED: my/file.pth: cannot be read:") and expected in shown, (name, shown)
        for advice in ("weights_only", "allow_pickle", "safe_globals", "trust", "likely succeed", "unsafely", "\n"):
            assert advice not in shown, (name, shown)
        assert expected in without_unsafe_advice(text) and len(shown) < 200, (name, shown)


def test_texts_without_such_advice_are_unchanged():
    for text in ("", "a: b; c\nd", "/data/weights_only/x.pth: no such file", "trust: GLOBAL a.b was not found"):
        assert without_unsafe_advice(text) == text


def test_a_refused_checkpoint_has_no_such_advice(tmp_path):
    torch.save({"state_dict": {}, "x": _Payload()}, tmp_path / "x.pth")
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(tmp_path / "x.pth")
    said = str(caught.value)
    assert "x.pth: not a valid checkpoint: it is damaged, or holds objects other than plain data; fix: if you" in said
    assert "torch.save(" in said
    assert caught.value.__suppress_context__  # the traceback does not show torch's text
