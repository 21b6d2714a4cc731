"""Modules and signals that Windows lacks: each module is imported without them."""

import pytest
from support.runs import run_python

CODE = """
import importlib, os, pkgutil, signal, sys
import asyncio, multiprocessing.pool, subprocess, timm, torch, torch.utils.tensorboard, torchvision, yaml, PIL.Image

for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty", "syslog"):
    sys.modules[name] = None
for name in ("SIGKILL", "SIGHUP", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGTSTP", "pthread_sigmask"):
    delattr(signal, name)
for name in ("sched_getaffinity", "sched_setaffinity", "fork", "killpg", "setsid", "getuid"):
    delattr(os, name)
import distribuuuu

for module in pkgutil.walk_packages(distribuuuu.__path__, "distribuuuu."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from pathlib import Path

if "distribuuuu.commands.sweep.local_executor" in sys.modules:
    from distribuuuu.commands.sweep.local_executor import LocalExecutor, is_locked

    LocalExecutor(1)
    assert not is_locked(Path("."))
print("imported")
"""


@pytest.mark.slow
def test_each_module_is_imported_without_what_windows_lacks():
    done = run_python("-c", CODE)
    assert done.stdout.endswith("imported\n"), done.stderr
