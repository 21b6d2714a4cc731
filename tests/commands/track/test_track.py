"""The command track: it sends what is missing to each tracker, and names what fails."""

import pytest
from support.commands import run_command
from support.tables import each_row

from distribuuuu.config.registry import TRACKERS
from distribuuuu.records.trackers.base import Tracker

SENT: list[str] = []


class Store(Tracker):
    name = "store"

    def connect(self, run_id):
        return run_id or "id"

    def send_rows(self, rows):
        SENT.extend(str(row.step) for row in rows)

    def send_image(self, path, tag, step):
        SENT.append(tag)

    def send_file(self, path):
        SENT.append(path.name)

    def finish(self):
        SENT.append("finish")


class Down(Store):
    name = "down"

    def send_rows(self, rows):
        raise ConnectionError("no\nroute")


@pytest.fixture(autouse=True)
def track(monkeypatch):
    """Return a function that starts the command; it returns the exit status."""
    TRACKERS.get("mlflow")
    monkeypatch.setattr(TRACKERS, "_table", {**TRACKERS._table, "store": Store, "down": Down})
    SENT.clear()
    return lambda *words: run_command("track", *words)


def test_a_run_without_trackers_is_sent_once(copied_run, track, capsys):
    assert track(copied_run, "LOG.TRACKERS", "store") == 0
    assert SENT == ["1", "2", "3", "4", "4", "5", "6", "7", "8", "8", "config.yaml", "results.json", "finish"]
    SENT.clear()
    assert track(copied_run, "LOG.TRACKERS", "store") == 0
    assert SENT == ["config.yaml", "results.json", "finish"] and capsys.readouterr().out == "store: connecting\n" * 2


def test_a_tracker_that_fails_does_not_stop_the_others(copied_run, track, capsys):
    assert track(copied_run, "LOG.TRACKERS", "[down, store]") == 2
    out, err = capsys.readouterr()
    assert out == "down: connecting\nstore: connecting\n" and SENT[-1] == "finish"
    assert "LOG.TRACKERS: down: ConnectionError: no route; OUT_DIR keeps" in err and "Traceback" not in err
    assert "store:" not in err


@each_row("words, message", [
    (["no_run"], "RUN: no such file: no_run/config.yaml; expected the OUT_DIR of a run"),
    (["{run}/checkpoints"], "checkpoints/config.yaml; expected the OUT_DIR of a run"),
    (["{run}"], "LOG.TRACKERS: got []; expected some of "),
    (["{run}", "LOG.TRACKERS", "[wandbb]"], "did you mean wandb?"),
    (["{run}", "--trackers", "store"], "no such flag: --trackers; did you mean LOG.TRACKERS store?"),
])  # fmt: skip
def test_mistakes_are_one_line(finished_run, track, capsys, words, message):
    assert track(*(word.format(run=finished_run) for word in words)) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err and not SENT
