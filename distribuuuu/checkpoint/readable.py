"""Check that a checkpoint with the state of a task could be read."""

from io import BytesIO
from typing import Any

import torch

from distribuuuu.checkpoint.io import CheckpointError, verify_content


def check_readable(content: dict[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint with this state of a task could not be read, by doing so in memory."""
    buffer = BytesIO()
    try:
        torch.save(content, buffer)
        size = buffer.tell()
        buffer.seek(0)
        verify_content(torch.load(buffer, map_location="cpu", weights_only=True), size)
    except Exception as error:  # of any kind: pickling calls methods of the user's objects
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"a checkpoint cannot hold the state of the task: {reason:.200}") from None
