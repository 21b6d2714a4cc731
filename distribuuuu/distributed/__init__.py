"""Distributed training: process group, collectives, DDP, sharding, watchdog."""
