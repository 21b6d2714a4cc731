"""Process group: devices and backends, rendezvous, missing processes."""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as torch_dist
from support.processes import free_port
from support.runs import run_python, run_tool, small_options

from distribuuuu.config import ConfigError
from distribuuuu.distributed import rendezvous
from distribuuuu.distributed.process_group import pick_device, process_group
from distribuuuu.distributed.rendezvous import MissingProcessError, create_store
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import find_port_problem
from distribuuuu.launch.nproc import without_nproc


def test_a_process_takes_its_own_card_or_the_only_one_it_sees(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for visible, local_rank, index in ((8, 3, 3), (1, 3, 0), (2, 1, 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert pick_device(local_rank) == torch.device("cuda", index) == chosen[-1]
    with pytest.raises(ConfigError, match="process 3 of this node has no GPU: 2 are visible"):
        pick_device(2)


def test_a_backend_that_the_device_lacks_is_an_error():
    group = process_group(Launch("test"), torch.device("cpu"), 10, "nccl")
    with pytest.raises(ConfigError, match="DIST.BACKEND: nccl needs CUDA"):
        group.__enter__()


def agree(store, world_size: int, seed: int) -> list[str]:
    """Return what each process takes for the name of this start; they come one after the other."""
    rng = random.Random(seed)

    def one(rank: int) -> str:
        time.sleep(rng.uniform(0, 0.1))
        return rendezvous._agree_on_start(store, Launch("test", rank, rank, world_size), timeout_s=60)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def test_what_an_earlier_start_left_in_the_store_is_not_taken_for_a_process():
    store, seen = torch_dist.HashStore(), set()
    for number, world_size in enumerate((3, 1, 2, 3)):
        names = agree(store, world_size, number)
        assert len(set(names)) == 1 and names[0] not in seen
        seen.add(names[0])
    store = torch_dist.HashStore()
    agree(store, 2, 0)  # an earlier start, of which process 1 left its name
    with pytest.raises(ConfigError, match="did not all join within 1 s"):
        rendezvous._agree_on_start(store, Launch("test", 0, 0, 2), timeout_s=1)


@pytest.mark.slow
def test_the_store_of_another_run_is_recognised():
    port = free_port()
    mine = Launch("test", 0, 0, 1, "127.0.0.1", port, "mine")
    store = create_store(mine, 5)  # noqa: F841  # keeps the port
    with pytest.raises(ConfigError, match=f"MASTER_PORT {port} on 127.0.0.1 is used by another run"):
        create_store(Launch("test", 1, 1, 2, "127.0.0.1", port, "another's"), 2)


def test_a_taken_port_is_an_error_with_a_fix():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_PORT {port} on 127.0.0.1: .*in use.*fix: set MASTER_PORT"):
            create_store(Launch("test", 0, 0, 2, "127.0.0.1", port), 2)
    assert find_port_problem("localhost", port) is None


def test_the_processes_get_the_command_without_nproc():
    for words, kept in [
        (["a.py", "--nproc", "2", "--cfg", "x"], ["a.py", "--cfg", "x"]),
        (["a.py", "--cfg", "x", "--nproc=4"], ["a.py", "--cfg", "x"]), (["a.py", "KEY", "2"], ["a.py", "KEY", "2"]),
    ]:  # fmt: skip
        assert without_nproc(words) == kept


def test_signals_are_heard_while_the_main_thread_waits():
    import signal

    from distribuuuu.launch.signals import handled_by

    heard, before = [], signal.getsignal(signal.SIGUSR1)
    came = threading.Event()

    def handler(signum: int) -> None:
        heard.append((signum, threading.current_thread() is threading.main_thread()))
        came.set()

    with handled_by(handler):
        with handled_by(lambda signum: heard.append("inner")):
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert came.wait(60)
    assert heard == ["inner", (signal.SIGUSR1, False)]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.slow
def test_an_error_is_printed_although_the_launcher_signals_for_the_ends_of_the_others():
    code = """
import os, signal
from distribuuuu.launch.signals import SignalState, exit_now, handled_by
try:
    with handled_by(exit_now):
        SignalState.current.is_ending = True
        raise ArithmeticError('the flux has run out')
finally:
    os.kill(os.getpid(), signal.SIGTERM)
"""
    done = run_python("-c", code)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ArithmeticError: the flux has run out")


@pytest.mark.slow
def test_a_process_that_never_comes_is_named():
    for rank, said in ((0, "missing: rank 1"), (1, "missing: rank 0: cannot connect to the rendezvous at 127.0.0.1:")):
        port = free_port()
        with pytest.raises(MissingProcessError, match=rf"within 2 s \(DIST.TIMEOUT_S\); 1 of 2 .* {said}") as caught:
            create_store(Launch("test", rank, rank, 2, "127.0.0.1", port, "mine"), 2)
        assert caught.value.one_process and caught.value.status == 1


@pytest.mark.slow
def test_a_run_without_one_of_its_processes_ends_without_a_traceback(image_folder, tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_tool("train_net.py", *small_options(image_folder, tmp_path / "out", "DIST.TIMEOUT_S", 3), **place)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "1 of 2 processes are missing: rank 1" in done.stderr
