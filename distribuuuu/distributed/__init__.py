"""Distributed training: the only package that imports torch.distributed.

- process_group.py: choose the device, join and leave the process group
- comm.py: rank, world size, collectives; `rank() == 0` is the main process
- ddp.py: the gradient all-reduce (DistributedDataParallel), its buckets and compression
- fsdp.py: DIST.SHARD fsdp: weights, gradients and optimizer state sharded, gradients reduce-scattered
- zero1.py: DIST.SHARD zero1: optimizer state sharded
- sync_batchnorm.py: batch norm statistics over all processes
- activation_checkpoint.py, model_blocks.py: recompute the activations of repeated blocks
- watchdog.py, watchdog_monitor.py: end all processes after one has died, failed or stalled
"""
