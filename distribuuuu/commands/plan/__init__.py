"""Prediction of the hours, memory and disk of a run, and of the options that make it faster."""
