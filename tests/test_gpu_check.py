"""benchmarks/gpu_check.py: its verdicts, exit status and comparisons, what it checks on a CPU; gpu.py without a GPU."""

import re
import sys
from pathlib import Path

import gpu_check
import pytest
import torch
from bench_support.small_training import draw_images
from support.runs import ROOT, run_python


def save_weights(out_dir: Path, value: float) -> Path:
    (out_dir / "checkpoints").mkdir(parents=True)
    content = {"state_dict": {"weight": torch.full((2,), value)}, "epoch": 0}
    torch.save(content, out_dir / "checkpoints" / "ckpt_ep_001.pth.tar")
    return out_dir


def test_weights_are_compared_with_a_tolerance(tmp_path):
    one, other = save_weights(tmp_path / "one", 1.0), save_weights(tmp_path / "other", 1.5)
    assert gpu_check.compare("check", one, one, 0.0)[3] is True
    assert gpu_check.compare("check", one, other, 0.5)[3] is True
    assert gpu_check.compare("check", one, other, 0.4)[1:] == (
        "weights differ by 0.5", "weights differ by at most 0.4", False,
    )  # fmt: skip
    assert gpu_check.compare("check", one, tmp_path / "none", 1.0)[3] is False


@pytest.mark.parametrize(("passed", "verdict", "status"), [(True, "PASS", 0), (False, "FAIL", 1), (None, "SKIP", 0)])
def test_a_failed_check_is_the_exit_status(monkeypatch, capsys, passed, verdict, status):
    monkeypatch.setattr(gpu_check, "list_checks", lambda part, words: [lambda folder: [("a", "b", "c", passed)]])
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--part", "2"])
    assert gpu_check.main() == status
    assert f"{verdict}  a: saw b; expected c\n" in capsys.readouterr().out


def test_wrong_pixels_fail(monkeypatch, tmp_path):
    draw_images(tmp_path / "data")
    assert [passed for *_, passed in gpu_check.check_batches(tmp_path)] == [True, True]
    build = gpu_check.build_loader

    class Shifted:
        """A loader whose images are one pixel aside."""

        def __init__(self, loader):
            self.loader = loader

        def batches_from(self, *position):
            return (batch._replace(images=batch.images.roll(1, 3)) for batch in self.loader.batches_from(*position))

    def build_shifted(cfg, *args, **words):
        loader = build(cfg, *args, **words)
        return Shifted(loader) if cfg.DATA.LOADER == "device" else loader

    monkeypatch.setattr(gpu_check, "build_loader", build_shifted)
    assert [passed for *_, passed in gpu_check.check_batches(tmp_path)] == [False, False]


@pytest.mark.slow
def test_the_end_of_a_process_is_noticed(tmp_path):
    draw_images(tmp_path / "data")
    assert [passed for *_, passed in gpu_check.check_killed_rank(tmp_path)] == [True]


@pytest.mark.slow
def test_the_loops_are_compared_without_a_gpu():
    """Each step is logged, like the first one of a block that begins more than 15 seconds after the last block."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import gpu; sys.exit(gpu.main())"
    words = "--device cpu --arch resnet8 --im-size 32 --batch 8 --classes 10 --steps 3 --blocks 2 --threads 1"
    log_all = "from distribuuuu.records import run_log; run_log.LOG_INTERVAL_S = 0;"
    done = run_python("-c", log_all + code, *words.split(), "--no-compile")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ours +\d+\.\d", done.stdout, re.MULTILINE) and "no bar: no reference script ran" in done.stdout
