"""Packing in the process of a test."""

from distribuuuu.commands.pack.pack import parse_args
from distribuuuu.commands.pack.packer import pack_split


def pack(out: object, *words: object, split: str = "train", workers: int = 0) -> None:
    """Run the packing command with these words."""
    job = parse_args([str(word) for word in (out, "--split", split, "--workers", workers, *words)])
    for train in job.trains:
        pack_split(job, train)
