"""Prediction of the hours and memory of a run, and of the options that make it faster."""
