"""Checks of a data set before training: measurements, duplicates and findings. The core does not import it."""
