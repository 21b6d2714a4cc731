"""Processes and the machine around a run. Imports no torch.

- detect.py: the launcher, the rank and restarts, from environment variables. nproc.py: `--nproc N`.
- processes.py: child processes that die with their parent. pool.py: a pool whose results keep their order.
- signals.py: stops, immediate exit, stack dumps. ports.py: free ports. host.py: cores and memory.
"""
