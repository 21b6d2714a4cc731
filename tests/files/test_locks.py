"""Locks on files: one holder at a time, until it closes the file."""

import os
import time

from distribuuuu.files.locks import lock_file, take_turn, try_lock


def test_a_lock_has_one_holder_at_a_time(tmp_path):
    path = tmp_path / "x.lock"
    first, second = (os.open(path, os.O_CREAT | os.O_RDWR) for _ in range(2))
    assert lock_file(first, 5.0) and try_lock(second) is False
    started = time.monotonic()
    assert lock_file(second, 0.1) is False and time.monotonic() - started >= 0.1
    os.close(first)
    assert lock_file(second, 5.0)
    os.close(second)


def test_a_turn_excludes_others_and_yields_the_time_of_the_file_system(tmp_path):
    with take_turn(tmp_path / "new" / "index.bin") as now_ns:
        assert abs(now_ns - time.time_ns()) < 60e9
        descriptor = os.open(tmp_path / "new" / "index.lock", os.O_RDWR)
        assert try_lock(descriptor) is False
    assert try_lock(descriptor)
    os.close(descriptor)
