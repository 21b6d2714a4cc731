"""Loader workers that died: the signal or the status, its likely cause and the fix."""

import signal

LESS_MEMORY = "set fewer TRAIN.WORKERS, DATA.WORKER_KIND thread or a smaller TRAIN.BATCH_SIZE"
# Any other signal is a crash in native code.
_MEANINGS = {
    "SIGKILL": f"the system may have run out of memory; fix: {LESS_MEMORY}",
    "SIGTERM": "another program terminated it",
}
_CRASH = "native code crashed, e.g. an image decoder; fix: set DATA.DECODER pil, or TRAIN.WORKERS 0 to find the image"


def describe_death(pid: int | None, exitcode: int | None) -> str:
    """Return the message for a worker that has ended with an exit code of `multiprocessing`."""
    if exitcode is None or exitcode >= 0:
        return f"loader worker (pid {pid}) ended with status {exitcode}; fix: set TRAIN.WORKERS 0 to find the cause"
    name = signal.Signals(-exitcode).name
    return f"loader worker (pid {pid}) was killed by {name}: {_MEANINGS.get(name, _CRASH)}"
