"""Experiment trackers other than TensorBoard; deleted with the command track, which sends to them."""
