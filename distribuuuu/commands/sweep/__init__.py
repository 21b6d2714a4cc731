"""Searches of options by many runs, on this machine or as Slurm jobs."""
