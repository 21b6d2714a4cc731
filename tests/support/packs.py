"""Packing in the process of a test; the test is skipped if the command was deleted."""

import pytest


def pack(out: object, *words: object, split: str = "train", workers: int = 0) -> None:
    """Run the packing command with these words."""
    packer = pytest.importorskip("distribuuuu.commands.pack.packer", reason="needs the command pack")
    from distribuuuu.commands.pack.pack import parse_args

    job = parse_args([str(word) for word in (out, "--split", split, "--workers", workers, *words)])
    for train in job.trains:
        packer.pack_split(job, train)
