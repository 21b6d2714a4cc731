"""Distributed training, and all that imports torch.distributed: the process group, collectives, DDP, sharding."""
