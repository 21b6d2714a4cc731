"""Durations of calls, and the diagnosis of the bottleneck."""

import types

import pytest
import torch

from distribuuuu.commands.plan import steps as measurement
from distribuuuu.config import load_cfg


def test_calls_are_timed_when_compiling_and_recording_are_over(monkeypatch):
    now, calls = [0.0], []

    def call():
        calls.append(now[0])
        now[0] += {1: 60.0, 2: 5.0, 3: 1.0}.get(len(calls), 0.01)

    monkeypatch.setattr(measurement, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    assert measurement.time_calls(call, torch.device("cpu")) == pytest.approx(0.01)
    assert len(calls) > 100, "a block is as long as the calls are fast"


class Files(list):
    has_files, holds_files = True, False


@pytest.mark.parametrize("speeds, workers, most, words, said", [
    ((38, 410, 0.01), 4, 4, "", "model-bound: the model processes 38, the loader provides 410 images/s"),
    ((91, 235, 0.15), 1, 2, "", "model-bound: "),
    ((1000, 950, 0.07), 2, 8, "", "balanced: "),
    ((3100, 2400, 0.25), 4, 8, "", "fix: TRAIN.WORKERS 6, a packed data set (distribuuuu pack), DATA.LOADER device"),
    ((3100, 2400, 0.25), 4, 5, "", "fix: TRAIN.WORKERS 5, "),
    ((3100, 2400, 0.25), 8, 8, "DATA.NAME packed", "fix: DATA.LOADER device or an option of "),
    ((3100, 1000, 0.75), 0, 8, "TRAIN.IM_SIZE 9999 TEST.IM_SIZE 9999", "WORKERS 4, a packed data set (distribuuuu"),
    ((3000, 950, 0.7), 0, 0, "DATA.LOADER device", "fix: DATA.LOADER host"),
])  # fmt: skip
def test_the_diagnosis_follows_from_the_measured_speeds(speeds, workers, most, words, said):
    diagnosis = measurement.diagnose_bottleneck(load_cfg(None, words.split()), Files([0] * 9), *speeds, workers, most)
    assert said in diagnosis, diagnosis
