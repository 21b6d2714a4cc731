"""Processes and the machine around a run: the launcher, child processes, signals and ports. Imports no torch."""
