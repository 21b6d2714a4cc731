"""Functions run on several processes, and free ports."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _enter(rank: int, num: int, port: int, function: Callable, arguments: tuple, pipe) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))


def on_processes(num: int, function: Callable, *arguments: Any) -> list[Any]:
    """Return function(*arguments) of `num` processes that see each other's launcher variables, by rank."""
    context, port, running = multiprocessing.get_context("fork"), free_port(), []
    for rank in range(num):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_enter, args=(rank, num, port, function, arguments, theirs))
        process.start()
        theirs.close()
        running.append((process, mine))
    answers = []
    for process, pipe in running:
        assert pipe.poll(120), "a process did not answer within 120 s"
        answers.append(pickle.loads(pipe.recv_bytes()))
        process.join()
    for ok, answer in answers:
        assert ok, answer
    return [answer for _, answer in answers]
