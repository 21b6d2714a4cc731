"""Timing of the parts of a training step."""
