"""Experiment trackers: services and local stores that show the curves of many runs.

- base.py: `Tracker`, which sends what a run has recorded from a thread of its own; spool.py: what has been sent.
- mlflow.py, trackio.py, wandb.py: one tracker each.
"""
