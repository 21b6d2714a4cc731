"""Jobs on this machine: failures, kills, signals, cores, and a folder that is still in use."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.sweeps import make_sweep

from distribuuuu.commands.sweep.asha import MAX_KILLS, run_sweep
from distribuuuu.commands.sweep.executors import LocalExecutor, is_locked
from distribuuuu.commands.sweep.trials import Job, Sweep, build_rows
from distribuuuu.launch.signals import RunStopped

RECORD = '{"kind": "eval", "epoch": 2, "step": 5, "top1": 50.0}'
CHECKPOINT = "checkpoints/ckpt_ep_002.pth.tar"
FINISH = f"os.mkdir('checkpoints'); open('metrics.jsonl', 'w').write('{RECORD}'); open('{CHECKPOINT}', 'w')"
KILL = "open('starts', 'a').write('x'); os.kill(os.getpid(), 9)"
FAIL = "import sys; sys.exit('  - boom\\n')"
REPORT = "open('cores', 'w').write(str(sorted(os.sched_getaffinity(0)))); " + FINISH
SLEEP = "import time; print('begun', flush=True); time.sleep(60)"


@pytest.fixture
def scripted(monkeypatch):
    """Return scripted(out_dir, codes): a sweep whose runs execute Python code in their folders."""

    def make(out_dir, *codes: str) -> Sweep:
        monkeypatch.setattr("distribuuuu.commands.sweep.asha.POLL_S", 0.01)

        def job(self, trial: int, seed: int, epoch: int) -> Job:
            folder = self.folder(trial, seed)
            code = f"import os; os.chdir({str(folder)!r}); {self.trials[trial].values['code']}"
            return Job(trial, seed, epoch, folder, (sys.executable, "-I", "-S", "-c", code))

        monkeypatch.setattr(Sweep, "job", job)
        return make_sweep(out_dir, [{"code": code} for code in codes], epochs=2)

    return make


def test_failed_and_killed_runs_are_listed_and_the_rest_goes_on(scripted, tmp_path):
    before = os.sched_getaffinity(0)
    sweep = scripted(tmp_path, FAIL, KILL, REPORT, "pass")
    rows = {row.trial: row for row in build_rows(sweep, run_sweep(sweep, LocalExecutor(2)))}
    assert [rows[trial].status for trial in range(4)] == ["failed", "failed", "finished", "failed"]
    assert rows[0].failures == {0: "boom"} and (sweep.folder(0, 0) / "failed.txt").read_text() == "1\n"
    assert (sweep.folder(1, 0) / "starts").read_text() == "x" * MAX_KILLS
    assert (sweep.folder(3, 0) / "failed.txt").read_text() == "0\n", "it ended without an evaluation"
    assert rows[2].seeds == {0: 50.0} and os.sched_getaffinity(0) == before
    cores = len(sorted(before))
    assert len(eval((sweep.folder(2, 0) / "cores").read_text())) == max(1, cores // 2)
    (sweep.folder(0, 0) / "failed.txt").unlink()
    run_sweep(sweep, LocalExecutor(2))
    assert (sweep.folder(0, 0) / "console.log").read_text().count("boom") == 2, "it is tried again"
    assert (sweep.folder(1, 0) / "starts").read_text() == "x" * MAX_KILLS


def test_a_signal_to_the_sweep_ends_its_runs(scripted, tmp_path):
    sweep, executor = scripted(tmp_path, SLEEP, SLEEP, SLEEP), LocalExecutor(2)

    def interrupt() -> None:
        while not all((sweep.folder(trial, 0) / "console.log").is_file() for trial in (0, 1)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    begun = time.monotonic()
    with pytest.raises(RunStopped, match="SIGTERM"):
        run_sweep(sweep, executor)
    assert not executor.running and time.monotonic() - begun < 50
    assert not sweep.folder(2, 0).exists() and not (sweep.folder(0, 0) / "failed.txt").exists()


def test_a_folder_in_use_by_a_run_of_a_killed_sweep_is_waited_for(scripted, tmp_path):
    sweep = scripted(tmp_path, FINISH)
    folder = sweep.folder(0, 0)
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    assert not is_locked(folder), "a killed run leaves the file"
    code = f"import fcntl, time; file = open({str(folder / '.lock')!r}, 'r+'); fcntl.lockf(file, fcntl.LOCK_EX)"
    holder = subprocess.Popen([sys.executable, "-S", "-c", f"{code}; print('held', flush=True); time.sleep(60)"],
                              stdout=subprocess.PIPE)  # fmt: skip
    try:
        holder.stdout.readline()
        executor = LocalExecutor(1)
        assert is_locked(folder) and executor.update([sweep.job(0, 0, 2)]) == {} and not executor.running
    finally:
        holder.kill()
        holder.communicate()
    assert run_sweep(sweep, executor)[0, 0].values == {2: 50.0}
