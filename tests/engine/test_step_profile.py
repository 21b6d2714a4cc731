"""Parts of training steps, train --profile, and the time line at the end of a run."""

import gzip
import json
import re

from support.runs import assert_same_run, small_options, train_model

from distribuuuu.commands.main import start_command


def profile(image_folder, out_dir, num: str, *words) -> int:
    args = small_options(image_folder, out_dir, *words)
    return start_command("train", "distribuuuu train", ["--profile", num, *args])


def test_a_profiled_run_writes_a_trace_and_is_the_same_run(image_folder, small_cfg, tmp_path):
    assert profile(image_folder, tmp_path / "out", "3") == 0  # over the end of an epoch of four steps
    with gzip.open(tmp_path / "out/profile/trace_rank0.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert [names.count(part) for part in ("data", "forward", "backward", "optimizer")] == [3, 3, 3, 3]
    log = (tmp_path / "out/train.log").read_text()
    assert re.search(r"profile of 3 steps of [\d.]+ ms: data \d+%, forward \d+%, backward \d+%, optimizer \d+%, o", log)
    table = log[log.index("profile of") : log.index("trace, for https://ui.perfetto.dev")]
    assert "Self CPU" in table and re.search(r"aten::\w*conv\w* ", table)
    assert re.search(r"time: training \d+% \(waiting for data \d+%\), evaluation \d+%, checkpoints \d+%", log)
    train_model(small_cfg("OUT_DIR", tmp_path / "plain"))
    assert_same_run(tmp_path / "out", tmp_path / "plain")


def test_a_run_that_is_too_short_is_not_profiled(image_folder, tmp_path, capsys):
    assert profile(image_folder, tmp_path / "out", "6") == 2
    assert "--profile: got 6; the run has 8 steps left, and the first 3 are not" in capsys.readouterr().err
