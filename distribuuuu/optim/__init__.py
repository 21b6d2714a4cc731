"""Optimizers, parameter groups, learning-rate schedules, weight averaging, mixed precision."""
