"""Measurement of the features of a run."""
