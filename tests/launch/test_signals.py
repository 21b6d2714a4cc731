"""The end of a process: a checkpoint that is being written is completed first."""

import os
import threading

import pytest

from distribuuuu.launch.signals import WRITER_NAME, end_process


@pytest.mark.parametrize("delay_s", [None, 0.1])
def test_a_checkpoint_writer_is_waited_for_even_if_it_is_only_about_to_start(monkeypatch, delay_s):
    written, statuses = [], []
    writer = threading.Thread(target=lambda: written.append(True), name=WRITER_NAME)
    if delay_s is None:
        writer.start()
    else:
        threading.Timer(delay_s, writer.start).start()
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), writer])
    monkeypatch.setattr(os, "_exit", statuses.append)
    end_process(7)
    assert written == [True] and statuses == [7]
