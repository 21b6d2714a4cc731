"""Tables of names: discovered late, a typo answered with what is near; and the settings of their entries."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.tables import each_row

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.read_settings import read_settings
from distribuuuu.config.reader import read_cfg
from distribuuuu.config.registry import DATASETS, LOSSES, TASKS, Registry
from distribuuuu.config.settings import setting
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.loader import build_images
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.losses import CrossEntropy, build_loss
from distribuuuu.trainer import train_model

REGISTERS = "from {package} import TABLE\n@TABLE.register\ndef {name}(): return {name!r}\n"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A registry over a package of two files that register, and one that must not be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"things_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "slow.py").write_text("raise ImportError('must be left alone')\n")
    (tmp_path / name / "__init__.py").write_text("TABLE = None\n")
    table = Registry("TABLE", "thing", name)
    module = __import__(name)
    module.TABLE = table
    for thing in ("apple", "pear"):
        (tmp_path / name / f"{thing}.py").write_text(REGISTERS.format(package=name, name=thing))
    return table


def test_files_that_register_are_found_and_others_left_alone(table):
    assert table.names() == ["apple", "pear"]
    assert table.get("pear")() == "pear"
    assert f"{table.package}.pear" in sys.modules and f"{table.package}.apple" not in sys.modules
    assert "apple" in table and "plum" not in table


def test_a_name_in_two_files_of_the_package_is_refused(table, tmp_path):
    (tmp_path / table.package / "fruit.py").write_text(REGISTERS.format(package=table.package, name="pear"))
    with pytest.raises(ConfigError, match="thing 'pear' is registered twice: in things_.*fruit and in .*pear; fix: "):
        table.get("pear")


def test_an_unknown_name_lists_the_near_ones_or_all(table):
    with pytest.raises(LookupError, match="unknown thing 'aple'; did you mean apple?"):
        table.get("aple")
    with pytest.raises(LookupError, match="known: apple, pear"):
        table.get("zzz")


@dataclass(frozen=True)
class Settings:
    """Settings of each type."""

    rho: float = setting(1, "radius", least=0)
    steps: int = setting(2, most=5)
    kind: str = setting("soft", choices=("soft", "hard"))
    is_on: bool = False
    scales: tuple[float, ...] = setting((0.5, 1.0), least=0.1, most=1)
    layers: tuple[str, ...] = ()
    limit: float | None = None

    def __post_init__(self):
        if self.is_on and self.kind == "hard":
            raise ValueError("is_on: got True with kind hard; expected kind soft")


@pytest.fixture
def entries(monkeypatch):
    """Register a task, a loss and a data set with settings, and a task without."""

    class OwnTask(Classification):
        pass

    class OwnLoss(CrossEntropy):
        def forward(self, logits, targets):
            return self.settings.rho * super().forward(logits, targets)

    class OwnSet(ImageDataset):
        classes = ("a", "b", "c")

        @classmethod
        def from_cfg(cls, cfg, train):
            images = cls()
            images.labels = np.arange(12) % cls.read_settings(cfg).steps
            return images

        def read(self, index):
            return np.full((20, 20), 20 * index, np.uint8)

    TASKS.get("classification"), LOSSES.get("bce"), DATASETS.get("dummy")
    monkeypatch.setitem(TASKS._table, "free", type("Free", (Classification,), {}))
    for registry, entry in ((TASKS, OwnTask), (LOSSES, OwnLoss), (DATASETS, OwnSet)):
        entry.Settings = Settings
        monkeypatch.setitem(registry._table, "own", entry)


OWN = ("TASK.NAME", "own", "LOSS.NAME", "own", "DATA.NAME", "own")


@each_row("key, value, expected", [
    (".rho", "0.25", {"rho": 0.25}), (".rho", "5e-1", {"rho": 0.5}), (".is_on", "true", {"is_on": True}),
    ("", "{steps: 3, kind: hard}", {"steps": 3, "kind": "hard"}), (".scales", "[0.25,1]", {"scales": (0.25, 1.0)}),
    (".layers", "conv1,fc", {"layers": ("conv1", "fc")}), (".limit", "3", {"limit": 3.0}),
    (".limit", "None", {"limit": None}),
])  # fmt: skip
def test_values_have_the_type_of_their_field(key, value, expected, entries):
    cfg = load_cfg(None, ["TASK.NAME", "own", f"TASK.KWARGS{key}", value])
    settings, problems = read_settings("TASK.KWARGS", Settings, cfg.TASK.KWARGS)
    assert settings == Settings(**expected) and not problems
    assert all(type(getattr(settings, name)) is type(value) for name, value in expected.items())


@each_row(("key", "value", "message"), [
    ("KWARGS.roh", "1", "no such setting; did you mean rho?; expected one of rho, steps, kind, is_on, "),
    ("KWARGS.rho", "many", "got 'many'; expected a number (default 1.0)"),
    ("KWARGS.rho", "-1", "got -1.0; expected 0 or more"),
    ("KWARGS.steps", "6", "got 6; expected at most 5"),
    ("KWARGS.steps", "2.5", "got 2.5; expected an integer (default 2)"),
    ("KWARGS.kind", "hrd", "got 'hrd'; expected one of soft, hard; did you mean hard?"),
    ("KWARGS.is_on", "2", "got 2; expected true or false (default False)"),
    ("KWARGS.scales", "[0.5, 2]", "got 2.0; expected 0.1 to 1"),
    ("KWARGS", "{kind: hard, is_on: True}", "is_on: got True with kind hard; expected kind soft"),
])  # fmt: skip
@each_row("section", ["TASK", "LOSS", "DATA"])
def test_each_mistake_is_reported_with_its_origin(section, key, value, message, entries):
    words = ["MODEL.NUM_CLASSES", "3", *OWN, "LOSS.LABEL_SMOOTHING", "2", f"{section}.{key}", value]
    _, problems = read_cfg(None, words)
    label, mine = problems
    assert label.key == "LOSS.LABEL_SMOOTHING" and str(mine).startswith(f"{section}.KWARGS") and message in mine.message
    assert key == "KWARGS" or "(command line)" in str(mine)


def test_settings_reach_the_task_the_loss_and_the_data(entries, small_cfg, monkeypatch):
    seen = []
    monkeypatch.setattr(Classification, "prepare_training", lambda self, *args: seen.append(self.settings))
    monkeypatch.setattr(Classification, "state_dict", lambda self: {})
    own = ("TASK.KWARGS.rho", "0.5", "LOSS.KWARGS.rho", "2", "DATA.KWARGS.steps", "3")
    cfg = small_cfg(*OWN, *own, "OPTIM.MAX_EPOCH", 0)
    train_model(cfg)
    assert seen == [Settings(rho=0.5)]
    logits, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert build_loss(cfg)(logits, targets).item() == pytest.approx(2 * CrossEntropy()(logits, targets).item())
    assert max(build_images(cfg, train=True).labels) == 2


def test_an_entry_without_settings_takes_none_but_an_own_task_takes_any(entries):
    cfg = load_cfg(None, ["TASK.NAME", "free", "TASK.KWARGS.dim", "32"])
    assert dict(cfg.TASK.KWARGS) == {"dim": 32}
    for section, name in (("TASK", "classification"), ("LOSS", "bce"), ("DATA", "shapes")):
        with pytest.raises(ConfigError, match=rf"{section}.KWARGS: got dim, but {section}.NAME {name} has no settings"):
            load_cfg(None, ["MODEL.NUM_CLASSES", "10", f"{section}.NAME", name, f"{section}.KWARGS.dim", "32"])
